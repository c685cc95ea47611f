"""`elsa bench report`: docs/results.md and its plots from results/*.jsonl alone, the same bytes from the same lines."""

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from elsa.bench.lines import cell_of, read_lines
from elsa.bench.plans import AS_PUBLISHED, PLANS, POLLUTIONS, WATCHED
from elsa.bench.report_data import FIGURES, Data, correlation_with_uniformity, digest
from elsa.bench.report_tables import (
    LABELLED_SHARES,
    Lines,
    early_stop_correlations,
    imagenet_table,
    matrix_rows,
    paper,
    prototype_table,
    table,
    table1,
    table2,
    table3,
    table4,
    with_error,
)
from elsa.config import METHODS, method_config
from elsa.errors import UserError

NOT_YET = "*Not measured yet.* `elsa bench run {plan}` measures it."
STALE = "is stale with respect to the results: run `elsa bench report`"
HEAD = """# Results

<!-- Written by `elsa bench report` (make format) from results/*.jsonl and elsa/bench/paper.json; do not edit. -->

AUROC in percent. *Ours* is the mean over the cells that have been run, with its standard error over cells; *cells*
says how many of how many those are; *paper, same cells* is the mean of the paper's figures over exactly those cells,
which it gives for elsa+; *paper* is its published mean. [benchmark.md](benchmark.md) says what each plan holds.
"""
AS_PUBLISHED_NOTE = """† Rows *tuned as published* choose the width of their kernel with labels of a tenth of the
**test set**, as the experiments did from which the paper takes its figures. They explain those figures and are not
comparable with any other row; isolation-forest has nothing to choose and kde chooses by cross-validation."""


def read_results(folder: Path) -> tuple[Lines, list[str]]:
    """The last line of each cell of a plan, over all files in order of their names; and what was left out."""
    lines: Lines = {}
    plans: dict[str, set[Any]] = {name: set(plan()) for name, plan in PLANS.items()}
    count = 0
    for path in sorted(folder.glob("*.jsonl")):
        for line in read_lines(path):
            if line.get("plan") in plans and cell_of(line) in plans[line["plan"]]:
                lines[cell_of(line)] = line
                count += 1
    again = count - len(lines)
    return lines, [f"{again} lines are of cells that were run again later; the later line counts."] if again else []


def write_report(results: Path, page: Path) -> str:
    """Write the page and the plots beside it in figures/; what was done, in one line."""
    from elsa.bench.report_figures import draw

    lines, notes = read_results(results)
    figures = _figures(lines)
    folder = page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in figures.items():
        if _drawn_digest(folder / f"{name}.svg") != digest(data):
            (folder / f"{name}.svg").write_bytes(draw(name, data))
    for name in FIGURES.keys() - figures.keys():
        (folder / f"{name}.svg").unlink(missing_ok=True)
    page.write_text(text(lines, notes))
    return f"{page}: {len(lines)} cells, {len(figures)} of {len(FIGURES)} figures"


def check_report(results: Path, page: Path) -> str:
    """Refuse a page or a plot that these results would not give; needs no matplotlib."""
    lines, notes = read_results(results)
    if not page.exists() or page.read_text() != text(lines, notes):
        raise UserError(f"{page} {STALE}")
    figures = _figures(lines)
    for name in FIGURES:
        path = page.parent / "figures" / f"{name}.svg"
        if _drawn_digest(path) != (digest(figures[name]) if name in figures else None):
            raise UserError(f"{path} {STALE}")
    return f"{page} is what the results say"


def _drawn_digest(path: Path) -> str | None:
    """The digest of the data a plot was drawn from, out of its description."""
    if not path.exists():
        return None
    _, _, after = path.read_text().partition("<dc:description>data ")
    return after[:16]


def _figures(lines: Lines) -> dict[str, Data]:
    found = {name: data(lines) for name, data in FIGURES.items()}
    return {name: data for name, data in found.items() if data}


def text(lines: Lines, notes: list[str]) -> str:
    """The whole page."""
    figures = _figures(lines)
    parts = [HEAD]
    for gamma_l in (0.0, *LABELLED_SHARES):
        title = "Scenario 1 (Table 1): a share γ_l of labels of each kind, no pollution" if gamma_l == 0 else ""
        parts += [f"## {title}\n"] if title else []
        parts += [f"### γ_l {gamma_l:g}\n", *table(table1(gamma_l), lines), ""]
    parts += ["## Scenario 2 (Table 2): pollution, γ_l .05\n"]
    for gamma_p in POLLUTIONS:
        parts += [f"### γ_p {gamma_p:g}\n", *table(table2(gamma_p), lines), ""]
    parts += [AS_PUBLISHED_NOTE, ""]
    parts += ["## The nine matrices\n", *table(matrix_rows(), lines), "", _picture("matrices", figures, ""), ""]
    parts += ["## Scenario 3 (Table 3): CIFAR-10 against other sets, an auxiliary set as labelled anomalies\n"]
    parts += [*table3(lines), "", STAND_IN_NOTE, ""]
    parts += [
        "## Ablations (Table 4): Plane, γ_l and γ_p .05, nine labelled classes, three seeds\n",
        *table4(lines),
        "",
    ]
    parts += ["## Number of prototypes\n", *prototype_table(lines), "", K1_NOTE, ""]
    parts += [_picture("prototype-counts", figures, "prototype-counts"), ""]
    parts += ["## Early stopping\n", *_early_stopping(lines), "", _picture("early-stop", figures, "ablations"), ""]
    parts += ["## ImageNet-10\n", *imagenet_table(lines), "", IMAGENET_NOTE, ""]
    parts += ["## What happens inside\n"]
    for name, (title, plan) in INSIDE.items():
        parts += [f"### {title}\n", _picture(name, figures, plan), ""]
    parts += _uniformity(lines)
    parts += ["### Averaging scores against averaging projections\n", *_ensembles(lines), ""]
    parts += ["## Where the figures come from\n", *_origins(lines), *notes, ""]
    return "\n".join(parts).rstrip() + "\n"


