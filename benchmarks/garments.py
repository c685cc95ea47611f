"""Ten garments of Fashion-MNIST, each in turn the normal one: Elsa's head beside what else could be done.

Run: python benchmarks/garments.py FOLDER WEIGHTS [--seeds 0 1 2] [--detectors NAME ...]
     python benchmarks/garments.py --table [--results FILE]
FOLDER holds the four .gz files (Debian: package dataset-fashion-mnist, /usr/share/datasets/fashion-mnist), WEIGHTS is
torchvision's mobilenet_v2-b0353104.pth. Training images come from the train file, test images from the test file: 1,350
normal, of which 30 are labelled, 150 hidden others, 30 labelled others; 500 and 500 to test. One JSON line is appended
to the results for each (garment, seed, detector) that is missing there, so a killed run goes on where it stopped.
Beside other work set OMP_WAIT_POLICY=passive, or threads that spin against it make a fit take four times as long.
--detectors elsa is a tiny network that has seen nothing but the training images, as in `elsa demo --from-scratch`.
--table writes the lines as two tables into docs/head.md.
"""

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from elsa.bench.run import append_line, provenance
from elsa.data.benchmarks import FASHION_MNIST_CLASSES, load_fashion_mnist
from elsa.data.demo import DemoSplit, demo_split
from elsa.demo import FROM_SCRATCH
from elsa.detectors import build
from elsa.encoders import Encoder, embed, parse_encoder
from elsa.trust.metrics import auroc

