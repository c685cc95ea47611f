"""How far the statements of elsa.trust can be trusted: coverage, false alarms and false discoveries, counted.

    python -m benchmarks.trust simulated [--sets 100]
    python -m benchmarks.trust cifar EMBEDDINGS LABELS [--sets 10]
    python -m benchmarks.trust whole EMBEDDINGS LABELS [--sets 2]
    python -m benchmarks.trust calibration [EMBEDDINGS LABELS] [--sets 100]
    python -m benchmarks.trust curve EMBEDDINGS LABELS
    python -m benchmarks.trust --table

`simulated` draws scores of 5,000 unlabelled images and 50 labelled ones of each kind from known distributions. `cifar`
takes each class in turn as the normal one: elsa-head, fitted on 800 images of it and 42 hidden others with 40 + 40
labels, scores the images it has not seen; polluted sets of 3,500 and the labels to estimate from are drawn from those.
`whole` does everything as a user does: 3,000 unlabelled images, 50 + 50 labels, `crossfit_scores`. `calibration` counts
false alarms and false discoveries over random splits. `curve` shows and times the learning curve and the stress report.

EMBEDDINGS is a .npy with MobileNetV2's vectors of CIFAR-10 (elsa.encoders.embed at 160 px; rows of zeros are left out),
LABELS a .npy with their classes. Each finished cell is a line of results/trust.jsonl; what is there is not done again.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elsa.bench.lines import append_line, provenance, read_lines
from elsa.data.benchmarks import CIFAR10_CLASSES
from elsa.head import ElsaHead
from elsa.seeds import fold
from elsa.trust.calibrate import discoveries, p_values, score_threshold
from elsa.trust.contamination import Contamination, estimate_contamination, suspects
from elsa.trust.crossfit import by_kind, crossfit_scores
from elsa.trust.learning_curve import learning_curve, will_more_labels_help
from elsa.trust.metrics import auroc
from elsa.trust.stress import stress

RESULTS = Path(__file__).parent.parent / "results" / "trust.jsonl"
RATES = (0.0, 0.02, 0.05, 0.10, 0.20)
LABELS_OF_EACH_KIND = 50
KINDS = {"nine": "all nine others", "one": "the next class alone"}

Draw = Callable[[int], NDArray]


def shapes(draw: np.random.Generator) -> dict[str, tuple[Draw, Draw]]:
    """Score distributions of normal images and of anomalies; the log-odds are a straight line in the first three."""
    normal = draw.standard_normal
    return {
        "normal, shift 2": (normal, lambda n: 2 + normal(n)),
        "normal, shift 2.7": (normal, lambda n: 2.7 + normal(n)),
        "normal, shift 4": (normal, lambda n: 4 + normal(n)),
        "shift 4, anomalies twice as wide": (normal, lambda n: 4 + 2 * normal(n)),
        "Student t of 5, shift 4": (lambda n: draw.standard_t(5, n), lambda n: 4 + 1.3 * draw.standard_t(5, n)),
        "Gumbel, shift 5": (lambda n: draw.gumbel(size=n), lambda n: 5 + 1.5 * draw.gumbel(size=n)),
    }


def simulated(sets: int) -> Iterator[dict[str, Any]]:
    """One line for each shape and rate."""
    for name in shapes(np.random.default_rng(0)):
        for rate in RATES:
            cell = {"what": "simulated", "scores": name, "rate": rate, "sets": sets}
            if cell_missing(cell):
                draw = np.random.default_rng(fold(0, "simulated", name, repr(rate)))
                normal, anomaly = shapes(draw)[name]
                separation = auroc(np.concatenate([normal(20_000), anomaly(20_000)]), np.arange(40_000) >= 20_000)
                found = [draw_and_estimate(normal, anomaly, anomaly, rate, 5000) for _ in range(sets)]
                yield {**cell, "auroc": 100 * separation, **summary(found, rate)}


def draw_and_estimate(normal: Draw, hidden: Draw, labelled: Draw, rate: float, images: int) -> Contamination:
    """One polluted set and its estimate."""
    count = round(rate * images)
    unlabelled = np.concatenate([normal(images - count), hidden(count)])
    return estimate_contamination(unlabelled, normal(LABELS_OF_EACH_KIND), labelled(LABELS_OF_EACH_KIND))


def summary(found: list[Contamination], rate: float) -> dict[str, Any]:
    """Coverage and widths over the sets; shares in percent."""
    low, high, best = (np.array([getattr(one, name) for one in found]) for name in ("low", "high", "rate"))
    width = 100 * (high - low)
    return {
        "covered": 100 * float(((low <= rate + 1e-9) & (rate <= high + 1e-9)).mean()),
        "missed_below": 100 * float((high < rate - 1e-9).mean()),
        "half_width": float(width.mean() / 2),
        "half_width_90": float(np.quantile(width, 0.9) / 2),
        "estimate": 100 * float(best.mean()),
    }


@functools.cache
def embeddings(vectors: Path, classes: Path) -> tuple[torch.Tensor, NDArray]:
    """The rows that hold anything, and their classes."""
    z, y = np.load(vectors, mmap_mode="r"), np.load(classes)
    known = np.flatnonzero(np.abs(np.asarray(z[:, :8])).sum(axis=1) > 0)
    return torch.from_numpy(np.asarray(z[known])), y[known]


def dealt(y: NDArray, normal: int, kinds: str, seed: int) -> tuple[Draw, Draw, Draw]:
    """Three decks of positions, shuffled and dealt without putting back: normals, others, others that get labels."""
    draw = np.random.default_rng(fold(seed, "dealt", normal, kinds))
    labelled_class = (normal + 1) % 10
    others = draw.permutation(np.flatnonzero(y != normal))
    # a sixth of the others is for labels, so that no image is labelled and hidden
    for_labels, hidden = others[: len(others) // 6], others[len(others) // 6 :]
    if kinds == "one":
        for_labels = for_labels[y[for_labels] == labelled_class]
    return deck(draw.permutation(np.flatnonzero(y == normal))), deck(hidden), deck(for_labels)


def deck(rows: NDArray) -> Draw:
    """Deals the next so many rows."""
    position = 0

    def deal(count: int) -> NDArray:
        nonlocal position
        position += count
        assert position <= len(rows), "the deck is too small"
        return rows[position - count : position]

    return deal


def cifar(vectors: Path, classes: Path, sets: int) -> Iterator[dict[str, Any]]:
    """One line for each normal class, kind of labels and rate, from the scores of images the head has not seen."""
    z, y = embeddings(vectors, classes)
    for normal in range(10):
        for kinds in KINDS:
            cells = [
                {"what": "cifar", "normal": CIFAR10_CLASSES[normal], "kinds": kinds, "rate": rate, "sets": sets}
                for rate in RATES
            ]
            cells = [cell for cell in cells if cell_missing(cell)]
            if not cells:
                continue
            normals, hidden, labelled = dealt(y, normal, kinds, 0)
            rows = np.concatenate([normals(800), hidden(42), normals(40), labelled(40)])
            words = [""] * 842 + ["normal"] * 40 + ["anomaly"] * 40
            head = ElsaHead(seed=0).fit(z[torch.from_numpy(rows)], words)
            score = score_unseen(head, z, y, rows, normal, kinds)
            for cell in cells:
                yield {**cell, **from_scores(score, y, normal, kinds, cell["rate"], sets)}


def score_unseen(head: ElsaHead, z: torch.Tensor, y: NDArray, used: NDArray, normal: int, kinds: str) -> NDArray:
    """Scores of the normal class and of 5,000 others, none of which was used to fit; NaN for the rest."""
    draw = np.random.default_rng(fold(0, "unseen", normal, kinds))
    free = np.setdiff1d(np.arange(len(y)), used)
    chosen = np.concatenate([free[y[free] == normal], draw.permutation(free[y[free] != normal])[:5000]])
    score = np.full(len(y), np.nan)
    score[chosen] = head.anomaly_score(z[torch.from_numpy(chosen)]).numpy()
    return score


def from_scores(score: NDArray, y: NDArray, normal: int, kinds: str, rate: float, sets: int) -> dict[str, Any]:
    """Coverage over random polluted sets drawn from scores."""
    draw = np.random.default_rng(fold(0, "from scores", normal, kinds, repr(rate)))
    free = np.flatnonzero(~np.isnan(score))
    same, others = free[y[free] == normal], free[y[free] != normal]
    images = min(3500, len(same) - LABELS_OF_EACH_KIND)
    found, right = [], []
    for _ in range(sets):
        count = round(rate * images)
        chosen = draw.permutation(same)
        mixed = draw.permutation(others)
        hidden, rest = mixed[:count], mixed[count:]
        if kinds == "one":
            rest = rest[y[rest] == (normal + 1) % 10]
        unlabelled = np.concatenate([chosen[: images - count], hidden])
        some = chosen[images - count :][:LABELS_OF_EACH_KIND]
        estimate = estimate_contamination(
            score[unlabelled], score[some], score[rest[:LABELS_OF_EACH_KIND]], representative=kinds == "nine"
        )
        found.append(estimate)
        named = suspects(score[unlabelled], [""] * len(unlabelled), estimate.rate or 0.0)
        right.append((y[unlabelled[named]] != normal).mean() if len(named) else np.nan)
    precision = None if np.isnan(right).all() else 100 * float(np.nanmean(right))
    separation = 100 * auroc(score[free], y[free] != normal)
    return {"images": images, "auroc": separation, **summary(found, rate), "precision": precision}


def whole(vectors: Path, classes: Path, sets: int) -> Iterator[dict[str, Any]]:
    """One line for each random set: embeddings in, estimate out, the detector cross-fitted anew."""
    z, y = embeddings(vectors, classes)
    for number in range(sets):
        for rate in RATES:
            for normal in range(10):
                cell = {"what": "whole", "normal": CIFAR10_CLASSES[normal], "rate": rate, "set": number}
                if not cell_missing(cell):
                    continue
                began = time.monotonic()
                normals, hidden, labelled = dealt(y, normal, "nine", number + 1)
                count = round(rate * 3000)
                rows = np.concatenate([normals(3000 - count), hidden(count), normals(50), labelled(50)])
                words = [""] * 3000 + ["normal"] * 50 + ["anomaly"] * 50
                scores = crossfit_scores(z[torch.from_numpy(rows)], words, lambda: ElsaHead(seed=0))
                found = estimate_contamination(*by_kind(scores, words))
                named = suspects(scores, words, found.rate or 0.0)
                precision = 100 * float((y[rows[named]] != normal).mean()) if len(named) else None
                seconds = round(time.monotonic() - began, 1)
                yield {**cell, **summary([found], rate), "precision": precision, "seconds": seconds}


def calibration(vectors: Path | None, classes: Path | None, sets: int) -> Iterator[dict[str, Any]]:
    """False alarms and false discoveries over random splits, clean and polluted; simulated, or with the head."""
    source = "simulated" if vectors is None or classes is None else "cifar"
    for polluted in (0.0, 0.02, 0.1, 0.2):
        for labels in (50, 0) if source == "cifar" else (0,):
            cell = {"what": "calibration", "scores": source, "polluted": polluted, "labels": labels, "sets": sets}
            if not cell_missing(cell):
                continue
            drawn = (
                simulated_split(polluted, number)
                if source == "simulated"
                else head_split(*embeddings(vectors, classes), polluted, labels, number)
                for number in range(sets)
            )
            yield {**cell, **counted(drawn)}


def simulated_split(polluted: float, number: int) -> tuple[NDArray, NDArray, NDArray]:
    """Calibration scores, normal test scores, anomaly test scores."""
    draw = np.random.default_rng(fold(number, "simulated split", repr(polluted)))
    hidden = round(polluted * 500)
    calibrated = np.concatenate([draw.standard_normal(500 - hidden), 2.7 + draw.standard_normal(hidden)])
    return calibrated, draw.standard_normal(900), 2.7 + draw.standard_normal(100)


def head_split(z: torch.Tensor, y: NDArray, polluted: float, labels: int, number: int) -> tuple[NDArray, ...]:
    """The head's own calibration scores, and scores of a batch it has not seen."""
    normal = number % 10
    normals, hidden, labelled = dealt(y, normal, "nine", number)
    count = round(polluted * 1500)
    rows = np.concatenate([normals(1500 - count), hidden(count), normals(labels), labelled(labels)])
    words = [""] * 1500 + ["normal"] * labels + ["anomaly"] * labels
    head = ElsaHead(seed=number).fit(z[torch.from_numpy(rows)], words)
    test = [head.anomaly_score(z[torch.from_numpy(some)]).numpy() for some in (normals(900), hidden(100))]
    return head.calibration_.numpy(), *test