STAND_IN_NOTE = (
    "*svhn-test-cropped-10k*: 10,000 test digits cropped from the full-number images. *tinyimagenet-test-32*: the "
    "10,000 Tiny-ImageNet test images, resized with antialiasing, in the place of ImageNet (FIX); the auxiliary set "
    "*tinyimagenet-aux20k-32* holds training images of the same data set, so that row is easier than the paper's."
)
K1_NOTE = "With one prototype the score can reach zero, where 1/S has no bound: this ablation alone clamps it at 0.01."
IMAGENET_NOTE = (
    "Measured on Imagenette (ten other classes of ImageNet, 9,469 and 3,925 images, 64 px), which stands in for "
    "ImageNet-10: means can be compared, single classes can not."
)
INSIDE = {
    "energy-by-epoch": ("Energy of test images by epoch of fine-tuning", "ablations"),
    "images-per-prototype": ("Training images per prototype", "ablations"),
    "embedding": ("Embedding of csi and of elsa+: Plane, two directions of largest variance", "ablations"),
    "pretraining": ("Uniformity of the training set against its energy during pre-training", "theory"),
}


def _picture(name: str, figures: dict[str, Data], plan: str) -> str:
    if name not in figures:
        return NOT_YET.format(plan=plan)
    return f"![{name}](figures/{name}.svg)\n<!-- data {digest(figures[name])} -->"


def _early_stopping(lines: Lines) -> list[str]:
    found, published = list(early_stop_correlations(lines).values()), paper()["early stop"]
    total = sum(cell.variant == WATCHED for cell in PLANS["ablations"]())
    theirs = f"the paper: {published['correlation']} ± {published['deviation']}"
    if not found:
        return [f"Correlation of early-stop score and test AUROC over epochs: not measured yet ({theirs})."]
    spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
    return [
        f"Correlation (Pearson) of early-stop score and test AUROC over the epochs of a fit, mean and standard "
        f"deviation over {len(found)} of {total} fits: {statistics.fmean(found):.3f}{spread} ({theirs})."
    ]


def _uniformity(lines: Lines) -> list[str]:
    found = correlation_with_uniformity(lines)
    if found is None:
        return []
    return [f"Correlation of uniformity and energy of the training images over these epochs: {found:.3f}.", ""]


def _ensembles(lines: Lines) -> list[str]:
    found = [line["watched"]["ensembles"] for line in lines.values() if "ensembles" in line.get("watched", {})]
    if not found:
        return [NOT_YET.format(plan="ablations")]
    gaps = [one["projections"] - one["scores"] for one in found]
    means = {name: statistics.fmean(one[name] for one in found) for name in ("projections", "scores")}
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    return [
        f"Over {len(found)} fits: {means['projections']:.2f} with averaged projections (the default), "
        f"{means['scores']:.2f} with averaged scores; difference {with_error(statistics.fmean(gaps), error)}."
    ]


def _origins(lines: Lines) -> list[str]:
    """Per detector: how many lines, on what, from which commits, in how many hours, with which settings."""
    if not lines:
        return ["No line yet."]
    text = [
        "| detector | lines | hours | card | commits | settings other than the method's own |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell, line in sorted(lines.items(), key=lambda item: repr(item[0])):
        published = f", {AS_PUBLISHED}" if cell.variant == AS_PUBLISHED else ""
        groups.setdefault(f"{cell.detector}{published}", []).append(line)
    for name, group in groups.items():
        hours = sum(sum(line["seconds"].values()) for line in group) / 3600
        cards, commits = (", ".join(sorted({line[key] for line in group})) for key in ("card", "commit"))
        text.append(f"| {name} | {len(group)} | {hours:.2f} | {cards} | {commits} | {_unusual(group)} |")
    return [*text, ""]


def _unusual(group: list[dict[str, Any]]) -> str:
    """Settings of Elsa's pre-training and fine-tuning that are not the paper's, with how many lines have each."""
    counts: Counter[str] = Counter()
    for line in group:
        method = (
            line["detector"] if line["detector"] in METHODS else "elsa" if line["detector"] == "simclr" else "elsa+"
        )
        own = vars(method_config(method))
        changed = (name for name in own if name in line["settings"] and line["settings"][name] != own[name])
        counts.update(f"{name}={line['settings'][name]}" for name in changed)
    every = len(group)
    return ", ".join(f"{text} ({n})" if n < every else text for text, n in sorted(counts.items())) or "–"
