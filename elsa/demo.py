"""`elsa demo`: bags are normal, one garment in ten among them is something else, and the whole path runs on a CPU."""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from elsa.data.audit import Audit, audit
from elsa.data.benchmarks import FASHION_MNIST_CLASSES
from elsa.data.demo import BAG, DEMO_FILE, DemoSplit, demo_split
from elsa.data.sources import open_source
from elsa.detectors import build
from elsa.jobs import versions
from elsa.memory import peak_memory_mb
from elsa.output import check_writable, write_whole
from elsa.progress import Progress, silent
from elsa.report.histogram import Series
from elsa.report.page import Gallery, Picture, Report, Row, write_report
from elsa.trust.metrics import Evaluation, evaluate

SEEDS = (0, 1, 2)
SHOWN = 24  # fills rows of 8 on a desk and of 3 on a telephone
# Ends well within three minutes on two cores; chosen on seeds 1 and 2 (97.1 and 93.1, half the fine-tuning 96.6 and
# 91.4), while the demo shows seed 0. Elsa+ reached 67 in the time: bags and shirts look alike in every rotation.
FROM_SCRATCH: dict[str, Any] = {"preset": "cpu", "pretrain_epochs": 60, "finetune_epochs": 60}


@dataclass(frozen=True)
class DemoResult:
    """What the demo found; figures in percent, one evaluation for each seed."""

    folder: Path
    evaluations: dict[str, list[Evaluation]]
    notes: dict[str, str]
    suspects_right: int
    hidden: int
    seconds: float
    peak_memory_mb: float | None

    @property
    def rows(self) -> list[Row]:
        """A row for each detector, best first."""
        rows = [_row(name, self.notes[name], runs) for name, runs in self.evaluations.items()]
        return sorted(rows, key=lambda row: -row.value)

    def to_dict(self) -> dict[str, Any]:
        """demo/summary.json."""
        return {
            "auroc": {row.name: row.value for row in self.rows},
            "interval_95": {row.name: [row.low, row.high] for row in self.rows},
            "auroc_by_seed": {
                name: [_row(name, "", [run]).value for run in runs] for name, runs in self.evaluations.items()
            },
            "seconds": self.seconds,
            "peak_memory_mb": self.peak_memory_mb,
            "suspects": {"right": self.suspects_right, "of": self.hidden},
            "versions": versions(),
        }

    def show(self) -> None:
        """The table, and where the report lies."""
        runs = len(next(iter(self.evaluations.values())))
        table = Table(title=f"AUROC on 1,000 unseen images, {_runs(runs)}", title_justify="left")
        table.add_column("detector")
        table.add_column("works on")
        table.add_column("AUROC", justify="right")
        table.add_column("95% interval", justify="right")
        for row in self.rows:
            style = "bold green" if row.ours else ""
            table.add_row(row.name, row.note, f"{row.value:.1f}", f"{row.low:.1f} to {row.high:.1f}", style=style)
        console = Console()
        console.print(table)
        console.print(
            f"Of the {self.hidden} most suspicious training images, {self.suspects_right} really hide among the bags.\n"
            f"{self.seconds:.0f} s; look at {self.folder / 'report.html'}",
            highlight=False,
        )


