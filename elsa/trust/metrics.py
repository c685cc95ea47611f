"""How well scores separate anomalies from normal images, with intervals, and silence where labels are too few.

Shape suffixes: R bootstrap replicates, G distinct anomaly scores (highest first), B = 2G+1 bins of normal scores.
Higher scores are more anomalous. docs/metrics.md states the conventions and where the minimal counts come from.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elsa.errors import UserError
from elsa.labels import ANOMALY, NORMAL, UNLABELLED, encode_labels

RECALL = 0.95
REPLICATES = 1000
# With 9 and 9 even a perfect ranking has a lower limit of AUROC just above one half, so fewer can never show anything;
# benchmarks/interval_coverage.py shows the intervals of AUROC and AUPR hold from 10 of each kind.
LEAST_OF_EACH_KIND = 10
MOST_LEVELS = (
    5_000  # more distinct scores cost seconds and move an interval's ends by less than its own Monte Carlo error
)
NUMBERS_PER_CHUNK = 4_000_000  # 32 MB of float64 for each temporary array, whatever the number of scores


@dataclass(frozen=True)
class Figure:
    """One figure with its interval; where labels are too few, no value but the reason and what is missing."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    reason: str | None = None
    missing_anomalies: int = 0
    missing_normals: int = 0

    def line(self, confidence: float) -> str:
        """One line for people, in percent."""
        if self.value is None:
            return f"{self.name}: not stated: {self.reason}"
        assert self.low is not None
        assert self.high is not None
        low, high = 100 * self.low, 100 * self.high
        return f"{self.name}: {100 * self.value:.1f}% ({100 * confidence:g}% interval {low:.1f} to {high:.1f})"


@dataclass(frozen=True)
class Evaluation:
    """What labelled images say about the scores; all figures are shares between 0 and 1."""

    anomalies: int
    normals: int
    unlabelled: int
    confidence: float
    auroc: Figure
    aupr: Figure
    fpr_at_95_recall: Figure

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """What a person reads, one figure a line."""
        share = self.anomalies / max(1, self.anomalies + self.normals)
        counted = f"{self.anomalies:,} anomalies and {self.normals:,} normal images"
        return [
            f"{counted} ({self.unlabelled:,} unlabelled left out)",
            self.auroc.line(self.confidence),
            self.aupr.line(self.confidence)
            + (f"; chance is {100 * share:.1f}%" if self.aupr.value is not None else ""),
            self.fpr_at_95_recall.line(self.confidence),
        ]


def evaluate(
    scores: ArrayLike, truth_words: Sequence[str | None], confidence: float = 0.95, seed: int = 0
) -> Evaluation:
    """AUROC, AUPR and the false-positive rate at 95% recall of anomalies, with intervals or the reason why not."""
    if not 0.5 <= confidence < 1:
        raise UserError(f"confidence={confidence}: a share from 0.5 to below 1 is allowed; the usual one is 0.95")
    truth = encode_labels(truth_words).numpy()
    scores = _finite(scores)
    if len(scores) != len(truth):
        raise UserError(f"{len(scores):,} scores and {len(truth):,} labels: give one label (or '') for each score")
    anomalies, normals = scores[truth == ANOMALY], scores[truth == NORMAL]
    intervals = bootstrap_intervals(anomalies, normals, confidence, seed) if len(anomalies) and len(normals) else {}

    def state(name: str, key: str, least_anomalies: int, formula) -> Figure:
        missing_anomalies = max(0, least_anomalies - len(anomalies))
        missing_normals = max(0, LEAST_OF_EACH_KIND - len(normals))
        if missing_anomalies or missing_normals:
            reason = _too_few(len(anomalies), len(normals), least_anomalies, missing_anomalies, missing_normals)
            return Figure(name, None, None, None, reason, missing_anomalies, missing_normals)
        return Figure(name, formula(anomalies, normals), *intervals[key])

    return Evaluation(
        anomalies=len(anomalies),
        normals=len(normals),
        unlabelled=int((truth == UNLABELLED).sum()),
        confidence=confidence,
        auroc=state("AUROC", "auroc", LEAST_OF_EACH_KIND, _auroc),
        aupr=state("AUPR", "aupr", LEAST_OF_EACH_KIND, average_precision),
        fpr_at_95_recall=state("FPR at 95% recall", "fpr", anomalies_for_recall(confidence), fpr_at_recall),
    )


