"""The cells of the paper's tables: which detector on which split, in the order in which they should be filled."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from elsa.data.benchmarks import CIFAR10_CLASSES as CLASSES


@dataclass(frozen=True)
class Cell:
    """One experiment of a table; its line in results/ carries the same fields."""

    detector: str
    dataset: str
    normal: str
    labelled: str | None
    gamma_l: float
    gamma_p: float
    seed: int

    @property
    def encoder(self) -> tuple[Any, ...]:
        """Cells with the same value share one pre-training."""
        return self.dataset, self.normal, self.gamma_p, self.seed

    def fields(self) -> dict[str, Any]:
        """As they stand in a results line."""
        return asdict(self)


def next_classes(normal: str, count: int) -> list[str]:
    """The classes that follow in cyclic order, the labelled ones of the priority cells."""
    start = CLASSES.index(normal)
    return [CLASSES[(start + step) % len(CLASSES)] for step in range(1, count + 1)]


def pilot() -> list[Cell]:
    """Two cells in which the paper reaches 95.0 and 99.2."""
    return [
        Cell("elsa+", "cifar10", normal, labelled, 0.05, 0.0, 0)
        for normal, labelled in (("Plane", "Car"), ("Car", "Truck"))
    ]


def scenario2() -> list[Cell]:
    """elsa+ at gamma_l .05 and three pollutions, ten classes, the next three classes labelled."""
    return [
        Cell("elsa+", "cifar10", normal, labelled, 0.05, gamma_p, 0)
        for normal in CLASSES
        for gamma_p in (0.0, 0.05, 0.1)
        for labelled in next_classes(normal, 3)
    ]


PLANS: dict[str, Callable[[], list[Cell]]] = {"pilot": pilot, "scenario2": scenario2}