def counted(drawn: Iterator[tuple[NDArray, ...]]) -> dict[str, Any]:
    """Mean observed rates, in percent, with the standard error of the mean over the splits."""
    seen: dict[str, list[float]] = {}
    for calibrated, normals, anomalies in drawn:
        kept = torch.from_numpy(calibrated)
        for rate in (0.01, 0.05, 0.10):
            limit = score_threshold(kept, rate)
            seen.setdefault(f"false alarms at {rate:g}", []).append(float((normals > limit).mean()))
            seen.setdefault(f"detected at {rate:g}", []).append(float((anomalies > limit).mean()))
        p = p_values(torch.from_numpy(np.concatenate([normals, anomalies])), kept)
        for rate in (0.05, 0.10, 0.20):
            called = discoveries(p, rate).numpy()
            false = float(called[: len(normals)].sum() / max(1, called.sum()))
            seen.setdefault(f"fdr at {rate:g}", []).append(false)
            seen.setdefault(f"found at fdr {rate:g}", []).append(float(called[len(normals) :].mean()))
    mean = {name: round(100 * float(np.mean(values)), 3) for name, values in seen.items()}
    error = {name: round(100 * float(np.std(values, ddof=1) / len(values) ** 0.5), 3) for name, values in seen.items()}
    return {"mean": mean, "standard_error": error}


