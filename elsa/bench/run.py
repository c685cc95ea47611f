"""Fills the missing cells of a plan: one pre-training for all cells of an encoder, one JSON line for each cell.

Needs torch, numpy, Pillow and scikit-learn alone: GPU hosts are often bare.
"""

import dataclasses
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elsa.bench.plans import PLANS, Cell
from elsa.data.benchmarks import CIFAR10_CLASSES, load_cifar10
from elsa.data.splits import one_class_split
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.progress import Progress
from elsa.trust.metrics import auroc


def run_plan(
    plan: str,
    results: Path,
    cifar10: Path,
    budget: float,
    device: str,
    settings: dict[str, Any],
    progress: Progress,
) -> int:
    """Run missing cells until the plan is full or the budget would be overrun; how many were added."""
    if plan not in PLANS:
        raise UserError(f"PLAN {plan!r} is unknown: use {', '.join(PLANS)}")
    started = time.monotonic()
    done = finished_cells(results, plan)
    missing = [cell for cell in PLANS[plan]() if cell not in done]
    train_images, train_classes, test_images, test_classes = load_cifar10(cifar10)
    train_images, test_images = train_images.to(device), test_images.to(device)
    longest, added = 0.0, 0
    for _, group in itertools.groupby(missing, key=lambda cell: cell.encoder):
        pretrained: dict[str, Tensor] | None = None
        for cell in group:
            if time.monotonic() - started + longest > budget:
                return added
            begun = time.monotonic()
            line, pretrained = run_cell(
                cell, train_images, train_classes, test_images, test_classes, pretrained, device, settings, progress
            )
            append_line(results, {"plan": plan, **line})
            added += 1
            longest = max(longest, time.monotonic() - begun)
    return added


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
    train_images: Tensor,
    train_classes: Tensor,
    test_images: Tensor,
    test_classes: Tensor,
    pretrained: dict[str, Tensor] | None,
    device: str,
    settings: dict[str, Any],
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One cell's line, and the encoder for the next cells of its group."""
    clock = {"pretrain": 0.0}
    classes = train_classes.numpy()
    normal = CIFAR10_CLASSES.index(cell.normal)
    labelled = None if cell.labelled is None else CIFAR10_CLASSES.index(cell.labelled)
    if pretrained is None:
        # the encoder sees the gamma_l 0 set, so that every gamma_l and labelled class can share it
        start = time.monotonic()
        split = one_class_split(classes, normal, None, 0.0, cell.gamma_p, cell.seed)
        encoder = Elsa(method=cell.detector, seed=cell.seed, device=device, progress=progress, **settings)
        pretrained = encoder.pretrain(train_images[torch.from_numpy(split.index)], split.labels)
        clock["pretrain"] = time.monotonic() - start

    start = time.monotonic()
    split = one_class_split(classes, normal, labelled, cell.gamma_l, cell.gamma_p, cell.seed)
    model = Elsa(method=cell.detector, seed=cell.seed, device=device, progress=progress, **settings)
    model.fit(train_images[torch.from_numpy(split.index)], split.labels, pretrained)
    clock["finetune"] = time.monotonic() - start

    start = time.monotonic()
    scores = model.anomaly_score(test_images).numpy()
    clock["score"] = time.monotonic() - start
    per_class = auroc_per_class(scores, test_classes.numpy(), normal)
    line = {
        **cell.fields(),
        "auroc": round(float(np.mean(list(per_class.values()))), 3),
        "auroc_per_class": per_class,
        "seconds": {stage: round(seconds, 2) for stage, seconds in clock.items()},
        "early_stop": [round(entry["early_stop"], 4) for entry in model.history_],
        "settings": dataclasses.asdict(model.config),
        **provenance(device),
    }
    return line, pretrained


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
        "command": "python -m elsa.bench " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "card": card,
    }


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
    """Add one line so that it survives a crash, in place of one that a crash had cut."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with open(results, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
