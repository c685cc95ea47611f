"""The tables of docs/results.md: each row names the cells it is about, and says how many of them have been run."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from elsa.bench.plans import ABLATED, AS_PUBLISHED, PLANS, POLLUTIONS, PROTOTYPE_COUNTS, WATCHED, Cell

Lines = dict[Cell, dict[str, Any]]
LABELLED_SHARES = (0.01, 0.05, 0.1)
MISSING = "–"
UNSUPERVISED = ("oc-svm", "isolation-forest", "kde", "deep-svdd", "goad", "csi")
SEMI_SUPERVISED = ("ss-dgm", "ssad", "deep-sad", "elsa", "elsa+")
NOT_IN_THE_PAPER = ("simclr", "knn")
# The plans a row of the two large tables is made of; what the seed-0 plans of elsa+ leave out is in its own row.
TABLE_PLANS = (
    "scenario2",
    "scenario2-shallow",
    "scenario2-baselines",
    "scenario1-baselines",
    "scenario2-elsa",
    "scenario1-elsa",
    "scenario2-knn",
)


@dataclass(frozen=True)
class Row:
    """One row of a table: its cells, and what the paper has for them."""

    name: str
    cells: tuple[Cell, ...]
    published: float | None
    """The paper's mean, over its own cells."""
    of_each: tuple[float, ...] = ()
    """The paper's figure for each of the cells, where it gives them."""


@dataclass(frozen=True)
class Found:
    """What the lines say about a row."""

    count: int
    total: int
    mean: float | None
    error: float | None
    same_cells: float | None
    difference: float | None


@cache
def paper() -> dict[str, Any]:
    """The published figures; tools/paper_numbers.py writes the file."""
    return json.loads(Path(__file__).with_name("paper.json").read_text())


def published_pair(cell: Cell) -> float:
    """The paper's figure for one cell of its nine matrices."""
    matrix, classes = paper()["matrices"][f"{cell.gamma_l:g} {cell.gamma_p:g}"], paper()["classes"]
    return matrix["rows"][classes.index(cell.normal)][classes.index(cell.labelled)]


def cells_of(plans: Iterable[str], wanted: Callable[[Cell], bool]) -> tuple[Cell, ...]:
    """The cells of these plans that are wanted, each once."""
    return tuple(dict.fromkeys(cell for plan in plans for cell in PLANS[plan]() if wanted(cell)))


def find(row: Row, lines: Lines) -> Found:
    """Mean and standard error over the cells there are; a difference only between the same cells, or of all of them."""
    have = [(cell, n) for n, cell in enumerate(row.cells) if cell in lines]
    values = [lines[cell]["auroc"] for cell, _ in have]
    mean = statistics.fmean(values) if values else None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    same = statistics.fmean(row.of_each[n] for _, n in have) if have and row.of_each else None
    reference = same if row.of_each else row.published if len(have) == len(row.cells) else None
    difference = mean - reference if mean is not None and reference is not None else None
    return Found(len(have), len(row.cells), mean, error, same, difference)


def table(rows: Sequence[Row], lines: Lines) -> list[str]:
    """Markdown: ours with its standard error, how many cells, the paper's figures, the difference."""
    text = [
        "| detector | ours | cells | paper, same cells | paper | difference |",
        "|---|---|---|---|---|---|",
    ]
    incomplete = False
    for row in rows:
        found = find(row, lines)
        incomplete |= found.count < found.total
        text.append(
            f"| {row.name} | {with_error(found.mean, found.error)} | {found.count} of {found.total} | "
            f"{number(found.same_cells)} | {number(row.published)} | {signed(found.difference)} |"
        )
    if incomplete:
        text += ["", INCOMPLETE]
    return text


INCOMPLETE = (
    "**Cells are missing here**: a mean is over those that have been run, and is compared over the same cells or "
    "not at all."
)


def table1(gamma_l: float) -> list[Row]:
    """Scenario 1 at one share of labels, without pollution; at 0 the rows that use no labels."""
    published = paper()["table1"][f"{gamma_l:g}"]
    if gamma_l == 0:
        return [*_rows(UNSUPERVISED, published, 0.0, 0.0), *_rows(NOT_IN_THE_PAPER, {}, 0.0, 0.0)]
    rows = _rows(SEMI_SUPERVISED, published, gamma_l, 0.0)
    return [*rows, _all_ninety(gamma_l, 0.0), *_as_published(published, gamma_l, 0.0)]


