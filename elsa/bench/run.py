"""Fills the missing cells of plans: one pre-training for all cells of an encoder, one JSON line for each cell.

Needs torch, numpy, Pillow and scikit-learn alone: GPU hosts are often bare.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elsa.bench.cell import Told, Weights, run_cell
from elsa.bench.claims import claimed
from elsa.bench.encoders import EncoderStore
from elsa.bench.lines import append_line, finished_cells, provenance
from elsa.bench.plans import PLANS, Cell
from elsa.bench.protocols import Benchmark, auroc_per_class, load_benchmark
from elsa.data.benchmarks import CIFAR10_CLASSES, load_cifar10
from elsa.data.splits import one_class_split
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.progress import Progress

LOOK_AGAIN = 2.0  # seconds until a process with nothing left to do looks whether another one died over its work


@dataclass
class Budget:
    """The time left, and whether a cell like those before it would still fit in."""

    seconds: float

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.longest: dict[str, float] = {}

    def allows(self, what: str) -> bool:
        """Whether a cell that takes as long as the longest one of its kind (or of all) ends in time."""
        expected = self.longest.get(what, max(self.longest.values(), default=0.0))
        return time.monotonic() - self.started + expected <= self.seconds

    def spent(self, what: str, seconds: float) -> None:
        """Remember how long a cell took."""
        self.longest[what] = max(seconds, self.longest.get(what, 0.0))


def run_plan(
    plans: str | Sequence[str],
    results: Path,
    cifar10: Path | None,
    budget: float,
    device: str,
    settings: dict[str, Any],
    progress: Progress,
    own_settings: dict[str, dict[str, Any]] | None = None,
    data: Path | None = None,
    encoders: Path | None = None,
) -> int:
    """Run missing cells until the plans are full or the budget would be overrun; how many were added.

    Cells of several plans that share an encoder are done together. Any number of processes may fill one plan. One that
    finds all that is missing in the hands of others waits: if they die, it takes over.
    """
    plans = [plans] if isinstance(plans, str) else list(plans)
    for plan in plans:
        if plan not in PLANS:
            raise UserError(f"PLAN {plan!r} is unknown: use {', '.join(PLANS)}")
    time_left, added = Budget(budget), 0
    told = Told(device, settings, own_settings or {}, progress)
    images = Images(cifar10, data, device)
    store = EncoderStore(encoders)
    while True:
        elsewhere = False
        for group in _groups((plan, cell) for plan in plans for cell in missing_cells(results, plan)):
            with ExitStack() as claims:
                work = group[0][1].group
                if not all(
                    claims.enter_context(claimed(results, plan, work)) for plan in sorted({plan for plan, _ in group})
                ):
                    elsewhere = True
                    continue
                weights: Weights | None = None
                for plan, cell in group:
                    if cell in finished_cells(results, plan):
                        continue
                    kind = f"{cell.detector} {cell.variant} {cell.dataset}"
                    kind += " and its encoder" if weights is None and cell.encoder else ""
                    if not time_left.allows(kind):
                        return added
                    begun = time.monotonic()
                    line, weights = run_cell(cell, images.of(cell.dataset), weights, told, store)
                    append_line(results, {"plan": plan, **line, **provenance(device)})
                    added += 1
                    time_left.spent(kind, time.monotonic() - begun)
        if not elsewhere or not time_left.allows(""):
            return added
        time.sleep(LOOK_AGAIN)


class Images:
    """The data sets, each read when the first cell needs it; only the last one is held."""

    def __init__(self, cifar10: Path | None, data: Path | None, device: str):
        self.cifar10, self.data, self.device = cifar10, data, device
        self.held: tuple[str, Benchmark] | None = None

    def of(self, dataset: str) -> Benchmark:
        """The data set of that name."""
        if self.held is None or self.held[0] != dataset:
            needed = dataset.startswith("cifar10")
            if needed and self.cifar10 is None:
                raise UserError(f"--cifar10 is needed for cells on {dataset}: name the folder cifar-10-batches-bin")
            cifar10 = load_cifar10(self.cifar10) if needed and self.cifar10 is not None else None
            self.held = dataset, load_benchmark(dataset, cifar10, self.data, self.device)
        return self.held[1]


def missing_cells(results: Path, plan: str) -> list[Cell]:
    """The cells of the plan that have no line yet."""
    done = finished_cells(results, plan)
    return [cell for cell in PLANS[plan]() if cell not in done]


def _groups(cells: Iterable[tuple[str, Cell]]) -> list[list[tuple[str, Cell]]]:
    groups: dict[tuple[Any, ...], list[tuple[str, Cell]]] = {}
    for plan, cell in cells:
        groups.setdefault(cell.group, []).append((plan, cell))
    return list(groups.values())


def repeat_cell(cifar10: Path, device: str, settings: dict[str, Any], progress: Progress) -> str:
    """What two fits of the first pilot cell with one seed have in common, in one line."""
    train_images, train_classes, test_images, test_classes = load_cifar10(cifar10)
    cell = PLANS["pilot"]()[0]
    normal, labelled = CIFAR10_CLASSES.index(cell.normal), CIFAR10_CLASSES.index(cell.labelled or "")
    split = one_class_split(train_classes.numpy(), normal, labelled, cell.gamma_l, cell.gamma_p, cell.seed)
    images = train_images[torch.from_numpy(split.index)]
    scores, figures = [], []
    for _ in range(2):
        model = Elsa(method=cell.detector, seed=cell.seed, device=device, progress=progress, **settings)
        scores.append(model.fit(images, split.labels).anomaly_score(test_images).numpy())
        per_class = auroc_per_class(scores[-1], test_classes.numpy(), normal)
        figures.append(float(np.mean(list(per_class.values()))))
    largest = np.abs(scores[0] - scores[1]).max() / scores[0].std()
    return (
        f"two fits with seed {cell.seed} on {device}: AUROC {figures[0]:.3f} and {figures[1]:.3f}, "
        f"largest difference of a score {largest:.2g} standard deviations"
    )
