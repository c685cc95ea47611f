"""Fills the missing cells of a plan: one pre-training for all cells of an encoder, one JSON line for each cell.

Needs torch, numpy, Pillow and scikit-learn alone: GPU hosts are often bare.
"""

import dataclasses
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elsa.bench.claims import claimed
from elsa.bench.plans import PLANS, PRETRAINED_AS, Cell
from elsa.data.benchmarks import CIFAR10_CLASSES, load_cifar10
from elsa.data.splits import one_class_split
from elsa.detectors import build
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.progress import Progress
from elsa.trust.metrics import auroc

LOOK_AGAIN = 2.0  # seconds until a process with nothing left to do looks whether another one died over its work


@dataclass(frozen=True)
class Benchmark:
    """Training and test images, and their classes as numbers."""

    train_images: Tensor
    train_classes: np.ndarray
    test_images: Tensor
    test_classes: np.ndarray


@dataclass
class Budget:
    """The time left, and whether a cell like those before it would still fit in."""

    seconds: float

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.longest: dict[str, float] = {}

    def allows(self, detector: str) -> bool:
        """Whether a cell that takes as long as the longest one of its detector (or of all) ends in time."""
        expected = self.longest.get(detector, max(self.longest.values(), default=0.0))
        return time.monotonic() - self.started + expected <= self.seconds

    def spent(self, detector: str, seconds: float) -> None:
        """Remember how long a cell took."""
        self.longest[detector] = max(seconds, self.longest.get(detector, 0.0))


def run_plan(
    plan: str,
    results: Path,
    cifar10: Path,
    budget: float,
    device: str,
    settings: dict[str, Any],
    progress: Progress,
    own_settings: dict[str, dict[str, Any]] | None = None,
) -> int:
    """Run missing cells until the plan is full or the budget would be overrun; how many were added.

    `settings` are those of Elsa and of what stands on its pre-training, `own_settings` those of other detectors by
    name. Any number of processes may fill one plan. One that finds all that is missing in the hands of others waits:
    if they die, it takes over.
    """
    if plan not in PLANS:
        raise UserError(f"PLAN {plan!r} is unknown: use {', '.join(PLANS)}")
    time_left = Budget(budget)
    train_images, train_classes, test_images, test_classes = load_cifar10(cifar10)
    benchmark = Benchmark(train_images.to(device), train_classes.numpy(), test_images.to(device), test_classes.numpy())
    own_settings, added = own_settings or {}, 0
    while True:
        elsewhere = False
        for group in _groups(missing_cells(results, plan)):
            with claimed(results, plan, group[0].group) as mine:
                if not mine:
                    elsewhere = True
                    continue
                pretrained: dict[str, Tensor] | None = None
                for cell in missing_cells(results, plan, group):
                    if not time_left.allows(cell.detector):
                        return added
                    begun = time.monotonic()
                    chosen = settings if cell.detector in PRETRAINED_AS else own_settings.get(cell.detector, {})
                    line, pretrained = run_cell(cell, benchmark, pretrained, device, chosen, progress)
                    append_line(results, {"plan": plan, **line})
                    added += 1
                    time_left.spent(cell.detector, time.monotonic() - begun)
        if not elsewhere or not time_left.allows(""):
            return added
        time.sleep(LOOK_AGAIN)


def missing_cells(results: Path, plan: str, cells: Iterable[Cell] | None = None) -> list[Cell]:
    """Those of the cells (of all cells of the plan, if none are given) that have no line yet."""
    done = finished_cells(results, plan)
    return [cell for cell in (PLANS[plan]() if cells is None else cells) if cell not in done]


def _groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
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