def table2(gamma_p: float) -> list[Row]:
    """Scenario 2 at one pollution; gamma_l is .05 for the rows that use labels."""
    published = paper()["table2"][f"{gamma_p:g}"]
    rows = [
        *_rows(UNSUPERVISED, published, 0.0, gamma_p),
        *_rows(SEMI_SUPERVISED, published, 0.05, gamma_p),
        _all_ninety(0.05, gamma_p),
        _more_seeds(gamma_p),
        *_rows(NOT_IN_THE_PAPER, {}, 0.0, gamma_p),
    ]
    return [*rows, *_as_published(published, 0.0, gamma_p), *_as_published(published, 0.05, gamma_p)]


def _rows(detectors: Iterable[str], published: dict[str, float], gamma_l: float, gamma_p: float) -> list[Row]:
    plans = (*TABLE_PLANS, "scenario2-seeds") if gamma_l == 0 else TABLE_PLANS
    rows = []
    for name in detectors:
        cells = _elsa_plus(gamma_l, gamma_p, 3) if name == "elsa+" else cells_of(plans, _of(name, gamma_l, gamma_p))
        of_each = tuple(published_pair(cell) for cell in cells) if name == "elsa+" else ()
        rows.append(Row(name, cells, published.get(name), of_each))
    return rows


def _of(detector: str, gamma_l: float, gamma_p: float, variant: str = "") -> Callable[[Cell], bool]:
    wanted = (detector, gamma_l, gamma_p, variant)
    return lambda cell: (cell.detector, cell.gamma_l, cell.gamma_p, cell.variant) == wanted


def _elsa_plus(gamma_l: float, gamma_p: float, labelled: int) -> tuple[Cell, ...]:
    """The cells of a matrix, seed 0, with the next so many classes labelled."""
    cells = cells_of(("scenario2", "scenario2-rest", "scenario1"), _of("elsa+", gamma_l, gamma_p))
    classes = paper()["classes"]
    return tuple(
        cell
        for cell in cells
        if (classes.index(cell.labelled or "") - classes.index(cell.normal)) % len(classes) <= labelled
    )


def _all_ninety(gamma_l: float, gamma_p: float) -> Row:
    cells = _elsa_plus(gamma_l, gamma_p, 9)
    published = paper()["matrices"][f"{gamma_l:g} {gamma_p:g}"]["mean"]
    return Row("elsa+, all labelled classes", cells, published, tuple(published_pair(cell) for cell in cells))


def _more_seeds(gamma_p: float) -> Row:
    cells = cells_of(("scenario2-seeds",), _of("elsa+", 0.05, gamma_p))
    return Row("elsa+, two more seeds", cells, None, tuple(published_pair(cell) for cell in cells))


def _as_published(published: dict[str, float], gamma_l: float, gamma_p: float) -> list[Row]:
    plans = ("as-published", "as-published-ssad")
    plan = cells_of(plans, lambda cell: (cell.gamma_l, cell.gamma_p) == (gamma_l, gamma_p))
    names = dict.fromkeys(cell.detector for cell in plan)
    return [
        Row(
            f"{name}, tuned as published †",
            cells_of(plans, _of(name, gamma_l, gamma_p, AS_PUBLISHED)),
            published.get(name),
        )
        for name in names
    ]


def matrix_rows() -> list[Row]:
    """The nine matrices, a row each."""
    shares = [(gamma_l, gamma_p) for gamma_p in POLLUTIONS for gamma_l in LABELLED_SHARES]
    return [replace(_all_ninety(*pair), name=f"γ_l {pair[0]:g}, γ_p {pair[1]:g}") for pair in shares]


def table3(lines: Lines) -> list[str]:
    """Scenario 3: a row for each set, a pair of columns for each detector; sets that were not at hand stay open."""
    cells = {cell.detector: cell for cell in PLANS["scenario3"]()}
    names = list(paper()["table3"])
    text = [
        "| set | measured on | " + " | ".join(f"{name} | paper | difference" for name in cells) + " |",
        "|---|---|" + "---|---|---|" * len(cells),
    ]
    for name in names:
        stand_ins = [
            lines[cell]["sets"][name] for cell in cells.values() if name in lines.get(cell, {}).get("sets", {})
        ]
        row = [name, ", ".join(dict.fromkeys(stand_ins)) or "not measured yet"]
        for detector, cell in cells.items():
            published = paper()["table3"][name].get(detector)
            ours = lines.get(cell, {}).get("auroc_per_class", {}).get(name)
            row += [number(ours), number(published), signed(None if ours is None else ours - published)]
        text.append("| " + " | ".join(row) + " |")
    done = [name for name, cell in cells.items() if cell in lines]
    return [*text, "", f"{len(done)} of {len(cells)} cells ({', '.join(done) or 'none yet'}), one seed."]


