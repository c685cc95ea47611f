"""Elsa's head beside other detectors on one and the same embeddings: CIFAR-10, Imagenette, solar cells (ELPV).

Run: python benchmarks/head.py DATASET EMBEDDINGS [--protocol shares|labels] [--normal N ...] [--labelled-classes 3]
         [--pollution 0 0.1] [--seeds 0] [--detectors NAME ...] [--play]
     python benchmarks/head.py --table
EMBEDDINGS is an .npz of float32 `train` [N, D], `train_classes`, `test`, `test_classes`: what `elsa.encoders.embed`
makes of the images, at 160 px from CIFAR-10 and Imagenette, at 224 from ELPV, whose classes are 1 for defects.
Protocol `shares` is the paper's: 5% labelled normals, 5% labelled anomalies of one class, the next ones in cyclic order
in turn; the figure is the mean over the other classes. Protocol `labels` gives 0, 5, 20 or 50 labels of each kind, the
anomalies of all other classes. --play holds out a fifth of each class of the *training* images and tests on it: so the
settings were chosen. One JSON line is appended for each run that is missing; --table writes docs/head.md.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import normalize

from elsa.bench.run import append_line, provenance
from elsa.data.splits import one_class_split
from elsa.detectors import build
from elsa.trust.metrics import auroc

RESULTS = Path("results/head.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "head.md"
GAMMA_L = 0.05
LABELS = (0, 5, 20, 50)
NEEDS_LABELS = {"logistic", "positive-unlabelled"}
DETECTORS = ("elsa-head", "knn", "oc-svm", "deep-sad-loss", "logistic", "positive-unlabelled")


class PositiveUnlabelled:
    """Logistic regression of labelled anomalies against everything else, unlabelled images as if normal."""

    def fit(self, vectors: Tensor, labels: Sequence[str]) -> "PositiveUnlabelled":
        anomaly = np.array([label == "anomaly" for label in labels])
        self.model = LogisticRegression(C=1.0, class_weight="balanced", max_iter=1000)
        self.model.fit(vectors.numpy(), anomaly)
        return self

    def anomaly_score(self, vectors: Tensor) -> Tensor:
        return torch.from_numpy(self.model.decision_function(vectors.numpy()))


class DeepSadLoss:
    """Deep SAD's loss on a linear map of the embeddings to 32 numbers: distance to a centre or its inverse."""

    def __init__(self, seed: int):
        self.seed = seed

    def fit(self, vectors: Tensor, labels: Sequence[str]) -> "DeepSadLoss":
        z = normalize(vectors, dim=1)
        sign = torch.tensor([-1.0 if label == "anomaly" else 1.0 for label in labels])
        draw = torch.Generator().manual_seed(self.seed)
        self.map = (torch.randn(z.shape[1], 32, generator=draw) / 32**0.5).requires_grad_()
        self.centre = (z[sign > 0] @ self.map).mean(dim=0).detach()
        optimizer = torch.optim.Adam([self.map], lr=1e-3, weight_decay=1e-4)
        for _ in range(20):
            for batch in torch.randperm(len(z), generator=draw).split(128):
                distance = (z[batch] @ self.map - self.centre).square().sum(dim=1)
                loss = ((distance + 1e-6) ** sign[batch]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return self

    def anomaly_score(self, vectors: Tensor) -> Tensor:
        with torch.no_grad():
            return (normalize(vectors, dim=1) @ self.map - self.centre).square().sum(dim=1)


def make(name: str, seed: int) -> Any:
    """The detector of a row."""
    if name == "positive-unlabelled":
        return PositiveUnlabelled()
    return DeepSadLoss(seed) if name == "deep-sad-loss" else build(name, seed=seed)


@dataclass(frozen=True)
class Sets:
    """Embeddings to learn from and to test on, with their classes."""

    train: Tensor
    train_classes: NDArray[np.int64]
    test: Tensor
    test_classes: NDArray[np.int64]


def read_sets(file: Path, play: bool) -> Sets:
    """The embeddings; with `play` a fifth of the training images of each class is the test set."""
    with np.load(file) as stored:
        parts = {name: stored[name] for name in ("train", "train_classes", "test", "test_classes")}
    train, classes = torch.from_numpy(parts["train"]), parts["train_classes"].astype(np.int64)
    if not play:
        return Sets(train, classes, torch.from_numpy(parts["test"]), parts["test_classes"].astype(np.int64))
    held_out = np.zeros(len(classes), bool)
    rng = np.random.default_rng(12345)
    for one in np.unique(classes):
        places = np.flatnonzero(classes == one)
        held_out[rng.permutation(places)[: len(places) // 5]] = True
    return Sets(train[~held_out], classes[~held_out], train[held_out], classes[held_out])


def few_labels(classes: NDArray, normal: int, each: int, pollution: float, seed: int) -> tuple[NDArray, list[str]]:
    """Places and words: all normals, `each` of them labelled, hidden others of all kinds, `each` labelled ones."""
    rng = np.random.default_rng([seed, normal, 7])
    normals = rng.permutation(np.flatnonzero(classes == normal))
    others = rng.permutation(np.flatnonzero(classes != normal))
    known, rest = others[:each], others[max(LABELS) :]
    # a set with few anomalies gives fewer normals to keep the share: never fewer hidden ones
    hidden = min(round(pollution / (1 - pollution) * (len(normals) - each)), len(rest))
    if pollution:
        normals = normals[: each + round(hidden * (1 - pollution) / pollution)]
    index = np.concatenate([normals, rest[:hidden], known])
    return index, ["normal"] * each + [""] * (len(normals) - each + hidden) + ["anomaly"] * each


def published(scores: NDArray, classes: NDArray, normal: int) -> float:
    """Mean over the other classes of the AUROC in percent against each."""
    others = [one for one in np.unique(classes) if one != normal]
    figures = []
    for other in others:
        chosen = (classes == other) | (classes == normal)
        figures.append(100 * auroc(scores[chosen], classes[chosen] == other))
    return statistics.fmean(figures)


def tasks(options: argparse.Namespace, sets: Sets) -> Iterator[dict[str, Any]]:
    """What each line says of its run, without the result."""
    kinds = len(np.unique(sets.train_classes))
    for seed in options.seeds:
        for pollution in options.pollution:
            for normal in options.normal if options.normal is not None else range(kinds):
                if options.protocol == "shares":
                    cells = [
                        {"labelled": (normal + step) % kinds, "gamma_l": GAMMA_L}
                        for step in range(1, options.labelled_classes + 1)
                    ]
                else:
                    cells = [{"labelled": "all", "labels": count} for count in options.labels]
                for cell in cells:
                    yield {"normal": normal, **cell, "gamma_p": pollution, "seed": seed}


def run(options: argparse.Namespace, command: str) -> None:
    """Append a line for everything that is missing."""
    sets = read_sets(options.embeddings, options.play)
    dataset = options.dataset + ("-play" if options.play else "")
    lines = read_lines(options.results)
    for task in tasks(options, sets):
        for name in options.detectors:
            key = {"dataset": dataset, "encoder": options.encoder, "detector": name, **task}
            if name in NEEDS_LABELS and not task.get("labels", 1):
                continue
            if any(all(line.get(field) == value for field, value in key.items()) for line in lines):
                continue
            if "labels" in task:
                index, words = few_labels(
                    sets.train_classes, task["normal"], task["labels"], task["gamma_p"], task["seed"]
                )
            else:
                split = one_class_split(
                    sets.train_classes, task["normal"], task["labelled"], GAMMA_L, task["gamma_p"], task["seed"]
                )
                index, words = split.index, split.labels
            began = time.perf_counter()
            detector = make(name, task["seed"]).fit(sets.train[index], words)
            fitted = time.perf_counter()
            scores = detector.anomaly_score(sets.test).numpy()
            line = {
                "plan": "head",
                **key,
                "auroc": round(published(scores, sets.test_classes, task["normal"]), 3),
                "seconds": {"fit": round(fitted - began, 2), "score": round(time.perf_counter() - fitted, 2)},
                **provenance("cpu"),
                "command": command,
            }
            append_line(options.results, line)
            lines.append(line)
            print(" ".join(f"{value}" for value in key.values()), line["auroc"], line["seconds"], flush=True)


def read_lines(results: Path) -> list[dict]:
    """The lines of the results so far."""
    return [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []


def table(lines: list[dict]) -> str:
    """Markdown: a block for each data set and protocol, a row for each detector, a column for each cell."""
    blocks = []
    for dataset, by_labels in sorted({(line["dataset"], "labels" in line) for line in lines}):
        chosen = [line for line in lines if line["dataset"] == dataset and ("labels" in line) == by_labels]
        columns = sorted({(line.get("labels", -1), line["gamma_p"]) for line in chosen})
        names = [f"{labels} labels, {p:.0%}" if by_labels else f"gamma_p {p:g}" for labels, p in columns]
        text = [f"{dataset}:", "", f"| detector | {' | '.join(names)} |", f"|{'---|' * (1 + len(columns))}"]
        for name in DETECTORS:
            cells = []
            for labels, pollution in columns:
                found = [
                    line["auroc"]
                    for line in chosen
                    if (line["detector"], line.get("labels", -1), line["gamma_p"]) == (name, labels, pollution)
                ]
                error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
                spread = "" if error is None else f" ± {error:.1f}"
                cells.append(f"{statistics.fmean(found):.1f}{spread} (n={len(found)})" if found else "")
            if any(cells):
                text.append(f"| {name} | {' | '.join(cells)} |")
        blocks.append("\n".join(text))
    return "\n\n".join(blocks)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", choices=["cifar10", "imagenette", "elpv"])
    parser.add_argument("embeddings", type=Path, nargs="?")
    parser.add_argument("--encoder", default="mobilenet_v2")
    parser.add_argument("--protocol", choices=["shares", "labels"], default="shares")
    parser.add_argument("--normal", type=int, nargs="+")
    parser.add_argument("--labelled-classes", type=int, default=3)
    parser.add_argument("--labels", type=int, nargs="+", default=list(LABELS))
    parser.add_argument("--pollution", type=float, nargs="+", default=[0.0, 0.05, 0.1, 0.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=list(DETECTORS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--play", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if options.table:
        marked = re.compile(r"(<!-- head -->\n).*?(<!-- end -->)", re.DOTALL)
        text = table(read_lines(options.results))
        page, count = marked.subn(lambda match: f"{match[1]}{text}\n{match[2]}", PAGE.read_text())
        assert count == 1, f"{PAGE} lost its marks"
        PAGE.write_text(page)
        return
    if options.embeddings is None:
        parser.error("DATASET and EMBEDDINGS are needed to run, see --help")
    told = [argument if argument != str(options.embeddings) else "EMBEDDINGS" for argument in arguments]
    run(options, f"python benchmarks/head.py {' '.join(told)}")


if __name__ == "__main__":
    main(sys.argv[1:])
