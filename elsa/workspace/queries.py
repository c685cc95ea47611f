"""Which images to ask a person about next: strategies behind one function, each with the chance it gives an image.

Shapes: N images. A higher score is more anomalous. The mix first takes what its certain strategies want and then draws
the audit evenly from all the rest: that is what elsa.workspace.estimates needs to correct for the asking.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsa.errors import UserError

AUDIT = "random audit"
MIX = "mix"
AUDIT_SHARE = 0.2
ALIKE = 0.9  # cosine of two images of which one tells about the other


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
    """Unit vectors [N, D]; with them no two neighbours are asked for at once."""


@dataclass(frozen=True)
class Asked:
    """One image to ask for, why, and the chance with which one draw of that strategy takes it."""

    index: int
    strategy: str
    probability: float


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
STRATEGIES = (MIX, *CERTAIN, AUDIT)
"""All names `ask` knows, the default first."""


MIXED = ("most anomalous", "one per prototype", "nearest to the threshold", "most anomalous")


def ask(state: State, strategy: str = MIX, count: int = 10, seed: int = 0) -> list[Asked]:
    """At most `count` unlabelled images, most useful first; the same seed and state give the same ones."""
    if strategy not in STRATEGIES:
        raise UserError(f"strategy {strategy!r}: use one of {', '.join(map(repr, STRATEGIES))}")
    assert count >= 0
    lengths = {len(state.scores), len(state.labelled), len(state.prototypes)}
    assert len(lengths) == 1, lengths
    assert np.isfinite(state.scores).all()
    generator = np.random.default_rng(seed)
    count = min(count, int((~state.labelled).sum()))
    audits = {MIX: _rounded(AUDIT_SHARE * count, generator), AUDIT: count}.get(strategy, 0)
    names = MIXED if strategy == MIX else [name for name in CERTAIN if name == strategy]
    taken = _in_turn(state, names, count - audits, generator)
    free = ~state.labelled
    free[[one.index for one in taken]] = False
    rest = np.flatnonzero(free)
    drawn = generator.choice(rest, size=audits, replace=False)
    return taken + [Asked(int(image), AUDIT, 1 / len(rest)) for image in drawn]


def _in_turn(state: State, names: Sequence[str], count: int, generator: np.random.Generator) -> list[Asked]:
    """The first unlabelled images of each ranking in turn, each image once; those like another one only if need be."""
    if not names:
        return []
    queues = [(name, _unlabelled(CERTAIN[name](state, generator), state)) for name in names]
    taken: list[Asked] = []
    passed: list[Asked] = []
    seen: set[int] = set()
    while len(taken) < count and queues:
        name, queue = queues.pop(0)
        image = next((image for image in queue if image not in seen), None)
        if image is None:
            continue
        seen.add(image)
        one = Asked(image, name, 1.0)
        if _like_another(state, image, taken):
            passed.append(one)
            queues.insert(0, (name, queue))
        else:
            taken.append(one)
            queues.append((name, queue))
    return (taken + passed)[:count]


def _unlabelled(order: NDArray, state: State) -> Iterator[int]:
    return iter(order[~state.labelled[order]].tolist())


def _like_another(state: State, image: int, taken: Sequence[Asked]) -> bool:
    if state.embeddings is None or not taken:
        return False
    others = state.embeddings[[one.index for one in taken]]
    return bool((others @ state.embeddings[image]).max() > ALIKE)


def _rounded(number: float, generator: np.random.Generator) -> int:
    """A whole number that is `number` on the mean: two in ten of a single image is one every fifth time."""
    return int(number + generator.random())
