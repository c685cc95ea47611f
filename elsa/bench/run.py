"""Fills the missing cells of plans: one pre-training for all cells of an encoder, one JSON line for each cell.

Needs torch, numpy, Pillow and scikit-learn alone: GPU hosts are often bare.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elsa.bench.as_published import score_as_published
from elsa.bench.claims import claimed
from elsa.bench.encoders import EncoderStore
from elsa.bench.lines import append_line, finished_cells, provenance
from elsa.bench.plans import AS_PUBLISHED, OF_DATASET, PLANS, PRETRAINED_AS, VARIANTS, WATCHED, Cell
from elsa.bench.protocols import Benchmark, auroc_per_class, load_benchmark
from elsa.bench.steered import SteeredElsa
from elsa.bench.watch import FinetuningWatch, Lookout, PretrainingWatch, embeddings, looked_at
from elsa.data.benchmarks import CIFAR10_CLASSES, load_cifar10
from elsa.data.splits import one_class_split
from elsa.detectors import build
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.nets import Net, build_net, channels_last
from elsa.progress import Progress
from elsa.seeds import generator

LOOK_AGAIN = 2.0  # seconds until a process with nothing left to do looks whether another one died over its work
Weights = dict[str, Tensor]


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


@dataclass(frozen=True)
class Told:
    """What all cells of a run are told: settings of Elsa and what stands on its pre-training, and of others by name."""

    device: str
    settings: dict[str, Any]
    own_settings: dict[str, dict[str, Any]]
    progress: Progress

    def common(self, cell: Cell) -> dict[str, Any]:
        """Settings of the encoder of a cell, which no variant changes."""
        how = {"seed": cell.seed, "device": self.device, "progress": self.progress}
        return {**OF_DATASET.get(cell.dataset, {}), **self.settings, **how}

    def of(self, cell: Cell) -> dict[str, Any]:
        """Settings of the detector of a cell."""
        if cell.detector not in PRETRAINED_AS:
            how = {"seed": cell.seed, "device": self.device, "progress": self.progress}
            return {**self.own_settings.get(cell.detector, {}), **how}
        return {**self.common(cell), **VARIANTS.get(cell.variant, {})}


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
                    append_line(results, {"plan": plan, **line})
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


def run_cell(
    cell: Cell, benchmark: Benchmark, weights: Weights | None, told: Told, store: EncoderStore
) -> tuple[dict[str, Any], Weights | None]:
    """One cell's line, and the encoder for the next cells of its group."""
    clock: dict[str, float] = {}
    more: dict[str, Any] = {"sets": benchmark.sets} if benchmark.sets else {}
    if cell.detector in PRETRAINED_AS:
        start = time.monotonic()
        weights = weights or _encoder(cell, benchmark, told, store, more)
        clock["pretrain"] = time.monotonic() - start

    training, test_images, is_anomaly = benchmark.training_set(cell), benchmark.test_images, benchmark.is_anomaly(cell)
    start = time.monotonic()
    if cell.variant == AS_PUBLISHED:
        images, labels, _ = training
        scores, settings = score_as_published(
            cell.detector, images, labels, test_images, is_anomaly, cell.seed, told.device
        )
        clock["fit"] = time.monotonic() - start
    else:
        watch = None
        if cell.detector == "knn":
            assert weights is not None
            scores, settings = _neighbours(training, test_images, weights, told, cell)
            clock["fit"] = time.monotonic() - start
        else:
            model = SteeredElsa(method=cell.detector, **told.of(cell)) if _is_watched(cell) else _built(cell, told)
            if isinstance(model, SteeredElsa):
                watch = FinetuningWatch(model.config, test_images, is_anomaly, model.device)
                model.steered_by = Lookout(watch)
            given = training[:2] if cell.detector not in PRETRAINED_AS else (*training[:2], weights)
            model.fit(*given)
            clock["finetune" if isinstance(model, Elsa) else "fit"] = time.monotonic() - start
            start = time.monotonic()
            scores, settings = model.anomaly_score(test_images).numpy(), _settings(model)
            clock["score"] = time.monotonic() - start
            if isinstance(model, Elsa):
                more["early_stop"] = [round(entry["early_stop"], 4) for entry in model.history_]
            if watch is not None:
                assert weights is not None
                before = _net(weights, training[0], model.config, told.device)
                more["watched"] = looked_at(model, before, watch, training, test_images, is_anomaly)

    per_class = benchmark.auroc_per_class(scores, cell)
    line = {
        **cell.fields(),
        "auroc": round(float(np.mean(list(per_class.values()))), 3),
        "auroc_per_class": per_class,
        "seconds": {stage: round(seconds, 2) for stage, seconds in clock.items()},
        "settings": settings,
        **provenance(told.device),
        **more,
    }
    return line, weights


def _built(cell: Cell, told: Told) -> Any:
    return build(cell.detector, **told.of(cell))


def _is_watched(cell: Cell) -> bool:
    return cell.variant == WATCHED and not cell.watches_pretraining


def _encoder(cell: Cell, benchmark: Benchmark, told: Told, store: EncoderStore, more: dict[str, Any]) -> Weights:
    """Weights after pre-training: kept ones if there are any, else new ones, looked at where the cell is about that."""
    images, labels = benchmark.pretraining_set(cell)
    encoder = SteeredElsa(method=PRETRAINED_AS[cell.detector], **told.common(cell))
    if not cell.watches_pretraining:
        return store.weights(cell, encoder, images, labels)
    _, _, hidden = benchmark.training_set(cell)
    is_anomaly = benchmark.is_anomaly(cell)
    watch = PretrainingWatch(encoder.config, images, hidden, benchmark.test_images, is_anomaly)
    encoder.steered_by = Lookout(watch)
    weights = encoder.pretrain(images, labels)
    more["watched"] = {"pretraining": watch.found}
    return weights


def _neighbours(
    training: tuple[Tensor, list[str], np.ndarray], test_images: Tensor, weights: Weights, told: Told, cell: Cell
) -> tuple[np.ndarray, dict[str, Any]]:
    """Nearest neighbours among the embeddings of the pre-trained network."""
    config = Elsa(method=PRETRAINED_AS["knn"], **told.common(cell)).config
    net = _net(weights, training[0], config, told.device)
    how: dict[str, Any] = {"seed": cell.seed, "device": told.device, "progress": told.progress}
    model = build("knn", **how, **told.own_settings.get("knn", {}))
    device = torch.device(told.device)
    model.fit(embeddings(net, training[0], config, device).cpu(), training[1])
    scores = model.anomaly_score(embeddings(net, test_images, config, device).cpu()).numpy()
    return scores, {**dataclasses.asdict(config), **_settings(model)}


def _net(weights: Weights, images: Tensor, config: Any, device: str) -> Net:
    """The network with these weights, for scoring."""
    _, channels, side, _ = images.shape
    net = build_net(config.encoder, config.stem, channels, side, config.shifts, generator(0, "replaced at once"))
    net = channels_last(net, torch.device(device))
    net.load_state_dict(weights)
    return net.eval()


def _settings(model: Any) -> dict[str, Any]:
    """What the detector was told and what it chose: its frozen settings, and the plain numbers it holds."""
    facts = vars(model)
    config = dataclasses.asdict(facts["config"]) if "config" in facts else {}
    chosen = {name: fact for name, fact in facts.items() if isinstance(fact, int | float | str)}
    return {**config, **{name: fact for name, fact in chosen.items() if name not in ("seed", "device", "method")}}


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