def curve(vectors: Path, classes: Path) -> Iterator[dict[str, Any]]:
    """The learning curve and the stress report of one pile for each of three classes, with their seconds."""
    z, y = embeddings(vectors, classes)
    for normal in (0, 3, 7):
        for labels in (60, 200):
            cell = {"what": "curve", "normal": CIFAR10_CLASSES[normal], "labels": labels}
            if not cell_missing(cell):
                continue
            normals, hidden, labelled = dealt(y, normal, "nine", 0)
            half = labels // 2
            rows = np.concatenate([normals(1800), hidden(200), normals(half), labelled(half)])
            words = [""] * 2000 + ["normal"] * half + ["anomaly"] * half
            kinds = [CIFAR10_CLASSES[c] if word == "anomaly" else "" for c, word in zip(y[rows], words, strict=True)]
            some, began = z[torch.from_numpy(rows)], time.monotonic()
            points = learning_curve(some, words, None, lambda: ElsaHead(seed=0))
            between = time.monotonic()
            stressed = stress(some, words, kinds, lambda: ElsaHead(seed=0))
            yield {
                **cell,
                "curve": [point.line() for point in points],
                "verdict": will_more_labels_help(points),
                "stress": [row.line() for row in stressed],
                "seconds": {
                    "curve": round(between - began, 1),
                    "stress": round(time.monotonic() - between, 1),
                },
            }


