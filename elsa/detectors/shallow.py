"""The shallow detectors of the paper's tables, on raw pixels in [0, 1] or on vectors as they are.

They learn from everything but labelled anomalies and choose their settings without looking at any label.
"""

import math
from collections.abc import Sequence

import torch
from sklearn.ensemble import IsolationForest
from sklearn.svm import OneClassSVM
from torch import Tensor

from elsa.detectors.inputs import Images, as_rows, checked, hold_out, not_anomalies, scored, subsample
from elsa.errors import UserError
from elsa.progress import Progress, silent

MOST_TRAINED_ON = 10_000  # time and memory of oc-svm grow with the square; the paper's sets have 5,547 images
MOST_SELECTED_ON = 2_000  # a bandwidth or a median needs no more, and all pairs of 2,000 take a second


class OneClassSVMDetector:
    """One-class SVM with an RBF kernel; gamma is one over the median squared distance between training images."""

    def __init__(
        self,
        *,
        seed: int = 0,
        device: str = "cpu",
        progress: Progress = silent,
        nu: float = 0.1,
        gamma: float | None = None,
    ):
        if not 0 < nu <= 1:
            raise UserError(f"nu={nu}: the share of training images left outside must be above 0 and at most 1")
        if gamma is not None and not 0 < gamma < math.inf:
            raise UserError(f"gamma={gamma}: use a finite number above 0, or leave it out to have it chosen")
        self.seed, self.device, self.progress, self.nu, self.gamma = seed, device, progress, nu, gamma

    def fit(self, images: Images, labels: Sequence[str | None]) -> "OneClassSVMDetector":
        """Learn the boundary of everything but labelled anomalies."""
        train, held_out = hold_out(not_anomalies(checked(images, labels)), self.seed)
        rows_ND = as_rows(images, subsample(train, MOST_TRAINED_ON, self.seed))
        self.num_features_ = rows_ND.shape[1]
        self.gamma_ = self.gamma or 1 / median_squared_distance(_some(rows_ND, self.seed))
        self.svm_ = OneClassSVM(nu=self.nu, gamma=self.gamma_, cache_size=500).fit(rows_ND.numpy())
        self.calibration_ = self._score(as_rows(images, held_out))
        self.progress("fit", 1, 1, {"gamma": self.gamma_})
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """How far outside the boundary each image lies; higher is more anomalous."""
        return scored(images, self.num_features_, self._score)

    def _score(self, rows_BD: Tensor) -> Tensor:
        return -torch.from_numpy(self.svm_.decision_function(rows_BD.numpy()))


class IsolationForestDetector:
    """Isolation forest with the settings of its paper; there is nothing to choose."""

    def __init__(self, *, seed: int = 0, device: str = "cpu", progress: Progress = silent, num_trees: int = 100):
        if num_trees < 1:
            raise UserError(f"num_trees={num_trees}: at least 1 tree is needed; the usual number is 100")
        self.seed, self.device, self.progress, self.num_trees = seed, device, progress, num_trees

    def fit(self, images: Images, labels: Sequence[str | None]) -> "IsolationForestDetector":
        """Grow trees on everything but labelled anomalies."""
        train, held_out = hold_out(not_anomalies(checked(images, labels)), self.seed)
        rows_ND = as_rows(images, subsample(train, MOST_TRAINED_ON, self.seed))
        self.num_features_ = rows_ND.shape[1]
        self.forest_ = IsolationForest(n_estimators=self.num_trees, random_state=self.seed).fit(rows_ND.numpy())
        self.calibration_ = self._score(as_rows(images, held_out))
        self.progress("fit", 1, 1, {})
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """How few random cuts isolate each image; higher is more anomalous."""
        return scored(images, self.num_features_, self._score)

    def _score(self, rows_BD: Tensor) -> Tensor:
        return -torch.from_numpy(self.forest_.score_samples(rows_BD.numpy())).double()


