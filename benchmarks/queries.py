"""What 30 asked labels are worth beside random ones: CIFAR-10, 10% pollution, each class in turn the normal one.

    python benchmarks/queries.py EMBEDDINGS LABELS [--ask "mix" ...] [--random 30 90 ...] [--seeds 0] [--play]
    python benchmarks/queries.py --table [--results FILE]

EMBEDDINGS is a .npy with MobileNetV2's vectors of CIFAR-10 (elsa.encoders.embed at 160 px), the 50,000 training images
and then the 10,000 of the test file; LABELS a .npy with their classes. The pile: 1,350 images of the normal class from
the second half of the training file and 150 of the nine others, none with a label. A simulated labeller says the truth
about what it is asked, in rounds of 10 with a fit of elsa-head after each. The figure is the AUROC on the test file, of
the class against the nine others. --play takes the test images from the training file, too, for choosing the mix.
One JSON line is appended for each run that is missing there, so a killed benchmark goes on where it stopped.
"""

import argparse
import json
import re
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from elsa.bench.lines import append_line, provenance
from elsa.data.benchmarks import CIFAR10_CLASSES
from elsa.head import ElsaHead
from elsa.seeds import fold
from elsa.trust.calibrate import lowest_false_alarms, score_threshold
from elsa.trust.metrics import auroc
from elsa.workspace.queries import AUDIT, MIX, State, ask

ROUND = 10
ASKED = 30
POLLUTION = 0.1
PAGE = Path(__file__).parent.parent / "docs" / "queries.md"
RESULTS = Path(__file__).parent.parent / "results" / "queries.jsonl"