def lines() -> list[dict[str, Any]]:
    """What was counted so far."""
    return read_lines(RESULTS)


def cell_missing(cell: dict[str, Any]) -> bool:
    """Whether no line has all of the cell's fields."""
    return not any(cell.items() <= line.items() for line in lines())


def tables() -> str:
    """Markdown of every table there are lines for."""
    found = lines()
    parts = []
    simulated_lines = [line for line in found if line["what"] == "simulated"]
    if simulated_lines:
        parts.append(coverage_table(simulated_lines, "scores", lambda line: line["scores"]))
    for kinds, named in KINDS.items():
        cells = [line for line in found if line["what"] == "cifar" and line["kinds"] == kinds]
        if cells:
            parts.append(f"CIFAR-10, labelled anomalies of {named}:\n\n" + pooled_table(cells))
    ends = [line for line in found if line["what"] == "whole"]
    if ends:
        parts.append("CIFAR-10, cross-fitted anew for each set:\n\n" + pooled_table(ends))
    splits = [line for line in found if line["what"] == "calibration"]
    if splits:
        parts.append(calibration_table(splits))
    return "\n\n".join(parts)


def coverage_table(cells: list[dict[str, Any]], key: str, name: Callable[[dict[str, Any]], str]) -> str:
    """A row for each value of the key: coverage and half-width at each rate."""
    head = f"| {key} | AUROC | " + " | ".join(f"{100 * rate:g}%" for rate in RATES) + " |"
    rows = [head, "|" + "---|" * (2 + len(RATES))]
    for value in dict.fromkeys(line[key] for line in cells):
        own = {line["rate"]: line for line in cells if line[key] == value}
        marks = [f"{own[r]['covered']:.0f} (±{own[r]['half_width']:.1f})" if r in own else "" for r in RATES]
        first = next(iter(own.values()))
        rows.append(f"| {name(first)} | {first['auroc']:.1f} | " + " | ".join(marks) + " |")
    return "\n".join(rows)


