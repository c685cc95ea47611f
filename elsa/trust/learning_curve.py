"""Will more labels help? How the AUROC rose with the labels there are, on images the detector never saw.

The labelled images are dealt into folds. For each fold a detector is fitted on the unlabelled images and some of the
labels outside it, and judged on the labels inside. The smaller sets of labels lie within the larger ones, and labels
not yet used are left out rather than taken for unlabelled images, so that only their number changes. Nothing is
extrapolated: the last step says whether a rise can still be shown.

Shape suffixes: R bootstrap replicates, L labelled anomalies, M labelled normal images.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa.detectors.inputs import Images, subsample
from elsa.errors import UserError
from elsa.labels import ANOMALY, NORMAL, UNLABELLED, encode_labels
from elsa.progress import Progress, silent
from elsa.seeds import fold as seed_for
from elsa.seeds import generator
from elsa.trust.crossfit import FOLDS, WORDS, Build, deal, scores_without
from elsa.trust.metrics import REPLICATES, Figure, evaluate

MOST_UNLABELLED = 1000  # a curve compares numbers of labels: with so many unlabelled images a fit takes a second


@dataclass(frozen=True)
class CurvePoint:
    """The AUROC with so many labels to learn from, and what it gained on the point before; shares between 0 and 1."""

    labels: int
    auroc: Figure
    gain: float | None
    gain_low: float | None
    gain_high: float | None

    def line(self) -> str:
        """One line for people, in percent."""
        stated = f"{self.labels:,} labels: {self.auroc.line(0.95)}"
        if self.gain is None or self.gain_low is None or self.gain_high is None:
            return stated
        return f"{stated}; gained {_points(self.gain)} ({_points(self.gain_low)} to {_points(self.gain_high)})"


def learning_curve(
    images: Images,
    words: Sequence[str | None],
    counts: Sequence[int] | None,
    build: Build,
    seed: int = 0,
    *,
    folds: int = FOLDS,
    most_unlabelled: int = MOST_UNLABELLED,
    progress: Progress = silent,
) -> list[CurvePoint]:
    """A point for each number of labels, fewest first; `counts` None takes 0, a quarter, half and all there are."""
    images, code_N, _ = thinned(images, encode_labels(words), most_unlabelled, seed)
    fold_N = deal(code_N, folds, seed)
    steps = _checked(code_N, fold_N, counts)
    judged = (code_N == ANOMALY) | (code_N == NORMAL)
    truth = [WORDS[code] for code in code_N[judged].tolist()]
    points: list[CurvePoint] = []
    before: NDArray | None = None
    for number, count in enumerate(steps):
        score_N = np.zeros(len(code_N))
        for fold in range(folds):
            inside = fold_N == fold
            train = learned_from(code_N, fold_N, fold, count, seed)
            score_N[inside] = scores_without(images, code_N, train, inside, build)
            progress("learning curve", number * folds + fold + 1, len(steps) * folds, {})
        scores = score_N[judged.numpy()]
        auroc = evaluate(scores, truth, seed=seed).auroc
        gain: tuple[float, float, float] | tuple[None, None, None] = (None, None, None)
        if before is not None and auroc.value is not None:
            gain = paired_gain(before, scores, np.array(truth) == "anomaly", seed)
        points.append(CurvePoint(count, auroc, *gain))
        before = scores
    return points


def will_more_labels_help(curve: Sequence[CurvePoint]) -> str:
    """What the last step of the curve shows, in one sentence; no forecast."""
    last = curve[-1]
    if last.auroc.value is None:
        return f"Not known: {last.auroc.reason}"
    if last.gain is None or last.gain_low is None or last.gain_high is None:
        return "Not known: a curve takes at least two numbers of labels"
    step = f"from {curve[-2].labels:,} to {last.labels:,} labels the AUROC changed by {_points(last.gain)} points"
    step += f" ({_points(last.gain_low)} to {_points(last.gain_high)})"
    if last.gain_low > 0:
        return f"It still rises: {step}"
    if last.gain_high < 0:
        return f"It falls, so look at the latest labels: {step}"
    return f"No rise can be shown: {step}"


def label_counts(available: int) -> list[int]:
    """Nothing, a quarter, half and all of the labels there are to learn from."""
    return sorted({0, available // 4, available // 2, available})


def thinned(images: Images, code_N: Tensor, most_unlabelled: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """All labelled images and so many unlabelled ones, their codes and their positions."""
    unlabelled = (code_N == UNLABELLED).nonzero().flatten()
    drawn = subsample(unlabelled, most_unlabelled, seed_for(seed, "thinned"))
    kept = torch.cat([(code_N != UNLABELLED).nonzero().flatten(), drawn]).sort().values
    return images[kept], code_N[kept], kept


def learned_from(code_N: Tensor, fold_N: Tensor, fold: int, count: int, seed: int) -> Tensor:
    """A mask of the unlabelled images outside the fold and `count` labels there, of each kind in proportion."""
    outside = fold_N != fold
    chosen = outside & (code_N == UNLABELLED)
    pools = {code: (outside & (code_N == code)).nonzero().flatten() for code in (ANOMALY, NORMAL)}
    anomalies = round(count * len(pools[ANOMALY]) / max(1, sum(map(len, pools.values()))))
    for code, taken in ((ANOMALY, anomalies), (NORMAL, count - anomalies)):
        order = torch.randperm(len(pools[code]), generator=generator(seed, "curve", fold, code + 1))
        chosen[pools[code][order[:taken]]] = True
    return chosen


def paired_gain(
    before: NDArray, after: NDArray, is_anomaly: NDArray, seed: int, confidence: float = 0.95
) -> tuple[float, float, float]:
    """How much the AUROC rose on the same images, and its interval by a Bayesian bootstrap over these images."""
    difference_LM = wins(after, is_anomaly) - wins(before, is_anomaly)
    draw = np.random.default_rng(seed_for(seed, "paired gain"))
    rows_RL, columns_RM = (draw.dirichlet(np.ones(size), REPLICATES) for size in difference_LM.shape)
    gains_R = ((rows_RL @ difference_LM) * columns_RM).sum(axis=1)
    low, high = np.quantile(gains_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(difference_LM.mean()), float(low), float(high)


def wins(scores: NDArray, is_anomaly: NDArray) -> NDArray:
    """[L, M]: 1 where an anomaly scores above a normal image, a half where they tie; the mean is the AUROC."""
    anomalies_L1, normals_M = scores[is_anomaly][:, None], scores[~is_anomaly]
    return (anomalies_L1 > normals_M) + 0.5 * (anomalies_L1 == normals_M)


def _checked(code_N: Tensor, fold_N: Tensor, counts: Sequence[int] | None) -> list[int]:
    labelled = (code_N == ANOMALY) | (code_N == NORMAL)
    available = min(int((labelled & (fold_N != fold)).sum()) for fold in fold_N.unique())
    steps = label_counts(available) if counts is None else sorted(set(counts))
    if not steps or steps[0] < 0 or steps[-1] > available:
        raise UserError(
            f"counts={list(counts or [])}: numbers from 0 to {available} are allowed, the labels outside one fold of "
            f"{int(labelled.sum())}; ask for fewer or label more images"
        )
    return steps


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"