def auroc(scores: ArrayLike, is_anomaly: ArrayLike | Iterable[bool]) -> float:
    """The chance that an anomaly scores above a normal image, ties counting half; no interval, for benchmarks."""
    truth = np.asarray(is_anomaly)
    assert truth.dtype == bool, "is_anomaly is a mask: an array of label codes or words would be read wrongly"
    scores = _finite(scores)
    assert scores.shape == truth.shape
    assert 0 < truth.sum() < len(truth), "AUROC needs both kinds"
    return _auroc(scores[truth], scores[~truth])


def average_precision(anomalies: NDArray, normals: NDArray) -> float:
    """Precision at the score of each anomaly, averaged over the anomalies; images of equal score count together."""
    highest_first, normals = np.sort(anomalies)[::-1], np.sort(normals)
    found = np.searchsorted(-highest_first, -highest_first, side="right")
    false = len(normals) - np.searchsorted(normals, highest_first, side="left")
    return float((found / (found + false)).mean())


def fpr_at_recall(anomalies: NDArray, normals: NDArray, recall: float = RECALL) -> float:
    """The share of normal images at or above the highest threshold that finds at least 95% of the anomalies."""
    needed = math.ceil(recall * len(anomalies) - 1e-9)  # 7% of 100 is 7.000000000000001 in floats
    threshold = np.sort(anomalies)[::-1][needed - 1]
    return float((normals >= threshold).mean())


def anomalies_for_recall(confidence: float, recall: float = RECALL) -> int:
    """How many anomalies it takes before the lowest of them bounds the score that 95% of all anomalies exceed.

    All n lie above the 5% quantile with probability .95^n; until that is below the tail of the interval, the interval
    must reach 100% whatever the scores are. At 95% confidence: 72.
    """
    return math.ceil(math.log((1 - confidence) / 2) / math.log(recall))


