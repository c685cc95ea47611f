"""Nearest neighbours and logistic regression: what embeddings know by themselves, and what the labels alone know."""

import math
from collections.abc import Sequence

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import normalize

from elsa.detectors.inputs import LEAST_HELD_OUT, Images, as_rows, checked, hold_out, kind_of, not_anomalies, scored
from elsa.detectors.shallow import squared_distances
from elsa.errors import UserError
from elsa.labels import ANOMALY, NORMAL, UNLABELLED
from elsa.progress import Progress, silent

METRICS = ("auto", "cosine", "euclidean")


class KNNDetector:
    """Mean distance to the nearest normal and unlabelled training images.

    Embeddings are compared by cosine and not centred: centring them costs 17 points of AUROC on CIFAR-10. Pixels are
    compared by Euclidean distance, as the cosine cannot tell dark from bright.
    """

    def __init__(
        self, *, seed: int = 0, device: str = "cpu", progress: Progress = silent, k: int = 5, metric: str = "auto"
    ):
        if k < 1:
            raise UserError(f"k={k}: at least 1 neighbour is needed; the usual number is 5")
        if metric not in METRICS:
            raise UserError(f"metric={metric!r}: use one of {', '.join(METRICS)}")
        self.seed, self.device, self.progress, self.k, self.metric = seed, device, progress, k, metric

    def fit(self, images: Images, labels: Sequence[str | None]) -> "KNNDetector":
        """Keep everything but labelled anomalies to compare with."""
        train, held_out = hold_out(not_anomalies(checked(images, labels)), self.seed)
        by_kind = "cosine" if kind_of(images) == "vectors" else "euclidean"
        self.metric_ = by_kind if self.metric == "auto" else self.metric
        rows_ND = as_rows(images, train).to(self.device)
        self.num_features_ = rows_ND.shape[1]
        self.rows_ND_ = self._prepared(rows_ND)
        self.calibration_ = scored(as_rows(images, held_out), self.num_features_, self._score)
        self.progress("fit", 1, 1, {})
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """Mean distance to the k nearest training images; higher is more anomalous."""
        return scored(images, self.num_features_, self._score)

    def _score(self, rows_BD: Tensor) -> Tensor:
        distances_BN = squared_distances(self._prepared(rows_BD.to(self.device)), self.rows_ND_)
        nearest_Bk = distances_BN.topk(min(self.k, len(self.rows_ND_)), dim=1, largest=False).values
        # of unit vectors: |a - b|^2 / 2 = 1 - cos
        return (nearest_Bk / 2 if self.metric_ == "cosine" else nearest_Bk.sqrt()).mean(dim=1).cpu()

    def _prepared(self, rows_ND: Tensor) -> Tensor:
        return normalize(rows_ND.double(), dim=1) if self.metric_ == "cosine" else rows_ND.double()


class LogisticDetector:
    """Logistic regression of the labelled anomalies against the labelled normals; unlabelled images only calibrate."""

    def __init__(self, *, seed: int = 0, device: str = "cpu", progress: Progress = silent, strength: float = 1.0):
        if not 0 < strength < math.inf:
            raise UserError(f"strength={strength}: the inverse of the regularisation must be finite and above 0")
        self.seed, self.device, self.progress, self.strength = seed, device, progress, strength

    def fit(self, images: Images, labels: Sequence[str | None]) -> "LogisticDetector":
        """Learn from the labelled images; needs both kinds."""
        codes = checked(images, labels)
        normals = (codes == NORMAL).nonzero().flatten()
        anomalies = (codes == ANOMALY).nonzero().flatten()
        held_out = (codes == UNLABELLED).nonzero().flatten()
        if not len(normals) or not len(anomalies):
            raise UserError(
                f"logistic learns from labels alone: {len(normals)} are 'normal' and {len(anomalies)} 'anomaly'; "
                f"label some of both kinds, or use another detector"
            )
        if len(held_out) < LEAST_HELD_OUT:  # too few images it does not learn from anyway
            normals, more = hold_out(normals, self.seed)
            held_out = torch.cat([held_out, more])
        train = torch.cat([normals, anomalies])
        rows_ND, is_anomaly = as_rows(images, train), (codes[train] == ANOMALY)
        self.num_features_ = rows_ND.shape[1]
        model = LogisticRegression(C=self.strength, class_weight="balanced", max_iter=10_000)
        self.model_ = model.fit(rows_ND.double().numpy(), is_anomaly.numpy())
        self.calibration_ = self._score(as_rows(images, held_out))
        self.progress("fit", 1, 1, {})
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """Log-odds of being an anomaly; higher is more anomalous."""
        return scored(images, self.num_features_, self._score)

    def _score(self, rows_BD: Tensor) -> Tensor:
        return torch.from_numpy(self.model_.decision_function(rows_BD.double().numpy()))
