"""From scores to p-values and verdicts at the false-alarm rate a user sets, by images held out of the training.

Split-conformal: a normal image's score is exchangeable with those of held-out normal images, so its rank among them is
uniform, whatever the detector. Ties count against an alarm. Hidden anomalies among the held-out images raise the
p-values, as long as the detector scores them higher than normal images: pollution then costs detections but adds no
false alarms.

Over a batch, Benjamini and Hochberg's rule bounds the share of false ones among all alarms instead. P-values that share
their held-out images are not independent but positively dependent, for which the rule holds as well.
"""

import math
from collections.abc import Iterable

import torch
from scipy.stats import beta
from torch import Tensor

from elsa.errors import UserError

ROUNDING = 1e-12  # .1 * 3 / 100 is not exactly 3 / 1000 in floats, and equality has to count


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


def discoveries(p: Tensor, fdr: float) -> Tensor:
    """A mask of the images to call anomalies so that on average at most `fdr` of the called ones are normal.

    Benjamini and Hochberg: the k smallest p-values, for the largest k of which all are at most fdr * k / N.
    """
    check_fdr(fdr)
    assert p.ndim == 1
    if not len(p):
        return torch.zeros(0, dtype=torch.bool)
    ordered = p.detach().cpu().double().sort().values
    rank = torch.arange(1, len(p) + 1, dtype=torch.float64)
    passing = (ordered <= fdr * rank / len(p) * (1 + ROUNDING)).nonzero().flatten()
    limit = ordered[passing[-1]] if len(passing) else -1.0
    return p.detach().cpu().double() <= limit


def discovery_threshold(batches: Iterable[Tensor], calibration: Tensor, fdr: float) -> float:
    """The score above which, strictly, `discoveries` calls an image; infinite if it calls none.

    The scores may come in batches: only how many beat each held-out score is kept.
    """
    check_fdr(fdr)
    ordered = _ordered(calibration)
    at_level = torch.zeros(len(ordered) + 1, dtype=torch.long)
    for scores in batches:
        as_high = len(ordered) - torch.searchsorted(ordered, scores.detach().cpu().double())
        at_level += torch.bincount(as_high, minlength=len(at_level))
    called, total = at_level.cumsum(0), int(at_level.sum())
    p = torch.arange(1, len(at_level) + 1, dtype=torch.float64) / len(at_level)
    passing = ((called > 0) & (p <= fdr * called / max(1, total) * (1 + ROUNDING))).nonzero().flatten()
    if not len(passing):
        return math.inf
    level = int(passing[-1])
    return -math.inf if level == len(ordered) else float(ordered[len(ordered) - 1 - level])


def check_fdr(fdr: float) -> None:
    """Refuse what is not a share of false discoveries."""
    if not 0 < fdr < 1:
        raise UserError(f"--fdr {fdr}: a share above 0 and below 1 is allowed, e.g. 0.1 for one false alarm in ten")


def least_discoveries(num_calibration: int, num_images: int, fdr: float) -> int:
    """How many images must beat every held-out one before `discoveries` can call any of so many images."""
    return math.ceil(num_images / (fdr * (num_calibration + 1)) - 1e-9)


def false_alarms_if_polluted(false_alarms: float, low: float, high: float) -> tuple[float, float]:
    """What the share of false alarms among normal images is at least and at most, if anomalies are in the calibration.

    `low` and `high` bound their share there (a Contamination). The least is reached if all of them score above the
    threshold; the most is the rate asked for, if they score like normal images.
    """
    if not 0 <= low <= high <= 1:
        raise UserError(f"contamination from {low} to {high}: shares with 0 <= low <= high <= 1 are allowed")
    return max(0.0, (false_alarms - high) / (1 - high)) if high < 1 else 0.0, false_alarms


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
