"""Drift: do the images of today score like the images the model was calibrated on?

The scores of the last images are compared with those of the calibration by the Kolmogorov-Smirnov statistic, the
largest distance of the two distribution functions. It sees more anomalies, a moved camera and a dirty lens alike, and
says nothing about which: the alarm asks a person to look.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ks_2samp
from torch import Tensor

LAST = 1000
FEWEST = 200  # below it a run of similar images raises alarms
EVERY = 50
# Far apart, so that an alarm does not flicker; so small, because the question is asked every 50 images for years.
RAISED_BELOW, CLEARED_ABOVE = 1e-5, 1e-2


@dataclass(frozen=True)
class Drift:
    """How the last scores compare with the calibration."""

    images: int
    """Scores compared."""
    distance: float | None
    """Kolmogorov-Smirnov statistic, 0 to 1."""
    p_value: float | None
    """How often chance alone would put them so far apart, if images came one by one and unrelated."""
    mean_p_value: float | None
    """Near 0.5 without drift; lower: the images look more anomalous, higher: more normal."""
    alarm: bool


class DriftWatch:
    """Remembers the last scores of one model."""

    def __init__(self, calibration: Tensor) -> None:
        self.calibration: NDArray[np.float64] = np.sort(calibration.detach().cpu().double().numpy())
        self.scores: deque[float] = deque(maxlen=LAST)
        self.p_values: deque[float] = deque(maxlen=LAST)
        self.unseen = 0
        self.now = Drift(0, None, None, None, False)

    def add(self, scores: list[float], p_values: list[float]) -> bool:
        """Note new scores; whether the alarm was raised or cleared by them."""
        self.scores.extend(scores)
        self.p_values.extend(p_values)
        self.unseen += len(scores)
        if len(self.scores) < FEWEST or self.unseen < EVERY:
            return False
        self.unseen = 0
        before = self.now.alarm
        self.now = self.compare()
        return self.now.alarm != before

    def compare(self) -> Drift:
        """The comparison of what is remembered now."""
        found = ks_2samp(np.fromiter(self.scores, float), self.calibration, method="asymp")
        limit = CLEARED_ABOVE if self.now.alarm else RAISED_BELOW
        return Drift(
            images=len(self.scores),
            distance=float(found.statistic),
            p_value=float(found.pvalue),
            mean_p_value=float(np.mean(self.p_values)),
            alarm=bool(found.pvalue < limit),
        )

    def about(self) -> dict[str, Any]:
        """For /drift and the log."""
        return {**vars(self.now), "images": len(self.scores), "calibrated_on": len(self.calibration)}