def run_demo(
    folder: Path, from_scratch: bool = False, command: str = "elsa demo", progress: Progress = silent
) -> DemoResult:
    """Audit, embed, learn, score, compare; writes report.html and summary.json into the folder."""
    began = time.monotonic()
    check_writable(folder / "report.html")
    with np.load(DEMO_FILE, allow_pickle=False) as stored:
        images, garments = torch.from_numpy(stored["images"])[:, None], stored["garment"].tolist()
    class_ids = [FASHION_MNIST_CLASSES.index(garment) for garment in garments]
    seeds = SEEDS[:1] if from_scratch else SEEDS
    splits = [demo_split(class_ids, BAG, seed) for seed in seeds]
    found = _audit(splits[0], progress)

    contenders = _from_scratch(images, progress) if from_scratch else _pretrained(images, splits, progress)
    evaluations: dict[str, list[Evaluation]] = {contender.name: [] for contender in contenders}
    scored: dict[str, tuple[Tensor, Tensor]] = {}
    steps = len(contenders) * len(seeds)
    for step, (contender, seed) in enumerate(itertools.product(contenders, seeds)):
        progress("compare", step, steps, {})
        split = splits[seed]
        detector = build(contender.detector, seed=seed, **contender.settings)
        detector.fit(contender.inputs[split.train_index], split.labels)
        scores = detector.anomaly_score(contender.inputs[split.test_index])
        evaluations[contender.name].append(evaluate(scores.numpy(), _words(split.test_anomaly)))
        if seed == seeds[0]:
            scored[contender.name] = contender.train_scores(detector, contender.inputs[split.train_index]), scores
    progress("compare", steps, steps, {})

    train_scores, test_scores = scored["elsa"]
    suspicious = suspects(splits[0], train_scores)
    hidden = int(splits[0].hidden.sum())
    result = DemoResult(
        folder=folder,
        evaluations=evaluations,
        notes={contender.name: contender.note for contender in contenders},
        suspects_right=int(splits[0].hidden[suspicious[:hidden]].sum()),
        hidden=hidden,
        seconds=round(time.monotonic() - began, 1),
        peak_memory_mb=peak_memory_mb(),
    )
    report = _report(result, splits[0], images, garments, train_scores, test_scores, suspicious, found, command)
    write_report(folder / "report.html", report)
    write_whole(folder / "summary.json", (json.dumps(result.to_dict(), indent=1) + "\n").encode())
    return result


@dataclass(frozen=True)
class Contender:
    """A row of the table: a detector, what it looks at, and how."""

    name: str
    detector: str
    inputs: Tensor
    note: str
    settings: dict[str, Any] = field(default_factory=dict)
    train_scores: Callable[[Any, Tensor], Tensor] = lambda detector, inputs: detector.anomaly_score(inputs)
    """Scores of the images it was fitted on."""


def _pretrained(images: Tensor, splits: Sequence[DemoSplit], progress: Progress) -> list[Contender]:
    """Elsa's head beside the usual methods; the embeddings are computed once for all of them and all seeds."""
    from elsa.encoders import embed, parse_encoder
    from elsa.weights import find_mobilenet_v2

    encoder = parse_encoder(f"mobilenet_v2:{find_mobilenet_v2()}")
    needed = np.unique(np.concatenate([np.concatenate([split.train_index, split.test_index]) for split in splits]))
    vectors = torch.full((len(images), encoder.features), torch.nan)
    vectors[needed] = embed(encoder, images[needed], progress=progress)
    return [
        Contender(
            "elsa",
            "elsa-head",
            vectors,
            "embeddings, labels and the rest",
            # the head remembers training images as neighbours: scored anew, each would be its own
            train_scores=lambda detector, inputs: detector.train_scores_,
        ),
        Contender("logistic", "logistic", vectors, "embeddings, the labels alone"),
        Contender("knn", "knn", vectors, "embeddings, no labels"),
        *_on_pixels(images),
    ]


def _from_scratch(images: Tensor, progress: Progress) -> list[Contender]:
    """Elsa on a tiny network that has seen nothing but the training images."""
    settings = {**FROM_SCRATCH, "progress": progress}
    return [Contender("elsa", "elsa", images, "pixels, from scratch, and labels", settings), *_on_pixels(images)]


def _on_pixels(images: Tensor) -> list[Contender]:
    return [Contender(name, name, images, "pixels, no labels") for name in ("isolation-forest", "oc-svm", "kde")]


def _audit(split: DemoSplit, progress: Progress) -> Audit:
    """What `elsa data check` says about the training set."""
    order = np.argsort(split.train_index)
    source = open_source(DEMO_FILE).subset(split.train_index[order].tolist())
    found = audit(dataclasses.replace(source, labels=[split.labels[i] for i in order]), progress)
    return dataclasses.replace(found, source=DEMO_FILE.name)  # where it is installed concerns no reader of the report