def bootstrap_intervals(
    anomalies: NDArray, normals: NDArray, confidence: float = 0.95, seed: int = 0, replicates: int = REPLICATES
) -> dict[str, tuple[float, float]]:
    """(low, high) of `auroc`, `aupr` and `fpr`, from a Bayesian bootstrap stratified by kind.

    Every image gets a random weight instead of being drawn or not. One further weight goes to an anomaly and a normal
    image nobody has seen: in the worst place for the pessimistic end, in the best for the optimistic one. Without
    them a perfect ranking of ten images would give the interval 100 to 100; for a plain share they give the exact
    interval of Clopper and Pearson.
    """
    counts_G, counts_B = _bins(*_snapped(np.asarray(anomalies, np.float64), np.asarray(normals, np.float64)))
    share = len(anomalies) / (len(anomalies) + len(normals))
    generator = np.random.default_rng(seed)
    per_chunk = max(1, NUMBERS_PER_CHUNK // len(counts_B))
    pieces = [
        _replicates(counts_G, counts_B, share, min(per_chunk, replicates - start), generator)
        for start in range(0, replicates, per_chunk)
    ]
    tail = (1 - confidence) / 2
    worst, best = (np.concatenate(ends) for ends in zip(*pieces, strict=True))
    intervals = {}
    for column, name in enumerate(("auroc", "aupr", "fpr")):
        low, high = (best, worst) if name == "fpr" else (worst, best)
        intervals[name] = (
            float(np.quantile(low[:, column], tail)),
            float(np.quantile(high[:, column], 1 - tail)),
        )
    return intervals


def _replicates(
    counts_G: NDArray, counts_B: NDArray, share: float, replicates: int, generator: np.random.Generator
) -> tuple[NDArray, NDArray]:
    """Pessimistic and optimistic (AUROC, AUPR, FPR) of each replicate: two arrays [R, 3]."""
    w_RG, unseen_anomaly_R = _weights(counts_G, replicates, generator)
    v_RB, unseen_normal_R = _weights(counts_B, replicates, generator)
    above_RB = v_RB.cumsum(axis=1)
    higher_RG, as_high_RG = above_RB[:, 0:-1:2], above_RB[:, 1::2]  # normals above, and at or above, each score
    recall_RG = w_RG.cumsum(axis=1)
    a_R, n_R = unseen_anomaly_R[:, None], unseen_normal_R[:, None]

    beaten_RG = 1 - (higher_RG + as_high_RG) / 2
    auroc_best = (w_RG * beaten_RG).sum(axis=1) + unseen_anomaly_R
    auroc_worst = (w_RG * (beaten_RG - n_R)).sum(axis=1)

    found_RG = share * (recall_RG + a_R)
    aupr_best = (w_RG * found_RG / (found_RG + (1 - share) * as_high_RG)).sum(axis=1) + unseen_anomaly_R
    # An anomaly stands for the stretch of recall it adds, and precision rises along it: counting its end for the whole,
    # as the plain figure does, misses the truth in 12% of intervals at chance level with 20 anomalies among 200.
    false_RG = (1 - share) / share * (as_high_RG + n_R)
    rise_RG = np.log1p(w_RG / (recall_RG - w_RG + false_RG))
    aupr_worst = (w_RG - false_RG * rise_RG).sum(axis=1) + unseen_anomaly_R * share

    def false_share(recall: NDArray, false: NDArray) -> NDArray:
        reached = recall >= RECALL - 1e-9
        first = reached.argmax(axis=1)
        return np.where(reached.any(axis=1), false[np.arange(len(false)), first], 1.0)

    fpr_worst = false_share(recall_RG, as_high_RG + n_R)
    fpr_best = false_share(recall_RG + a_R, as_high_RG)
    worst = np.stack([auroc_worst, aupr_worst, fpr_worst], axis=1)
    return worst, np.stack([auroc_best, aupr_best, fpr_best], axis=1)


def _weights(counts: NDArray, replicates: int, generator: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Weights that sum to 1 with that of the unseen image: [R, bins] and [R]. A bin of k images weighs Gamma(k)."""
    weights = np.zeros((replicates, len(counts) + 1))
    filled = np.append(counts > 0, True)
    weights[:, filled] = generator.standard_gamma(np.append(counts, 1)[filled], size=(replicates, int(filled.sum())))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights[:, :-1], weights[:, -1]


def _snapped(anomalies: NDArray, normals: NDArray) -> tuple[NDArray, NDArray]:
    """The scores lowered to the next of at most 5,000 anomaly scores, where there are more."""
    values = np.unique(anomalies)
    if len(values) <= MOST_LEVELS:
        return anomalies, normals
    kept = np.quantile(anomalies, np.linspace(0, 1, MOST_LEVELS), method="lower")
    grid = np.concatenate([[-np.inf], np.unique(kept)])

    def snap(scores: NDArray) -> NDArray:
        return grid[np.searchsorted(grid, scores, side="right") - 1]

    return snap(anomalies), snap(normals)


def _bins(anomalies: NDArray, normals: NDArray) -> tuple[NDArray, NDArray]:
    """Counts of anomalies per distinct score, highest first, and of normals above, at, between and below those.

    Normals between two anomaly scores are interchangeable in all three figures, so 100,000 normals and 500 anomalies
    cost 1,001 random numbers a replicate.
    """
    values, counts_G = np.unique(anomalies, return_counts=True)
    values, counts_G = values[::-1], counts_G[::-1]
    sorted_normals = np.sort(normals)
    above = len(normals) - np.searchsorted(sorted_normals, values, side="right")
    at_or_above = len(normals) - np.searchsorted(sorted_normals, values, side="left")
    edges = np.stack([above, at_or_above], axis=1).ravel()
    return counts_G, np.diff(np.concatenate([[0], edges, [len(normals)]]))


def _auroc(anomalies: NDArray, normals: NDArray) -> float:
    normals = np.sort(normals)
    below = np.searchsorted(normals, anomalies, side="left")
    not_above = np.searchsorted(normals, anomalies, side="right")
    return float((below.mean() + not_above.mean()) / 2 / len(normals))


def _finite(scores: ArrayLike) -> NDArray:
    scores = np.asarray(scores, dtype=np.float64)
    assert scores.ndim == 1, scores.shape
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise UserError(
            f"score {scores[bad[0]]} at position {bad[0]} ({len(bad):,} of {len(scores):,} are not finite): "
            f"finite numbers are allowed; score these images again or leave them out"
        )
    return scores


def _too_few(anomalies: int, normals: int, least_anomalies: int, missing_anomalies: int, missing_normals: int) -> str:
    missing = [f"{missing_anomalies} more labelled anomalies"] if missing_anomalies else []
    missing += [f"{missing_normals} more labelled normal images"] if missing_normals else []
    return (
        f"it takes at least {least_anomalies} labelled anomalies and {LEAST_OF_EACH_KIND} labelled normal images, "
        f"there are {anomalies} and {normals}; label {' and '.join(missing)}"
    )