PLAN = "garments"
RESULTS = Path("results/garments.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "head.md"
ON_VECTORS = {
    "elsa-head": "embeddings, labels and the rest",
    "logistic": "embeddings, the labels alone",
    "knn-minus-anomalies": "embeddings; 5 neighbours, minus closeness to the labelled anomalies",
    "knn": "embeddings, no labels",
}
ON_PIXELS = dict.fromkeys(("isolation-forest", "oc-svm", "kde"), "pixels, no labels")
SCRATCH = {"elsa": "pixels, from scratch (tiny network), and labels"}


class NeighboursMinusCloseness:
    """Cosine distance to the 5 nearest normal or unlabelled images plus the similarity to the 5 nearest anomalies."""

    def fit(self, vectors: Tensor, labels: list[str]) -> "NeighboursMinusCloseness":
        unit = normalize(vectors, dim=1)
        anomaly = torch.tensor([label == "anomaly" for label in labels])
        self.rest, self.anomalies = unit[~anomaly], unit[anomaly]
        return self

    def anomaly_score(self, vectors: Tensor) -> Tensor:
        unit = normalize(vectors, dim=1)
        to_rest, to_anomalies = ((unit @ known.T).topk(5).values.mean(dim=1) for known in (self.rest, self.anomalies))
        return to_anomalies - to_rest


def splits(train_classes: Tensor, test_classes: Tensor, normal: int, seed: int) -> tuple[DemoSplit, DemoSplit]:
    """What to learn from, drawn from the train file, and what to test on, drawn from the test file."""
    nothing = {"normals": 0, "hidden": 0, "labelled_normals": 0, "labelled_anomalies": 0}
    return (
        demo_split(train_classes.numpy(), normal, seed, test=0),
        demo_split(test_classes.numpy(), normal, seed, **nothing),
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    usual = [*ON_VECTORS, *ON_PIXELS]
    parser.add_argument("--detectors", nargs="+", choices=[*usual, *SCRATCH], default=usual)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if options.table:
        write_table(options.results, PAGE)
        return
    if options.weights is None:
        parser.error("FOLDER and WEIGHTS are needed to run, see --help")
    command = f"python benchmarks/garments.py FOLDER WEIGHTS --seeds {' '.join(map(str, options.seeds))}"
    command += "" if options.detectors == usual else f" --detectors {' '.join(options.detectors)}"
    run(options.folder, options.weights, options.results, options.seeds, options.detectors, command)


def run(folder: Path, weights: Path, results: Path, seeds: list[int], detectors: list[str], command: str) -> None:
    """Append a line for everything that is missing."""
    done = {(line["normal"], line["seed"], line["detector"]) for line in read_lines(results)}
    train_images, train_classes, test_images, test_classes = load_fashion_mnist(folder)
    tasks = [
        (name, normal, seed, *splits(train_classes, test_classes, normal, seed))
        for seed in seeds
        for normal, garment in enumerate(FASHION_MNIST_CLASSES)
        for name in detectors
        if (garment, seed, name) not in done
    ]
    on_vectors = [(train, test) for name, _, _, train, test in tasks if name in ON_VECTORS]
    train_vectors = test_vectors = torch.empty(0)
    seconds_per_image = 0.0
    if on_vectors:
        began = time.perf_counter()
        encoder = parse_encoder(f"mobilenet_v2:{weights}")
        train_vectors, train_count = embedded(encoder, train_images, [train.train_index for train, _ in on_vectors])
        test_vectors, test_count = embedded(encoder, test_images, [test.test_index for _, test in on_vectors])
        seconds_per_image = (time.perf_counter() - began) / (train_count + test_count)

    for name, normal, seed, train, test in tasks:
        garment = FASHION_MNIST_CLASSES[normal]
        inputs = (train_vectors, test_vectors) if name in ON_VECTORS else (train_images, test_images)
        began = time.perf_counter()
        detector = make(name, seed).fit(inputs[0][train.train_index], train.labels)
        fitted = time.perf_counter()
        scores = detector.anomaly_score(inputs[1][test.test_index])
        seconds = {"fit": fitted - began, "score": time.perf_counter() - fitted}
        if name in ON_VECTORS:
            seconds["embed"] = seconds_per_image * (len(train.labels) + len(test.test_index))
        line = {
            "plan": PLAN,
            "detector": name,
            "dataset": "fashion-mnist",
            "normal": garment,
            "labelled": "30 of the nine others, 30 normal",
            "gamma_p": 0.1,
            "seed": seed,
            "auroc": round(100 * auroc(scores.numpy(), test.test_anomaly), 3),
            "seconds": {stage: round(spent, 2) for stage, spent in seconds.items()},
            **provenance("cpu"),
            "command": command,
        }
        append_line(results, line)
        print(f"{garment:12} seed {seed}  {name:20} {line['auroc']:6.2f}  {sum(seconds.values()):5.1f} s", flush=True)


def make(name: str, seed: int) -> Any:
    """The detector of a row."""
    if name == "knn-minus-anomalies":
        return NeighboursMinusCloseness()
    return build(name, seed=seed, **(FROM_SCRATCH if name in SCRATCH else {}))


def embedded(encoder: Encoder, images: Tensor, parts: list[np.ndarray]) -> tuple[Tensor, int]:
    """A vector for each image that some part names, NaN for the others; and how many were named."""
    needed = np.unique(np.concatenate(parts))
    vectors = torch.full((len(images), encoder.features), torch.nan)
    vectors[needed] = embed(encoder, images[needed])
    return vectors, len(needed)


def read_lines(results: Path) -> list[dict]:
    """The lines of the results so far."""
    return [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []


def table(lines: list[dict]) -> str:
    """Markdown: a row for each detector, best mean first; a column for each garment, the mean over its seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    seconds: dict[str, list[float]] = {}
    for line in lines:
        found.setdefault(line["detector"], {}).setdefault(line["normal"], []).append(line["auroc"])
        seconds.setdefault(line["detector"], []).append(sum(line["seconds"].values()))
    garments = [garment for garment in FASHION_MNIST_CLASSES if all(garment in row for row in found.values())]
    rows = {name: [statistics.fmean(row[garment]) for garment in garments] for name, row in found.items()}
    notes = ON_VECTORS | ON_PIXELS | SCRATCH
    head = ["detector", "sees", *garments, "mean", "s"]
    text = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name in sorted(rows, key=lambda name: -statistics.fmean(rows[name])):
        figures = [f"{value:.1f}" for value in (*rows[name], statistics.fmean(rows[name]))]
        text.append(f"| {name} | {notes[name]} | {' | '.join(figures)} | {statistics.fmean(seconds[name]):.1f} |")
    return "\n".join(text)


def write_table(results: Path, page: Path) -> None:
    """Put both tables between their marks in the page: pretrained, and from scratch on the seeds that it was run on."""
    lines = read_lines(results)
    scratch_seeds = {line["seed"] for line in lines if line["detector"] in SCRATCH}
    fill(page, "garments", [line for line in lines if line["detector"] not in SCRATCH])
    from_scratch = [line for line in lines if line["detector"] in SCRATCH | ON_PIXELS and line["seed"] in scratch_seeds]
    fill(page, "garments from scratch", from_scratch)


def fill(page: Path, mark: str, lines: list[dict]) -> None:
    """Replace what stands between `mark` and the next end by the table of these lines."""
    marked = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    seeds = sorted({line["seed"] for line in lines})
    caption = (
        f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}; {len(lines)} runs; `s` is a run's mean seconds, "
        "its embedding included."
    )
    content = f"{table(lines)}\n\n{caption}\n"
    text, replaced = marked.subn(lambda match: match[1] + content + match[2], page.read_text())
    assert replaced == 1, f"{page} lost its marks"
    page.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
