"""How many anomalies hide among the unlabelled images, with an interval that says what it rests on; and which.

With labels of both kinds the estimate rests on two assumptions: the labelled images of a kind score like the hidden
ones of that kind, and the log-odds of being an anomaly rise with the score along a line that may flatten as it rises.
Then the share at each score is p(s) = 1 / (1 + exp(-(a + b s))), its mean over the unlabelled images is the
contamination, and the labelled images say which lines are plausible: a labelled anomaly has density p(s) / rate
relative to the unlabelled images, a labelled normal image (1 - p(s)) / (1 - rate). docs/trust.md has the coverage on
simulated and real scores, and what no method can know.

Shape suffixes: U distinct unlabelled scores, A offsets a, L labelled images, G rates on a grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_expit, logit
from scipy.stats import beta, chi2, hypergeom, norm

from elsa.errors import UserError
from elsa.labels import UNLABELLED, encode_labels

LEAST_OF_EACH_KIND = 10
"""Fewer labels of a kind place its scores too loosely for an interval worth printing."""
FINEST = 1.03  # bins of scores grow by 3% from the highest down: a rate of 2% is known as finely as one of 20%
# A likelihood ratio is chi-square distributed only in the limit. With 50 labels of each kind its 95% cover 85 to 95% of
# 100 simulated sets; a quarter more covers what it says (docs/trust.md).
FINITE_SAMPLE = 1.25
SLOPES = np.concatenate([[1e-3], np.geomspace(0.1, 50, 27)])  # log-odds per standard deviation of the scores
LOWEST = -20.0  # standard deviations; what scores lower is as normal as can be
BENDS = (0.0, 0.2, 0.5)  # how much flatter the line gets with each standard deviation


@dataclass(frozen=True)
class Contamination:
    """The share of hidden anomalies among the unlabelled images, its interval, and what both rest on."""

    rate: float | None
    low: float
    high: float
    how: str

    def line(self) -> str:
        """One line for people, in percent."""
        interval = f"95% interval {100 * self.low:.1f}% to {100 * self.high:.1f}%"
        known = "hidden anomalies: not known" if self.rate is None else f"hidden anomalies: {100 * self.rate:.1f}%"
        return f"{known} of the unlabelled images ({interval}); {self.how}"


def estimate_contamination(
    scores_unlabelled: ArrayLike,
    scores_normal: ArrayLike,
    scores_anomaly: ArrayLike,
    confidence: float = 0.95,
    representative: bool = True,
) -> Contamination:
    """The share of anomalies among the unlabelled images, from scores of which none knew its image's own label.

    `elsa.trust.crossfit.crossfit_scores` makes such scores. With fewer than 10 labelled anomalies, or with labelled
    ones that are not of the kinds that hide (`representative=False`), there is a lower limit and no upper one; with
    fewer than 10 labelled normal images nothing is known.
    """
    unlabelled, normals, anomalies = map(_scores, (scores_unlabelled, scores_normal, scores_anomaly))
    if not len(unlabelled):
        raise UserError("there are no unlabelled images, so nothing can hide among them: leave some without a label")
    if len(normals) < LEAST_OF_EACH_KIND:
        missing = LEAST_OF_EACH_KIND - len(normals)
        return Contamination(None, 0.0, 1.0, f"label {missing} more normal images, or audit images drawn at random")
    if len(anomalies) < LEAST_OF_EACH_KIND:
        missing = LEAST_OF_EACH_KIND - len(anomalies)
        return _excess(unlabelled, normals, confidence, f"that takes {missing} more labelled anomalies")
    if not representative:
        return _excess(unlabelled, normals, confidence, "that takes labelled anomalies of all the kinds that may hide")
    rates_G, gains_G, _ = likelihood_of_rates(unlabelled, normals, anomalies)
    hidden = LEAST_OF_EACH_KIND + rates_G[gains_G.argmax()] * len(unlabelled)
    # The hidden anomalies are a sample themselves: 50 labelled ones compared with 50 hidden ones tell as much as 25
    # compared with all there are.
    weight = float(hidden / (hidden + len(anomalies)))
    rates_G, gains_G, spread_G = likelihood_of_rates(unlabelled, normals, anomalies, weight)
    best = int(gains_G.argmax())
    plausible = np.flatnonzero(2 * (gains_G[best] - gains_G) <= FINITE_SAMPLE * chi2.ppf(confidence, 1))
    z = norm.isf((1 - confidence) / 2)
    first, last = plausible[0], plausible[-1]
    rate = float(rates_G[best])
    low = rate - math.hypot(rate - rates_G[first], z * spread_G[first])
    high = rate + math.hypot(rates_G[last] - rate, z * spread_G[last])
    counted = f"{len(normals):,} labelled normal images and {len(anomalies):,} labelled anomalies"
    return Contamination(
        rate, max(0.0, low), min(1.0, high), f"if hidden anomalies are of the kinds labelled; from {counted}"
    )


def audited_contamination(anomalies: int, audited: int, unlabelled: int, confidence: float = 0.95) -> Contamination:
    """The exact interval from images drawn at random from the unlabelled ones and labelled whatever they show.

    `unlabelled` counts all of them, the audited ones included. No detector is involved and nothing is assumed.
    """
    if not 0 <= anomalies <= audited <= unlabelled or not unlabelled:
        raise UserError(
            f"{anomalies} anomalies among {audited} audited of {unlabelled} images: each number must be at least 0 "
            f"and at most the next; count the audited images among the unlabelled ones"
        )
    if not audited:
        return Contamination(None, 0.0, 1.0, "no image was audited")
    tail = (1 - confidence) / 2
    hidden = np.arange(anomalies, unlabelled - (audited - anomalies) + 1)  # what the audit has not ruled out
    low = hidden[hypergeom.sf(anomalies - 1, unlabelled, hidden, audited) >= tail][0]
    high = hidden[hypergeom.cdf(anomalies, unlabelled, hidden, audited) >= tail][-1]
    how = f"exact, from an audit of {audited:,} images drawn at random, {anomalies:,} of them anomalies"
    return Contamination(anomalies / audited, float(low / unlabelled), float(high / unlabelled), how)


def suspects(scores: ArrayLike, words: Sequence[str | None], rate: float) -> NDArray[np.int64]:
    """Positions of the unlabelled images that score highest, highest first: as many as the rate says hide there."""
    if not 0 <= rate <= 1:
        raise UserError(f"rate={rate}: a share from 0 to 1 is allowed, e.g. the `rate` of a Contamination")
    values, codes = _scores(scores), encode_labels(words).numpy()
    if len(values) != len(codes):
        raise UserError(f"{len(values):,} scores and {len(codes):,} labels: give one label (or '') for each score")
    unlabelled = np.flatnonzero(codes == UNLABELLED)
    ranked = unlabelled[np.argsort(-values[unlabelled], kind="stable")]
    return ranked[: round(rate * len(ranked))]


def likelihood_of_rates(
    unlabelled: NDArray, normals: NDArray, anomalies: NDArray, weight: float = 1.0
) -> tuple[NDArray, NDArray, NDArray]:
    """Rates on a grid, the log-likelihood of each under its best line, and the spread of the true share around it.

    `weight` is what a labelled anomaly counts. The spread is that of a share that arose by chance among so many images.
    """
    score_U, weight_U = _binned(unlabelled)
    centre, scale = np.median(unlabelled), _spread(unlabelled)
    least = 0.1 / len(unlabelled)
    rates_G = np.concatenate([[0.0], np.geomspace(least, 0.5, 160), 1 - np.geomspace(0.5, least, 80)[1:]])
    odds_G = logit(np.maximum(rates_G, least / 10))
    gains_G = np.full(len(rates_G), -np.inf)
    for bend in BENDS:
        s_U, normal_L, anomaly_L = (bent((x - centre) / scale, bend) for x in (score_U, normals, anomalies))
        for slope in SLOPES:
            a_A = _offsets(slope, s_U, least)
            rate_A = expit(a_A[:, None] + slope * s_U) @ weight_U
            rest_A = expit(-a_A[:, None] - slope * s_U) @ weight_U
            gain_A = log_expit(a_A[:, None] + slope * anomaly_L).sum(axis=1) - len(anomaly_L) * np.log(rate_A)
            gain_A = weight * gain_A + log_expit(-a_A[:, None] - slope * normal_L).sum(axis=1)
            gain_A -= len(normal_L) * np.log(rest_A)
            odds_A = np.log(rate_A) - np.log(rest_A)  # in these the likelihood is nearly straight
            gains_G = np.maximum(gains_G, np.interp(odds_G, odds_A, gain_A))
    return rates_G, gains_G, np.sqrt(rates_G * (1 - rates_G) / len(unlabelled))


def bent(scores: NDArray, bend: float) -> NDArray:
    """Scores on a scale that gets finer by e^-bend with each standard deviation; the same order, the same at 0."""
    scores = np.maximum(scores, LOWEST)
    return -np.expm1(-bend * scores) / bend if bend else scores


def _excess(unlabelled: NDArray, normals: NDArray, confidence: float, takes: str) -> Contamination:
    """What scores above every labelled normal image, beyond what so many normal images can miss by chance."""
    above = float((unlabelled > normals.max()).mean())
    usual, most = 1 / (len(normals) + 1), float(beta.ppf(confidence, 1, len(normals)))
    rate, low = (max(0.0, (above - missed) / (1 - missed)) for missed in (usual, most))
    how = f"only those that score above all of {len(normals):,} labelled normal images, and no upper limit: {takes}"
    return Contamination(rate, low, 1.0, how)


def _offsets(slope: float, score_U: NDArray, least: float) -> NDArray:
    """Offsets at which the mean of p runs from below `least` to above 1 - `least`."""
    room = -math.log(least) + 2
    below = -slope * score_U[-1] - np.linspace(0, room, 30)
    above = -slope * score_U[0] + np.linspace(0, room, 15)
    return np.unique(np.concatenate([below, -slope * score_U[::-3], above]))


def _binned(scores: NDArray) -> tuple[NDArray, NDArray]:
    """Mean scores of bins, lowest first, and their weights; the highest scores have a bin each."""
    ordered = np.sort(scores)[::-1]
    steps = math.log(len(ordered) + 1, FINEST)
    edges = np.unique(np.geomspace(1, len(ordered) + 1, math.ceil(steps) + 1).round().astype(int)) - 1
    means = np.add.reduceat(ordered, edges[:-1]) / np.diff(edges)
    return means[::-1], np.diff(edges)[::-1] / len(ordered)


def _spread(scores: NDArray) -> float:
    """The standard deviation as the middle 80% show it: far anomalies do not stretch it."""
    low, high = np.quantile(scores, [0.1, 0.9])
    return max(float(high - low) / 2.563, 1e-12)


def _scores(values: ArrayLike) -> NDArray:
    scores = np.asarray(values, dtype=np.float64)
    assert scores.ndim == 1, scores.shape
    assert np.isfinite(scores).all(), "a score that is not finite would count as the strongest suspect"
    return scores