def _words(is_anomaly: NDArray[np.bool_]) -> list[str]:
    return ["anomaly" if anomaly else "normal" for anomaly in is_anomaly]


def suspects(split: DemoSplit, train_scores: Tensor) -> NDArray[np.int64]:
    """Places of the unlabelled training images, most suspicious first."""
    unlabelled = np.flatnonzero([label == "" for label in split.labels])
    return unlabelled[np.argsort(-train_scores.numpy()[unlabelled], kind="stable")]


def _row(name: str, note: str, found: list[Evaluation]) -> Row:
    """Means over the runs, of the figure and of both ends of its interval."""
    value, low, high = (
        round(100 * statistics.fmean(getattr(run.auroc, end) for run in found), 2) for end in ("value", "low", "high")
    )
    return Row(name, value, low, high, note, ours=name == "elsa")


def _report(
    result: DemoResult,
    split: DemoSplit,
    images: Tensor,
    garments: list[str],
    train_scores: Tensor,
    test_scores: Tensor,
    suspicious: NDArray[np.int64],
    found: Audit,
    command: str,
) -> Report:
    test_order = np.argsort(-test_scores.numpy(), kind="stable")

    def pictures(places: NDArray[np.int64], index: NDArray[np.int64], scores: Tensor, truth: NDArray) -> list[Picture]:
        words = _words(truth[places])
        return [
            Picture(images[index[place]], float(scores[place]), garments[index[place]], word)
            for place, word in zip(places, words, strict=True)
        ]

    normals, anomalies = split.labels.count("normal"), split.labels.count("anomaly")
    best, runs = next(row for row in result.rows if row.ours), len(next(iter(result.evaluations.values())))
    on_test = (split.test_index, test_scores, split.test_anomaly)
    return Report(
        title="Bags, and what hides among them",
        lead=f"Elsa was given {len(split.labels) - anomalies:,} pictures as bags. {result.hidden} of them are shirts, "
        f"shoes and other garments, and nobody said which. All its help: {normals} of the bags named as bags, and "
        f"{anomalies} more pictures named as no bags.",
        tiles=[
            (f"{best.value:.1f}", f"AUROC in percent on new pictures, {_runs(runs)}"),
            (
                f"{result.suspects_right} of {result.hidden}",
                f"the {result.hidden} most suspicious training pictures that really are no bags",
            ),
            (f"{result.seconds:.0f} s", "for everything on this page, on a CPU"),
        ],
        rows_title="Elsa beside the usual methods",
        rows_explanation=f"AUROC on {len(split.test_index):,} pictures that none of them has seen, {_runs(runs)}: "
        "the chance that another garment scores above a bag. 50 is guessing, 100 is perfect. "
        "An interval is the mean of the runs' own intervals.",
        rows=result.rows,
        galleries=[
            Gallery(
                "Suspects hidden in the training set",
                "The unlabelled training pictures that look least like bags to Elsa, worth a look before the next fit. "
                "Below each stands what it shows and whether it is an anomaly; Elsa was not told.",
                pictures(suspicious[:SHOWN], split.train_index, train_scores, split.hidden),
            ),
            Gallery(
                "Most anomalous",
                "New pictures with the highest scores.",
                pictures(test_order[:SHOWN], *on_test),
            ),
            Gallery(
                "Most normal",
                "New pictures with the lowest scores.",
                pictures(test_order[::-1][:SHOWN], *on_test),
            ),
        ],
        histogram_explanation="New pictures only. Each group is drawn to its own highest bin.",
        histogram=[
            Series("bags", "normal", test_scores[~torch.from_numpy(split.test_anomaly)].tolist()),
            Series("other garments", "anomaly", test_scores[torch.from_numpy(split.test_anomaly)].tolist()),
        ],
        findings=found.lines(),
        provenance={
            "command": command,
            "images": "Fashion-MNIST (Zalando Research, MIT licence), the subset that comes with elsa",
            "seeds": ", ".join(str(seed) for seed in range(runs)),
            **versions(),
        },
    )


def _runs(runs: int) -> str:
    return "one run" if runs == 1 else f"mean of {runs} seeds"