class KDEDetector:
    """Gaussian kernel density; the bandwidth maximises the likelihood of each training image given the others.

    One matrix product and a log-sum-exp: scikit-learn's trees cannot prune in hundreds of dimensions and take minutes.
    """

    def __init__(
        self, *, seed: int = 0, device: str = "cpu", progress: Progress = silent, bandwidth: float | None = None
    ):
        if bandwidth is not None and not 0 < bandwidth < math.inf:
            raise UserError(f"bandwidth={bandwidth}: use a finite number above 0, or leave it out to have it chosen")
        self.seed, self.device, self.progress, self.bandwidth = seed, device, progress, bandwidth

    def fit(self, images: Images, labels: Sequence[str | None]) -> "KDEDetector":
        """Keep everything but labelled anomalies and choose the bandwidth."""
        train, held_out = hold_out(not_anomalies(checked(images, labels)), self.seed)
        self.rows_ND_ = as_rows(images, subsample(train, MOST_TRAINED_ON, self.seed)).to(self.device).double()
        self.num_features_ = self.rows_ND_.shape[1]
        self.bandwidth_ = self.bandwidth or likeliest_bandwidth(_some(self.rows_ND_, self.seed))
        self.calibration_ = scored(as_rows(images, held_out), self.num_features_, self._score)
        self.progress("fit", 1, 1, {"bandwidth": self.bandwidth_})
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """Minus the log density at each image; higher is more anomalous."""
        return scored(images, self.num_features_, self._score)

    def _score(self, rows_BD: Tensor) -> Tensor:
        distances_BN = squared_distances(rows_BD.to(self.device), self.rows_ND_)
        return -log_density(distances_BN, self.bandwidth_, len(self.rows_ND_), self.num_features_).cpu()


def squared_distances(x_BD: Tensor, y_ND: Tensor) -> Tensor:
    """All squared Euclidean distances, float64: float32 loses near neighbours to the cancellation."""
    x_BD, y_ND = x_BD.double(), y_ND.double()
    return (x_BD.square().sum(1)[:, None] + y_ND.square().sum(1) - 2 * x_BD @ y_ND.T).clamp_min(0)


def median_squared_distance(rows_ND: Tensor) -> float:
    """The median over all pairs; 1 where all rows are equal, as any kernel width will do for them."""
    pairs = squared_distances(rows_ND, rows_ND)[torch.triu_indices(len(rows_ND), len(rows_ND), 1).unbind()]
    return float(pairs.median()) or 1.0 if len(pairs) else 1.0


def log_density(distances_BN: Tensor, bandwidth: float, num_kernels: int, num_features: int) -> Tensor:
    """Log of the mean of num_kernels Gaussian kernels; a distance of infinity leaves its kernel out of the sum."""
    height = -num_features / 2 * math.log(2 * math.pi * bandwidth**2)
    return torch.logsumexp(-distances_BN / (2 * bandwidth**2), dim=1) - math.log(num_kernels) + height


def likeliest_bandwidth(rows_ND: Tensor) -> float:
    """The bandwidth, of sixteen, under which each row is likeliest given the others (leave-one-out cross-validation).

    A single Gaussian at distance d in D dimensions is likeliest at bandwidth d / sqrt(D), so the sixteen reach from
    half that of the nearest neighbours to that of the median pair. Copies are left out: they would draw it to zero.
    """
    num_rows, num_features = rows_ND.shape
    distances_NN = squared_distances(rows_ND, rows_ND)
    tiny = 1e-9 * float(distances_NN.max())
    distances_NN[distances_NN <= tiny] = math.inf  # the row itself and its copies
    nearest = distances_NN.min(dim=1).values
    has_neighbour = nearest.isfinite()
    if not has_neighbour.any():
        return 1.0  # all rows are equal: any bandwidth ranks the same way
    lowest = math.sqrt(float(nearest[has_neighbour].median()) / num_features) / 2
    highest = math.sqrt(float(distances_NN[distances_NN.isfinite()].median()) / num_features)
    candidates = [lowest * (highest / lowest) ** (step / 15) for step in range(16)]
    return max(
        candidates,
        key=lambda h: float(log_density(distances_NN[has_neighbour], h, num_rows - 1, num_features).mean()),
    )


def _some(rows_ND: Tensor, seed: int) -> Tensor:
    return rows_ND[subsample(torch.arange(len(rows_ND)), MOST_SELECTED_ON, seed)]
