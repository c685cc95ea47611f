"""Which images to ask a person about next: strategies behind one function, each with the chance it gives an image.

Shapes: N images. A higher score is more anomalous. The mix first takes what is anomalous and different and then draws
the audit, evenly from all the rest: that is what elsa.workspace.estimates needs to correct for the asking.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from elsa.errors import UserError
from elsa.prototypes import spherical_kmeans

AUDIT = "random audit"
MIX = "mix"
DIVERSE = "anomalous and different"
AUDIT_SHARE = 0.2
DEPTH = 0.2  # share of all images, the highest-scoring ones, whose groups are asked about
PER_QUESTION = 4  # images at least for each group, where a fifth of all are few
CANDIDATES = 2048  # images grouped at most: milliseconds, however many there are
ITERATIONS = 20


@dataclass(frozen=True)
class State:
    """What is known of each of the N images when a question is due."""

    scores: NDArray
    labelled: NDArray
    """True where somebody has a word for the image; it is not asked for again."""
    threshold: float
    """The score above which an image is called an anomaly."""
    prototypes: NDArray
    """The number of the prototype each image is nearest to."""
    suspicion: NDArray | None = None
    """How little an image fits among those that are trained on as normal; the scores where nothing else is known."""
    embeddings: NDArray | None = None
    """Unit vectors [N, D], by which the mix tells what is different."""


@dataclass(frozen=True)
class Asked:
    """One image to ask for, why, and the chance with which one draw of that strategy takes it."""

    index: int
    strategy: str
    probability: float | None
    """None where nobody knows: a draw that depends on which others came before."""


Ranking = Callable[[State, np.random.Generator], NDArray]


def most_anomalous(state: State, generator: np.random.Generator) -> NDArray:
    """The highest scores first: where anomalies are found soonest."""
    return np.argsort(-state.scores, kind="stable")


def nearest_to_the_threshold(state: State, generator: np.random.Generator) -> NDArray:
    """The closest call first: where a word changes the verdict of many."""
    return np.argsort(np.abs(state.scores - state.threshold), kind="stable")


def suspects(state: State, generator: np.random.Generator) -> NDArray:
    """What fits least among the images trained on as normal first: where training data is wrong."""
    return np.argsort(-(state.scores if state.suspicion is None else state.suspicion), kind="stable")


def one_per_prototype(state: State, generator: np.random.Generator) -> NDArray:
    """The most anomalous image of each prototype in turn, prototypes in random order: every corner of the data."""
    highest_first = np.argsort(-state.scores, kind="stable")
    open_ones = highest_first[~state.labelled[highest_first]]
    prototype = state.prototypes[open_ones]
    turn = np.empty(len(open_ones), dtype=np.int64)
    for number in np.unique(prototype):
        inside = prototype == number
        turn[inside] = np.arange(inside.sum())
    chance = generator.permutation(int(prototype.max()) + 1 if len(prototype) else 0)
    return open_ones[np.lexsort((chance[prototype], turn))]


CERTAIN: dict[str, Ranking] = {
    "most anomalous": most_anomalous,
    "nearest to the threshold": nearest_to_the_threshold,
    "suspects": suspects,
    "one per prototype": one_per_prototype,
}
STRATEGIES = (MIX, DIVERSE, *CERTAIN, AUDIT)
"""All names `ask` knows, the default first."""


def ask(state: State, strategy: str = MIX, count: int = 10, seed: int = 0) -> list[Asked]:
    """At most `count` unlabelled images, most useful first; the same seed and state give the same ones."""
    if strategy not in STRATEGIES:
        raise UserError(f"strategy {strategy!r}: use one of {', '.join(map(repr, STRATEGIES))}")
    assert count >= 0
    lengths = {len(state.scores), len(state.labelled), len(state.prototypes)}
    assert len(lengths) == 1, lengths
    assert np.isfinite(state.scores).all()
    generator = np.random.default_rng(seed)
    free = ~state.labelled
    count = min(count, int(free.sum()))
    parts = _mixed(count, generator) if strategy == MIX else {strategy: count}
    asked: list[Asked] = []
    for name, number in parts.items():
        if name == AUDIT:
            rest = np.flatnonzero(free)
            drawn, chance = generator.choice(rest, size=number, replace=False).tolist(), 1 / max(1, len(rest))
        elif name == DIVERSE:
            drawn, chance = _different(state, free, number, generator), None
        else:
            order = CERTAIN[name](state, generator)
            drawn, chance = order[free[order]][:number].tolist(), 1.0
        free[drawn] = False
        asked += [Asked(image, name, chance) for image in drawn]
    return asked


def _mixed(count: int, generator: np.random.Generator) -> dict[str, int]:
    """How many images each strategy of the mix asks for; the audit comes last, as the estimates need it."""
    audits = _rounded(AUDIT_SHARE * count, generator)
    return {DIVERSE: count - audits, AUDIT: audits}


def _different(state: State, free: NDArray, count: int, generator: np.random.Generator) -> list[int]:
    """The most typical image of each of `count` groups of the highest-scoring ones.

    An answer about it tells of its whole group; what looks like nothing else tells of itself alone.
    """
    if count == 0:
        return []
    order = most_anomalous(state, generator)
    high = order[: max(round(DEPTH * len(order)), PER_QUESTION * count)]
    high = high[free[high]]
    if len(high) < count:  # all that scores high is labelled
        high = order[free[order]][:count]
    if len(high) > CANDIDATES:
        high = generator.choice(high, CANDIDATES, replace=False)
    if state.embeddings is None:
        return generator.choice(high, count, replace=False).tolist()
    number = min(CANDIDATES, len(order))
    middle = state.embeddings[np.sort(generator.choice(len(order), number, replace=False))].mean(axis=0)
    return high[_typical(state.embeddings[high] - middle, count, generator)].tolist()


def _typical(off: NDArray, count: int, generator: np.random.Generator) -> NDArray:
    """Of each of `count` groups of vectors the place of the one nearest to its centre, by direction; none twice."""
    unit = normalize(torch.from_numpy(np.asarray(off, dtype=np.float32)), dim=1)
    start = torch.Generator().manual_seed(int(generator.integers(2**31)))
    near = (unit @ spherical_kmeans(unit, count, start, ITERATIONS).T).numpy()
    places = np.empty(count, dtype=np.int64)
    for group in range(count):
        places[group] = near[:, group].argmax()
        near[places[group]] = -np.inf
    return places


def _rounded(number: float, generator: np.random.Generator) -> int:
    """A whole number that is `number` on the mean: two in ten of a single image is one every fifth time."""
    return int(number + generator.random())