class Pile:
    """Unlabelled training images of one normal class with hidden others, and the test images."""

    def __init__(self, vectors: NDArray, classes: NDArray, normal: int, seed: int, normals: int, play: bool) -> None:
        generator = np.random.default_rng(fold(seed, f"pile of {normal}"))
        learn, test = (
            slice(25_000, 40_000 if play else 50_000),
            slice(40_000, 50_000) if play else slice(50_000, 60_000),
        )
        same, other = np.flatnonzero(classes[learn] == normal), np.flatnonzero(classes[learn] != normal)
        hidden = round(normals * POLLUTION / (1 - POLLUTION))
        chosen = [generator.choice(rows, number, replace=False) for rows, number in ((same, normals), (other, hidden))]
        rows = generator.permutation(np.concatenate(chosen))
        self.vectors = torch.from_numpy(vectors[learn][rows])
        self.truth = np.where(classes[learn][rows] == normal, "normal", "anomaly")
        self.test, self.test_anomaly = torch.from_numpy(vectors[test]), classes[test] != normal
        self.seed = seed

    def fit(self, labelled: NDArray) -> ElsaHead:
        """The head on what is labelled so far."""
        words = np.where(labelled, self.truth, "").tolist()
        return ElsaHead(seed=self.seed).fit(self.vectors, words)

    def auroc(self, head: ElsaHead) -> float:
        """In percent, on the test images."""
        return 100 * auroc(head.anomaly_score(self.test).numpy(), self.test_anomaly)

    def random(self, count: int) -> NDArray:
        """A mask of labels drawn evenly; of two counts the smaller draw lies within the larger."""
        chosen = np.random.default_rng(fold(self.seed, "random labels")).permutation(len(self.truth))[:count]
        return np.isin(np.arange(len(self.truth)), chosen)

    def asked(self, strategy: str, start: ElsaHead) -> tuple[ElsaHead, NDArray]:
        """The head after 30 answers, and what was labelled."""
        labelled, head = np.zeros(len(self.truth), bool), start
        for turn in range(ASKED // ROUND):
            rate = max(0.05, lowest_false_alarms(len(head.calibration_)))
            state = State(
                scores=head.train_scores_.numpy(),
                labelled=labelled,
                threshold=score_threshold(head.calibration_, rate),
                prototypes=head.prototype_of(self.vectors).numpy(),
                embeddings=self.vectors.numpy(),
            )
            labelled = labelled.copy()
            labelled[[one.index for one in ask(state, strategy, ROUND, seed=fold(self.seed, f"round {turn}"))]] = True
            head = self.fit(labelled)
        return head, labelled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embeddings", nargs="?", type=Path)
    parser.add_argument("labels", nargs="?", type=Path)
    parser.add_argument("--ask", nargs="*", default=[MIX])
    parser.add_argument("--random", nargs="*", type=int, default=[30, 90])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--classes", nargs="*", type=int, default=list(range(10)))
    parser.add_argument("--normals", type=int, default=1350)
    parser.add_argument("--play", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        write_table(options.results)
        return
    vectors, classes = np.load(options.embeddings), np.load(options.labels)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    done = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    torch.set_num_threads(1)
    for seed in options.seeds:
        for normal in options.classes:
            wanted = [("asked", name, ASKED) for name in options.ask] + [("random", AUDIT, n) for n in options.random]
            what = {"plan": "play" if options.play else "test", "normal": CIFAR10_CLASSES[normal], "seed": seed}
            what |= {"normals": options.normals, "gamma_p": POLLUTION}
            missing = [one for one in wanted if not any(line.items() >= _key(what, *one).items() for line in done)]
            if missing:
                run(Pile(vectors, classes, normal, seed, options.normals, options.play), what, missing, options.results)


def _key(what: dict, how: str, strategy: str, count: int) -> dict:
    return what | {"how": how, "strategy": strategy, "labels": count}


def run(pile: Pile, what: dict, missing: list[tuple[str, str, int]], results: Path) -> None:
    """Append a line for each run that is missing."""
    start = pile.fit(np.zeros(len(pile.truth), bool))
    unlabelled = round(pile.auroc(start), 2)
    for how, strategy, count in missing:
        began = time.perf_counter()
        if how == "asked":
            head, labelled = pile.asked(strategy, start)
        else:
            labelled = pile.random(count)
            head = pile.fit(labelled)
        line = _key(what, how, strategy, count) | {
            "auroc": round(pile.auroc(head), 2),
            "unlabelled": unlabelled,
            "anomalies": int((pile.truth[labelled] == "anomaly").sum()),
            "seconds": round(time.perf_counter() - began, 1),
        }
        given = [word for word in sys.argv[3:] if word not in ("--results", str(results))]
        command = "python benchmarks/queries.py EMBEDDINGS LABELS " + shlex.join(given)
        append_line(results, line | provenance("cpu") | {"command": command.strip()})
        print(line, flush=True)


def write_table(results: Path) -> None:
    """Write the lines of the test plan into docs/queries.md."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    text = PAGE.read_text()
    new = re.sub(r"(<!-- queries -->\n).*?(<!-- end -->)", lambda m: m[1] + table(lines) + m[2], text, flags=re.DOTALL)
    PAGE.write_text(new)


def table(lines: list[dict]) -> str:
    """One row for each way of choosing labels, its mean over seeds for each class, and what it is beside 90 random."""
    lines = [line for line in lines if line["plan"] == "test"]
    classes = [name for name in CIFAR10_CLASSES if any(line["normal"] == name for line in lines)]
    ways = sorted({(line["how"], line["labels"], line["strategy"]) for line in lines})
    yardstick = {_pile(line): line["auroc"] for line in lines if (line["how"], line["labels"]) == ("random", 90)}
    rows = []

    def row(name: str, chosen: list[dict], field: str) -> str:
        means = [float(np.mean([line[field] for line in chosen if line["normal"] == one])) for one in classes]
        found = f"{np.mean([line['anomalies'] for line in chosen]):.0f}" if field == "auroc" else "0"
        better = {_pile(line): line[field] - yardstick[_pile(line)] for line in chosen if _pile(line) in yardstick}
        figures = [f"{mean:.1f}" for mean in [*means, float(np.mean(means))]]
        return f"| {' | '.join([name, found, *figures, _mean_and_error(list(better.values()))])} |\n"

    rows.append(row("no labels", lines, "unlabelled"))
    for how, labels, strategy in ways:
        chosen = [line for line in lines if (line["how"], line["labels"], line["strategy"]) == (how, labels, strategy)]
        name = f"{labels} random" if how == "random" else f"{labels} asked: {strategy}"
        rows.append(row(name, chosen, "auroc"))
    head = f"| labels | anomalies among them | {' | '.join(classes)} | mean | beside 90 random |\n"
    seeds = sorted({line["seed"] for line in lines})
    below = f"Seeds {', '.join(map(str, seeds))}; {len(lines)} runs. ±: standard error over the piles.\n"
    return f"{head}|{'---|' * (len(classes) + 4)}\n{''.join(rows)}\n{below}"


def _pile(line: dict) -> tuple[str, int]:
    return line["normal"], line["seed"]


def _mean_and_error(differences: list[float]) -> str:
    """Over piles, with its standard error."""
    if len(differences) < 2 or not any(differences):
        return ""
    return f"{np.mean(differences):+.1f} ± {np.std(differences, ddof=1) / len(differences) ** 0.5:.1f}"


if __name__ == "__main__":
    main()
