"""Any detector as a PyOD detector: 0 for normal images and 1 for anomalies, higher scores for anomalies.

PyOD's thresholds hold here: `contamination` is the share of the training rows that are called anomalies.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pyod.models.base import BaseDetector
from sklearn.utils.validation import check_array, check_is_fitted

from elsa.detectors import build
from elsa.errors import UserError
from elsa.head import ElsaHead


class ElsaPyOD(BaseDetector):
    """A detector by name over rows of numbers (embeddings, say).

    `y` is ignored, as PyOD wants it of unsupervised detectors, unless it holds label words ('normal', 'anomaly' or ''
    for unlabelled).
    """

    def __init__(
        self,
        detector: str = "knn",
        contamination: float = 0.1,
        settings: dict[str, Any] | None = None,
        random_state: int = 0,
        device: str = "cpu",
    ):
        super().__init__(contamination=contamination)
        self.detector = detector
        self.settings = settings
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Sequence[str | None] | NDArray | None = None) -> "ElsaPyOD":
        """Fit the detector; sets decision_scores_, threshold_ and labels_ of the training rows."""
        rows = _rows(X)
        words = [""] * len(rows) if y is None or not _are_words(y) else list(y)
        self._set_n_classes(None)
        seeded = build(self.detector, seed=self.random_state, device=self.device, **(self.settings or {}))
        self.detector_ = seeded.fit(rows, words)
        self.n_features_in_ = rows.shape[1]
        own = (
            self.detector_.train_scores_ if isinstance(self.detector_, ElsaHead) else self.detector_.anomaly_score(rows)
        )
        self.decision_scores_ = own.double().numpy()  # elsa-head's are those in which no row is its own neighbour
        self._process_decision_scores()
        return self

    def decision_function(self, X: Any) -> NDArray:
        """The anomaly scores; higher is more anomalous."""
        check_is_fitted(self, ["detector_"])
        rows = _rows(X)
        if rows.shape[1] != self.n_features_in_:
            raise UserError(f"X has {rows.shape[1]} features, the detector was fitted on {self.n_features_in_}")
        return self.detector_.anomaly_score(rows).double().numpy()


def _rows(X: Any) -> torch.Tensor:
    return torch.from_numpy(check_array(X, dtype=np.float32, copy=True))


def _are_words(labels: Any) -> bool:
    return all(label is None or isinstance(label, str) for label in labels)