def run_cell(
    cell: Cell,
    benchmark: Benchmark,
    pretrained: dict[str, Tensor] | None,
    device: str,
    settings: dict[str, Any],
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """One cell's line, and the encoder for the next cells of its group."""
    clock: dict[str, float] = {}
    common: dict[str, Any] = {"seed": cell.seed, "device": device, "progress": progress, **settings}
    normal = CIFAR10_CLASSES.index(cell.normal)
    labelled = None if cell.labelled is None else CIFAR10_CLASSES.index(cell.labelled)
    shares_encoder = cell.detector in PRETRAINED_AS
    if shares_encoder:
        start = time.monotonic()
        if pretrained is None:
            # the encoder sees the gamma_l 0 set, so that every gamma_l and labelled class can share it
            split = one_class_split(benchmark.train_classes, normal, None, 0.0, cell.gamma_p, cell.seed)
            encoder = Elsa(method=PRETRAINED_AS[cell.detector], **common)
            pretrained = encoder.pretrain(benchmark.train_images[torch.from_numpy(split.index)], split.labels)
        clock["pretrain"] = time.monotonic() - start

    start = time.monotonic()
    split = one_class_split(benchmark.train_classes, normal, labelled, cell.gamma_l, cell.gamma_p, cell.seed)
    model = build(cell.detector, **common)
    images = benchmark.train_images[torch.from_numpy(split.index)]
    given = (images, split.labels, pretrained) if shares_encoder else (images, split.labels)
    model.fit(*given)
    clock["finetune" if cell.detector in ("elsa", "elsa+") else "fit"] = time.monotonic() - start

    start = time.monotonic()
    scores = model.anomaly_score(benchmark.test_images).numpy()
    clock["score"] = time.monotonic() - start
    per_class = auroc_per_class(scores, benchmark.test_classes, normal)
    line = {
        **cell.fields(),
        "auroc": round(float(np.mean(list(per_class.values()))), 3),
        "auroc_per_class": per_class,
        "seconds": {stage: round(seconds, 2) for stage, seconds in clock.items()},
        "settings": _settings(model),
        **provenance(device),
    }
    if cell.detector in ("elsa", "elsa+"):
        line["early_stop"] = [round(entry["early_stop"], 4) for entry in model.history_]
    return line, pretrained


def _settings(model: Any) -> dict[str, Any]:
    """What the detector was told and what it chose: its frozen settings, and the plain numbers it holds."""
    facts = vars(model)
    config = dataclasses.asdict(facts["config"]) if "config" in facts else {}
    chosen = {name: fact for name, fact in facts.items() if isinstance(fact, int | float | str)}
    return {**config, **{name: fact for name, fact in chosen.items() if name not in ("seed", "device", "method")}}


def auroc_per_class(scores: np.ndarray, classes: np.ndarray, normal: int) -> dict[str, float]:
    """Percent, normal test images against each other class."""
    return {
        name: round(100 * auroc(scores[chosen], classes[chosen] != normal), 3)
        for number, name in enumerate(CIFAR10_CLASSES)
        if number != normal
        for chosen in [(classes == number) | (classes == normal)]
    }


def provenance(device: str) -> dict[str, Any]:
    """Where a line comes from: command, commit, versions, card."""
    card = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"
    return {
        "command": shlex.join(["python", "-m", "elsa.bench", *(_public(word) for word in sys.argv[1:])]),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "card": card,
    }


def _public(word: str) -> str:
    """A word of the command without the folders of this machine, which say nothing to a reader of the line."""
    return f"DIR/{Path(word).name}" if Path(word).is_absolute() else word


def commit() -> str:
    """The checkout's commit; where the files travelled without their history, what ELSA_COMMIT says."""
    if "ELSA_COMMIT" in os.environ:
        return os.environ["ELSA_COMMIT"]
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return found.stdout.strip() or "unknown"


def finished_cells(results: Path, plan: str) -> set[Cell]:
    """The cells that have a line of this plan."""
    names = [field.name for field in dataclasses.fields(Cell)]
    text = results.read_text() if results.exists() else ""
    # a line without its end was cut by a crash: its cell counts as missing and append_line removes it
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {Cell(**{name: line[name] for name in names}) for line in lines if line["plan"] == plan}


def append_line(results: Path, line: dict[str, Any]) -> None:
    """Add one line so that it survives a crash, in place of one that a crash had cut; one process at a time."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with open(results, "ab+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # or the line another process is writing would look cut
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