def table4(lines: Lines) -> list[str]:
    """Ablations: the mean over labelled classes and seeds, and how far each lies behind elsa+ on the same cells."""
    base = {_key(cell): cell for cell in PLANS["ablations"]() if cell.variant == WATCHED}
    text = [
        "| variant | ours | cells | paper | difference | behind elsa+ on the same cells | |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in (WATCHED, *ABLATED):
        cells = tuple(cell for cell in PLANS["ablations"]() if cell.variant == variant)
        row = Row("elsa+" if variant == WATCHED else variant, cells, paper()["table4"][variant])
        found = find(row, lines)
        gaps = [
            lines[base[_key(cell)]]["auroc"] - lines[cell]["auroc"]
            for cell in cells
            if variant != WATCHED and cell in lines and base[_key(cell)] in lines
        ]
        gap, error = _mean_and_error(gaps)
        verdict = "" if gap is None or error is None else "tie" if abs(gap) < 2 * error else "apart"
        text.append(
            f"| {row.name} | {with_error(found.mean, found.error)} | {found.count} of {found.total} | "
            f"{number(row.published)} | {signed(found.difference)} | {with_error(gap, error)} | {verdict} |"
        )
    return [*text, "", "A gap below two standard errors counts as a tie."]


def _key(cell: Cell) -> tuple[Any, ...]:
    return cell.labelled, cell.seed


def prototype_table(lines: Lines) -> list[str]:
    """AUROC by prototype count: Plane, the next three classes labelled, at three pollutions."""
    text = [
        "| K | " + " | ".join(f"γ_p {gamma_p:g} | cells" for gamma_p in POLLUTIONS) + " |",
        "|---|" + "---|---|" * len(POLLUTIONS),
    ]
    for count in PROTOTYPE_COUNTS:
        row = [str(count)]
        for gamma_p in POLLUTIONS:
            found = find(Row(str(count), prototype_cells(count, gamma_p), None), lines)
            row += [with_error(found.mean, found.error), f"{found.count} of {found.total}"]
        text.append("| " + " | ".join(row) + " |")
    return text


def prototype_cells(count: int, gamma_p: float) -> tuple[Cell, ...]:
    """The cells of one point; 100 is elsa+ as it is, in scenario2."""
    if count == 100:
        return tuple(cell for cell in _elsa_plus(0.05, gamma_p, 3) if cell.normal == "Plane")
    return cells_of(("prototype-counts",), _of("elsa+", 0.05, gamma_p, f"K={count}"))


def imagenet_table(lines: Lines) -> list[str]:
    """ImageNet-10 on its stand-in: means per normal class are ours alone, as the paper's classes are others."""
    rows = []
    for gamma_p in (0.0, 0.1):
        for detector, gamma_l in (("elsa+", 0.1), ("csi", 0.0)):
            cells = cells_of(("imagenet10",), _of(detector, gamma_l, gamma_p))
            rows.append(Row(f"{detector}, γ_p {gamma_p:g}", cells, paper()["imagenet10"][f"{gamma_p:g}"][detector]))
    return table(rows, lines)


def early_stop_correlations(lines: Lines) -> dict[Cell, float]:
    """Pearson's correlation between early-stop score and test AUROC over the epochs of each watched fit."""
    found = {}
    for cell in PLANS["ablations"]():
        if cell.variant == WATCHED and cell in lines:
            scores, aurocs = lines[cell]["early_stop"], lines[cell]["watched"]["test_auroc"]
            if len(set(scores)) > 1 and len(set(aurocs)) > 1:
                found[cell] = statistics.correlation(scores, aurocs)
    return found


def _mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def number(value: float | None) -> str:
    """One decimal, or a dash."""
    return MISSING if value is None else f"{value:.1f}"


def signed(value: float | None) -> str:
    """One decimal with its sign, or a dash."""
    return MISSING if value is None else f"{value:+.1f}"


def with_error(mean: float | None, error: float | None) -> str:
    """Mean and standard error; of a single cell there is no error."""
    return MISSING if mean is None else f"{mean:.1f}" if error is None else f"{mean:.1f} ± {error:.1f}"
