"""Any detector as a scikit-learn outlier detector, for pipelines and grid searches.

scikit-learn's signs hold here and nowhere else: `predict` gives +1 for normal and -1 for anomalies, and scores are
higher for normal images.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from elsa.detectors import build
from elsa.errors import UserError
from elsa.trust.calibrate import lowest_false_alarms, score_threshold

USUAL_FALSE_ALARMS = 0.05
LARGEST_SEED = 2**31


class ElsaOutlierDetector(OutlierMixin, BaseEstimator):
    """A detector by name over rows of numbers (embeddings) or uint8 images [N, C, H, W].

    `y` holds label words ('normal', 'anomaly', '' for unlabelled) or is left out; numbers are refused, because their
    meaning differs between libraries. `false_alarms` is the share of normal images that `predict` may call anomalies:
    "auto" takes 5%, or the least that the held-out images support where they are few.
    """

    def __init__(
        self,
        detector: str = "knn",
        *,
        settings: dict[str, Any] | None = None,
        false_alarms: float | str = "auto",
        random_state: int | np.random.RandomState | None = 0,
        device: str = "cpu",
    ):
        self.detector = detector
        self.settings = settings
        self.false_alarms = false_alarms
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Sequence[str | None] | NDArray | None = None) -> "ElsaOutlierDetector":
        """Fit the detector and set the threshold from images it held out."""
        images = self._images(X, reset=True)
        words = [""] * len(images) if y is None else [_word(label) for label in y]
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(LARGEST_SEED)
        detector = build(self.detector, seed=int(seed), device=self.device, **(self.settings or {}))
        self.detector_ = detector.fit(images, words)
        self.offset_ = -score_threshold(detector.calibration_, self._rate(len(detector.calibration_)))
        return self

    def fit_predict(self, X: Any, y: Sequence[str | None] | NDArray | None = None) -> NDArray:
        """Fit and judge the same images: +1 normal, -1 anomaly."""
        return self.fit(X, y).predict(X)

    def score_samples(self, X: Any) -> NDArray:
        """Minus the anomaly score: higher is more normal."""
        check_is_fitted(self)
        return -self.detector_.anomaly_score(self._images(X, reset=False)).double().numpy()

    def decision_function(self, X: Any) -> NDArray:
        """score_samples minus offset_: below zero for the images that `predict` calls anomalies."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> NDArray:
        """+1 for normal images, -1 for anomalies at the false-alarm rate."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _rate(self, num_calibration: int) -> float:
        if isinstance(self.false_alarms, str):
            if self.false_alarms != "auto":
                raise UserError(f"false_alarms={self.false_alarms!r}: use 'auto' or a share between 0 and 1")
            return max(USUAL_FALSE_ALARMS, lowest_false_alarms(num_calibration))
        return self.false_alarms

    def _images(self, X: Any, reset: bool) -> Tensor:
        """Images as they are; everything else is checked by scikit-learn and becomes float32 rows."""
        if isinstance(X, Tensor):
            X = X.detach().cpu().numpy()
        if isinstance(X, np.ndarray) and X.ndim == 4:
            return self._pixels(X, reset)
        least = 2 if reset else 1  # one to learn from and one to calibrate with
        rows = validate_data(self, X, reset=reset, dtype=np.float32, ensure_min_samples=least, copy=True)
        return torch.from_numpy(rows)

    def _pixels(self, X: NDArray, reset: bool) -> Tensor:
        if X.dtype != np.uint8 or X.shape[1] not in (1, 3):
            raise UserError(
                f"X is {X.dtype} of shape {X.shape}: images must be uint8 [N, C, H, W] with 1 or 3 channels"
            )
        if reset:
            self.n_features_in_ = int(np.prod(X.shape[1:]))
        return torch.from_numpy(X.copy())


def _word(label: Any) -> Any:
    """The label as it is, so that elsa.labels can refuse numbers; NaN is how pandas writes a missing word."""
    return None if isinstance(label, float) and np.isnan(label) else label
