"""From scores to p-values and verdicts at the false-alarm rate a user sets, by images held out of the training.

Split-conformal: a normal image's score is exchangeable with those of held-out normal images, so its rank among them is
uniform, whatever the detector. Ties count against an alarm. Hidden anomalies among the held-out images raise the
p-values, as long as the detector scores them higher than normal images: pollution then costs detections but adds no
false alarms.
"""

import math

import torch
from scipy.stats import beta
from torch import Tensor

from elsa.errors import UserError


def p_values(scores: Tensor, calibration: Tensor) -> Tensor:
    """(1 + number of calibration scores at least as high) / (n + 1), one per score, float64; small means anomalous."""
    ordered = _ordered(calibration)
    assert scores.isfinite().all(), "a NaN would pass for the strongest alarm"
    as_high = len(ordered) - torch.searchsorted(ordered, scores.detach().cpu().double())
    return (1 + as_high).double() / (len(ordered) + 1)


def score_threshold(calibration: Tensor, false_alarms: float) -> float:
    """The score above which, strictly, an image is called an anomaly: exactly where its p-value is <= false_alarms."""
    ordered = _ordered(calibration)
    highest_allowed = _alarms_among(len(ordered), false_alarms)
    return float(ordered[len(ordered) - highest_allowed])


def verdicts(scores: Tensor, threshold: float) -> list[str]:
    """The word `anomaly` or `normal` for each score."""
    return ["anomaly" if score > threshold else "normal" for score in scores.double().tolist()]


def lowest_false_alarms(num_calibration: int) -> float:
    """The smallest false-alarm rate that so many held-out images can support."""
    return 1 / (num_calibration + 1)


def false_alarm_range(num_calibration: int, false_alarms: float, confidence: float = 0.95) -> tuple[float, float]:
    """Where the share of false alarms lies with one calibration set; over all such sets its mean is the rate asked for.

    It is Beta(k, n + 1 - k) distributed, k being the threshold's rank from the top: 99 held-out images and a rate of 5%
    give 1.7% to 10.0%.
    """
    k = _alarms_among(num_calibration, false_alarms)
    tail = (1 - confidence) / 2
    low, high = beta.ppf([tail, 1 - tail], k, num_calibration + 1 - k)
    return float(low), float(high)


def _alarms_among(num_calibration: int, false_alarms: float) -> int:
    """The largest k with k / (n + 1) <= false_alarms, which is also the threshold's rank from the top."""
    if not 0 < false_alarms < 1:
        raise UserError(f"--false-alarms {false_alarms}: a share above 0 and below 1 is allowed, e.g. 0.05 for 5%")
    total = num_calibration + 1
    k = int(false_alarms * total)
    k += (k + 1) / total <= false_alarms  # .29 * 100 is 28.999999999999996
    if k == 0:
        needed = math.ceil(1 / false_alarms - 1e-9) - 1
        digits = len(str(total)) + 1
        possible = math.ceil(10**digits / total) / 10**digits  # rounded up: a lower rate would be refused again
        raise UserError(
            f"--false-alarms {false_alarms:g} takes at least {needed:,} images held out for calibration, there are "
            f"{num_calibration:,}: use {possible:g} or more, or fit on more images"
        )
    return k


def _ordered(calibration: Tensor) -> Tensor:
    assert calibration.ndim == 1
    assert calibration.isfinite().all()
    if not len(calibration):
        raise UserError("this model has no held-out images to calibrate on: fit on more normal or unlabelled images")
    return calibration.detach().cpu().double().sort().values