def pooled_table(cells: list[dict[str, Any]]) -> str:
    """A row for each rate, over all classes."""
    rows = [
        "| hidden | sets | interval covers | too low | mean estimate | mean half-width | precision of suspects |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate in RATES:
        own = [line for line in cells if line["rate"] == rate]
        if own:
            mean = {
                f: np.mean([line[f] for line in own]) for f in ("covered", "missed_below", "estimate", "half_width")
            }
            precise = [line["precision"] for line in own if line["precision"] is not None]
            precision = f"{np.mean(precise):.0f}%" if precise and rate else "-"
            sets = sum(line.get("sets", 1) for line in own)
            rows.append(
                f"| {100 * rate:g}% | {sets} | {mean['covered']:.0f}% | {mean['missed_below']:.0f}% | "
                f"{mean['estimate']:.1f}% | ±{mean['half_width']:.1f} | {precision} |"
            )
    return "\n".join(rows)


def calibration_table(splits: list[dict[str, Any]]) -> str:
    """A row for each pollution: what was asked for and what was seen, with standard errors."""
    names = [f"false alarms at {rate:g}" for rate in (0.01, 0.05, 0.1)] + [
        f"fdr at {rate:g}" for rate in (0.05, 0.1, 0.2)
    ]
    rows = ["| scores | labels of each kind | polluted | " + " | ".join(names) + " |", "|" + "---|" * (3 + len(names))]
    for line in splits:
        marks = [f"{line['mean'][name]:.2f} ± {line['standard_error'][name]:.2f}" for name in names]
        rows.append(
            f"| {line['scores']} | {line['labels']} | {100 * line['polluted']:g}% | " + " | ".join(marks) + " |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["simulated", "cifar", "whole", "calibration", "curve"])
    parser.add_argument("embeddings", nargs="?", type=Path)
    parser.add_argument("labels", nargs="?", type=Path)
    parser.add_argument("--sets", type=int)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(tables())
        return
    if given.what is None or (given.what in ("cifar", "whole", "curve") and given.labels is None):
        parser.error("name what to count; cifar, whole and curve take EMBEDDINGS and LABELS")
    run = {
        "simulated": lambda: simulated(given.sets or 100),
        "cifar": lambda: cifar(given.embeddings, given.labels, given.sets or 10),
        "whole": lambda: whole(given.embeddings, given.labels, given.sets or 2),
        "calibration": lambda: calibration(given.embeddings, given.labels, given.sets or 100),
        "curve": lambda: curve(given.embeddings, given.labels),
    }[given.what]
    options = f" --sets {given.sets}" if given.sets else ""
    files = " EMBEDDINGS LABELS" if given.labels else ""
    about = {**provenance("cpu"), "command": f"python -m benchmarks.trust {given.what}{files}{options}"}
    for line in run():
        append_line(RESULTS, {**line, **about})
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
