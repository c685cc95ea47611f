"""What labels gathered by asking say about all images: the asking is corrected for, or the figures would be nonsense.

Images that were asked for because they look anomalous say nothing about the rest; the audit, drawn evenly, does. Every
draw of the audit makes an estimate of its own that is right on the mean: the images whose words are known by then
count as themselves, and the drawn one stands for all V others it was drawn from, V being one over its probability. The
estimate is the mean over draws, so each labelled image has a weight and every figure is a weighted one.

Shape suffixes: N images, L labelled images, T draws of the audit, R replicates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elsa.errors import UserError
from elsa.trust.metrics import LEAST_OF_EACH_KIND, NUMBERS_PER_CHUNK, REPLICATES, Figure
from elsa.workspace.events import Label, LabelEvent
from elsa.workspace.queries import AUDIT

LEAST_AUDITS = 10
# Half of the anomalies lie where nobody asks: below this many draws few intervals of AUROC would end above one half.
LEAST_AUDITS_OF_PAIRS = 20
UNDECIDED = -1
ANOMALY, NORMAL = 1, 0


@dataclass(frozen=True)
class Estimates:
    """What the labels say about all N images, each figure a share between 0 and 1 with its interval or its reason."""

    images: int
    audits: int
    """Images drawn evenly, whose words were given."""
    anomalies: int
    normals: int
    """Words known, however the image was come by."""
    confidence: float
    share: Figure
    """Of anomalies among all images."""
    gamma_p: Figure
    """Of anomalies among the images nobody has a word for: the pollution left."""
    auroc: Figure
    false_alarms: Figure
    """Of the normal images, those above the threshold."""
    misses: Figure
    """Of the anomalies, those not above the threshold."""

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """What a person reads, one figure a line."""
        counted = f"{self.audits:,} audited, {self.anomalies:,} anomalies and {self.normals:,} normal images known"
        figures = (self.share, self.gamma_p, self.auroc, self.false_alarms, self.misses)
        return [f"{self.images:,} images: {counted}", *(figure.line(self.confidence) for figure in figures)]


@dataclass(frozen=True)
class Sample:
    """The labelled images and how each draw of the audit counts them."""

    kind: NDArray
    """[L] ANOMALY, NORMAL or UNDECIDED."""
    score: NDArray
    above: NDArray
    """[L] True above the threshold."""
    drawn: NDArray
    """[T] Place among the labelled images of each draw."""
    others: NDArray
    """[T] V: how many images the draw was made from, itself included."""
    known: NDArray
    """[T, L] 1 where the word of the image counted as known at the draw, else 0."""

    def weights(self, share_RT: NDArray) -> NDArray:
        """What each labelled image weighs [R, L] if draw T has this share: on the mean the images it stands for."""
        weight_RL = share_RT @ self.known
        weight_RL[:, self.drawn] += share_RT * self.others
        return weight_RL


def estimate(
    names: Sequence[str],
    scores: ArrayLike,
    threshold: float,
    events: Sequence[LabelEvent],
    labels: Mapping[str, Label],
    given: Sequence[str] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimates:
    """The share of anomalies, AUROC and error rates over all images of a source, from `store.events()` and `.labels()`.

    `scores` of labelled images must come from models that have not learned from these labels, or AUROC and misses
    are too good; `given` has the words the source came with.
    """
    if not 0.5 <= confidence < 1:
        raise UserError(f"confidence={confidence}: a share from 0.5 to below 1 is allowed; the usual one is 0.95")
    sample = sample_of(names, np.asarray(scores, np.float64), threshold, events, labels, given)
    anomalies, normals = (int((sample.kind == kind).sum()) for kind in (ANOMALY, NORMAL))
    decided = int((sample.kind[sample.drawn] != UNDECIDED).sum())
    unlabelled = len(names) - anomalies - normals

    def state(name: str, key: str, least_audits: int, least_anomalies: int, least_normals: int) -> Figure:
        lacking = _lacking((decided, anomalies, normals), (least_audits, least_anomalies, least_normals))
        if lacking:
            missing = (max(0, least_anomalies - anomalies), max(0, least_normals - normals))
            return Figure(name, None, None, None, lacking, *missing)
        return Figure(name, *found[key])

    enough = decided >= LEAST_AUDITS
    found = figures(sample, len(names), unlabelled, anomalies, confidence, seed) if enough else {}
    return Estimates(
        images=len(names),
        audits=decided,
        anomalies=anomalies,
        normals=normals,
        confidence=confidence,
        share=state("share of anomalies", "share", LEAST_AUDITS, 0, 0),
        gamma_p=state("gamma_p, anomalies among the unlabelled", "gamma_p", LEAST_AUDITS, 0, 0),
        auroc=state("AUROC", "auroc", LEAST_AUDITS_OF_PAIRS, LEAST_OF_EACH_KIND, LEAST_OF_EACH_KIND),
        false_alarms=state("false alarms at the threshold", "false_alarms", LEAST_AUDITS, 0, LEAST_OF_EACH_KIND),
        misses=state("misses at the threshold", "misses", LEAST_AUDITS_OF_PAIRS, LEAST_OF_EACH_KIND, 0),
    )


def sample_of(
    names: Sequence[str],
    score_N: NDArray,
    threshold: float,
    events: Sequence[LabelEvent],
    labels: Mapping[str, Label],
    given: Sequence[str] | None = None,
) -> Sample:
    """How each draw of the audit counts each labelled image, replayed from the events."""
    row_of = {name: row for row, name in enumerate(names)}
    kinds = {"anomaly": ANOMALY, "normal": NORMAL}
    kind_of = {row: kinds[word] for row, word in enumerate(given or []) if word in kinds}
    kind_of |= {row_of[name]: kinds.get(label.word, UNDECIDED) for name, label in labels.items() if name in row_of}

    # Images in the order in which their words came, those the source brought first.
    first: dict[int, LabelEvent | None] = {row: None for row in kind_of if names[row] not in labels}
    for event in events:
        row = row_of.get(event.image)
        if row in kind_of:
            first.setdefault(row, event)
    rows_L = np.fromiter(first, np.int64, len(first))
    drawn = [
        (place, round(1 / event.probability))
        for place, event in enumerate(first.values())
        if event is not None and event.strategy == AUDIT and event.probability is not None
    ]
    drawn_T = np.array([place for place, _ in drawn], np.int64)
    others_T = np.array([others for _, others in drawn], np.int64)
    return Sample(
        kind=np.array([kind_of[row] for row in rows_L.tolist()], np.int64),
        score=score_N[rows_L],
        above=score_N[rows_L] > threshold,
        drawn=drawn_T,
        others=others_T,
        known=_known(len(names), len(rows_L), drawn_T, others_T),
    )


def _known(num_images: int, num_labelled: int, drawn_T: NDArray, others_T: NDArray) -> NDArray:
    """Which words counted as known at each draw [T, L]: as many as the draw was not made from, the earliest ones.

    Draws made from as many images belong to one question, and none of them knew of the others.
    """
    known_TL = np.zeros((len(drawn_T), num_labelled))
    for others in np.unique(others_T):
        together = others_T == others
        free = np.ones(num_labelled, bool)
        free[drawn_T[together]] = False
        known_TL[np.ix_(together, np.flatnonzero(free)[: num_images - others])] = 1
    return known_TL


def figures(
    sample: Sample, num_images: int, unlabelled: int, anomalies: int, confidence: float, seed: int
) -> dict[str, tuple[float, float, float]]:
    """(value, low, high) of every figure, by a Bayesian bootstrap over the draws of the audit.

    As in elsa.trust.metrics, each end of an interval counts with a draw that nobody has seen, in the worst place or in
    the best one.
    """
    draws = len(sample.drawn)
    generator = np.random.default_rng(seed)
    per_chunk = max(1, NUMBERS_PER_CHUNK // (len(sample.kind) + draws))
    worst, best = {}, {}
    pieces = []
    for start in range(0, REPLICATES, per_chunk):
        gamma = generator.standard_gamma(1.0, size=(min(per_chunk, REPLICATES - start), draws + 1))
        pieces.append(_replicates(sample, gamma / gamma.sum(axis=1, keepdims=True)))
    for name in pieces[0]:
        worst[name], best[name] = (np.concatenate([piece[name][end] for piece in pieces]) for end in (0, 1))
    plain = np.append(np.full(draws, 1 / draws), 0.0)[None]
    value = {name: float(ends[0][0]) for name, ends in _replicates(sample, plain).items()}
    tail = (1 - confidence) / 2
    found = {
        name: (value[name], float(np.nanquantile(worst[name], tail)), float(np.nanquantile(best[name], 1 - tail)))
        for name in value
    }
    left = tuple(float(np.clip((part * num_images - anomalies) / max(1, unlabelled), 0, 1)) for part in found["share"])
    return found | {"gamma_p": (left[0], left[1], left[2])}


def _replicates(sample: Sample, share_RT1: NDArray) -> dict[str, tuple[NDArray, NDArray]]:
    """Lowest and highest value of each figure in each replicate; the last share is of a draw nobody has seen.

    It is like the latest draw, knows what that one knew and stands for as many; for pairs it is an anomaly and a normal
    image at once.
    """
    unseen_R = share_RT1[:, -1]
    weight_RL = sample.weights(share_RT1[:, :-1]) + unseen_R[:, None] * sample.known[sample.others.argmin()]
    unseen_R = unseen_R * sample.others.min()

    anomaly, normal = sample.kind == ANOMALY, sample.kind == NORMAL
    a_R, n_R = weight_RL[:, anomaly].sum(axis=1), weight_RL[:, normal].sum(axis=1)
    missed_R = weight_RL[:, anomaly & ~sample.above].sum(axis=1)
    false_R = weight_RL[:, normal & sample.above].sum(axis=1)
    all_R, more_a_R, more_n_R = a_R + n_R + unseen_R, a_R + unseen_R, n_R + unseen_R
    with np.errstate(invalid="ignore", divide="ignore"):  # a replicate without anomalies has no misses
        beaten_R = _beaten(sample.score[anomaly], weight_RL[:, anomaly], sample.score[normal], weight_RL[:, normal])
        pairs_R = more_a_R * more_n_R
        return {
            "share": (a_R / all_R, more_a_R / all_R),
            "auroc": (beaten_R / pairs_R, (beaten_R + pairs_R - a_R * n_R) / pairs_R),
            "false_alarms": (false_R / more_n_R, (false_R + unseen_R) / more_n_R),
            "misses": (missed_R / more_a_R, (missed_R + unseen_R) / more_a_R),
        }


def _beaten(score_A: NDArray, weight_RA: NDArray, score_B: NDArray, weight_RB: NDArray) -> NDArray:
    """The weight [R] of pairs in which the anomaly scores above the normal image, ties counting half."""
    order = np.argsort(score_B, kind="stable")
    total_RB = np.concatenate([np.zeros((len(weight_RB), 1)), weight_RB[:, order].cumsum(axis=1)], axis=1)
    below, not_above = (np.searchsorted(score_B[order], score_A, side=side) for side in ("left", "right"))
    return (weight_RA * (total_RB[:, below] + total_RB[:, not_above]) / 2).sum(axis=1)


def _lacking(there: tuple[int, int, int], least: tuple[int, int, int]) -> str:
    what = ("words from the random audit", "known anomalies", "known normal images")
    lacking = [(need, name, have) for need, name, have in zip(least, what, there, strict=True) if have < need]
    return " and ".join(f"it takes {need} {name}, there are {have}" for need, name, have in lacking)
