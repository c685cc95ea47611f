"""The report on made-up lines (in a temporary folder) and on the committed ones."""

import hashlib
import json
import math
import random
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from elsa.bench.__main__ import main
from elsa.bench.plans import PLANS, POLLUTIONS, WATCHED, Cell
from elsa.bench.report import read_results, text, write_report
from elsa.bench.report_data import FIGURES
from elsa.bench.report_tables import (
    Row,
    early_stop_correlations,
    find,
    matrix_rows,
    paper,
    prototype_cells,
    published_pair,
    table1,
    table2,
    table3,
    table4,
)

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT.parent / "shared" / "paper" / "tables.json"


def line_of(cell, auroc, **more):
    origin = {"seconds": {"fit": 36.0}, "settings": {}, "commit": "abc", "card": "cpu"}
    return {"plan": "x", **cell.fields(), "auroc": auroc, **origin, **more}


def watched(number):
    drawn = random.Random(number)
    scores = [drawn.random() for _ in range(5)]
    histogram = {"edges": [0.0, 1.0, 2.0], "normal": [3, 1], "anomalous": [1, 5]}
    points = {"points": [[drawn.random(), drawn.random()] for _ in range(6)], "uniformity": -2.5}
    return {
        "early_stop": scores,
        "watched": {
            "test_auroc": [50 + 40 * score for score in scores],
            "histograms": {"1": histogram, "2": histogram},
            "prototypes": {"images": [3, 9, 4], "hidden": [0, 2, 1]},
            "embedding": {"is_anomaly": [0, 0, 0, 1, 1, 1], "csi": points, "elsa+": points},
            "ensembles": {"projections": 91.0 + drawn.random(), "scores": 90.0},
        },
    }


def full_results(folder, share=1.0):
    """A line for (nearly) every cell of every plan."""
    drawn = random.Random(0)
    for name, plan in PLANS.items():
        lines = []
        for number, cell in enumerate(plan()):
            if drawn.random() < share:
                more = watched(number) if cell.variant == WATCHED and cell.detector == "elsa+" else {}
                if name == "scenario3":
                    more = {
                        "auroc_per_class": {"SVHN": 99.0, "CIFAR-100": 80.0},
                        "sets": {"SVHN": "svhn", "CIFAR-100": "c"},
                    }
                if name == "theory":
                    epoch = {"energy of normal training images": -1.0, "energy of hidden anomalies": -0.5}
                    epochs = [
                        {"epoch": n, "uniformity": -n, **epoch, "energy of normal training images": n}
                        for n in (1, 2, 5)
                    ]
                    more = {"watched": {"pretraining": epochs}}
                lines.append({**line_of(cell, 80 + 20 * drawn.random(), **more), "plan": name})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "results").mkdir()
    full_results(folder / "results")
    write_report(folder / "results", folder / "docs" / "results.md")
    return folder


def test_the_committed_page_and_plots_are_those_of_the_committed_results():
    assert (
        main(["report", "--check", "--results", str(ROOT / "results"), "--out", str(ROOT / "docs" / "results.md")]) == 0
    )


def test_a_stale_page_or_plot_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    cell = PLANS["scenario2"]()[0]
    lines = tmp_path / "results" / "results.jsonl"
    lines.write_text(json.dumps({**line_of(cell, 95.0), "plan": "scenario2"}) + "\n")
    where = ["--results", str(tmp_path / "results"), "--out", str(tmp_path / "docs" / "results.md")]
    assert main(["report", "--check", *where]) == 2
    assert main(["report", *where]) == 0
    assert main(["report", "--check", *where]) == 0
    plot = tmp_path / "docs" / "figures" / "matrices.svg"
    drawn = plot.read_text()
    plot.write_text(drawn.replace("<dc:description>data ", "<dc:description>data 0"))
    capsys.readouterr()
    assert main(["report", "--check", *where]) == 2
    error = capsys.readouterr().err
    assert "matrices.svg is stale" in error
    assert error.count("\n") == 1
    plot.write_text(drawn)
    lines.write_text(json.dumps({**line_of(cell, 95.1), "plan": "scenario2"}) + "\n")
    assert main(["report", "--check", *where]) == 2
    assert "results.md is stale" in capsys.readouterr().err
    assert main(["report", *where]) == 0
    assert main(["report", "--check", *where]) == 0


def test_the_same_lines_give_the_same_bytes(reported, tmp_path):
    write_report(reported / "results", tmp_path / "results.md")
    written = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert written == sorted(f"{name}.svg" for name in FIGURES)
    for name in written:
        first, second = (folder / "figures" / name for folder in (reported / "docs", tmp_path))
        assert hashlib.sha256(first.read_bytes()).hexdigest() == hashlib.sha256(second.read_bytes()).hexdigest()
        ElementTree.fromstring(first.read_bytes())
    assert (tmp_path / "results.md").read_text() == (reported / "docs" / "results.md").read_text()


def test_a_full_page_misses_nothing_and_an_empty_one_says_so(reported):
    page = (reported / "docs" / "results.md").read_text()
    assert "Cells are missing" not in page
    assert "Not measured yet" not in page
    empty = text({}, [])
    tables = len(page.split("\n## "))
    assert empty.count("Cells are missing here") >= 8
    assert empty.count("Not measured yet") == 7
    assert len(empty.split("\n## ")) == tables
    assert "nan" not in empty + page


def test_a_row_averages_what_is_there_and_compares_the_same_cells():
    cells = tuple(cell for cell in PLANS["scenario2"]() if cell.detector == "elsa+" and cell.gamma_p == 0.1)
    row = next(row for row in table2(0.1) if row.name == "elsa+")
    assert set(row.cells) == set(cells)
    some = {cell: line_of(cell, 80.0 + n) for n, cell in enumerate(cells[:3])}
    found = find(row, some)
    assert (found.count, found.total) == (3, 30)
    assert found.mean == pytest.approx(81.0)
    assert found.error == pytest.approx(1 / math.sqrt(3))
    assert found.same_cells == pytest.approx(statistics.fmean(published_pair(cell) for cell in cells[:3]))
    assert found.difference == pytest.approx(found.mean - found.same_cells)


def test_a_row_without_figures_for_cells_is_compared_only_when_it_is_complete():
    row = next(row for row in table2(0.05) if row.name == "deep-sad")
    assert row.published == paper()["table2"]["0.05"]["deep-sad"]
    lines = {cell: line_of(cell, 70.0) for cell in row.cells}
    assert find(row, lines).difference == pytest.approx(70.0 - row.published)
    lines.popitem()
    found = find(row, lines)
    assert (found.count, found.difference, found.same_cells) == (29, None, None)
    assert found.mean == pytest.approx(70.0)
    assert find(row, {}).mean is None
    assert find(row, dict(list(lines.items())[:1])).error is None


def test_a_pair_is_normal_class_first():
    assert published_pair(Cell("elsa+", "cifar10", "Plane", "Car", 0.05, 0.0, 0)) == 95.0
    assert published_pair(Cell("elsa+", "cifar10", "Car", "Plane", 0.05, 0.0, 0)) == 98.8
    assert published_pair(Cell("elsa+", "cifar10", "Car", "Truck", 0.05, 0.0, 0)) == 99.2


def test_rows_hold_the_cells_that_the_issue_counts():
    counts = {row.name: len(row.cells) for row in table2(0.05)}
    assert counts["elsa+"] == counts["elsa"] == 30
    assert counts["elsa+, all labelled classes"] == 90
    assert all(
        counts[name] == 30 for name in ("oc-svm", "kde", "deep-svdd", "goad", "csi", "ss-dgm", "ssad", "deep-sad")
    )
    assert counts["simclr"] == 10
    assert counts["knn"] == 30
    assert counts["oc-svm, tuned as published †"] == 30
    for row in matrix_rows():
        assert len(row.cells) == len(row.of_each) == 90
        assert statistics.fmean(row.of_each) == pytest.approx(row.published, abs=0.06)
    every = {cell for gamma_l in (0.01, 0.05, 0.1) for row in table1(gamma_l) for cell in row.cells}
    assert {cell.gamma_p for cell in every} == {0.0}


def test_every_cell_of_every_plan_is_in_the_report():
    shown = {cell for gamma_l in (0.0, 0.01, 0.05, 0.1) for row in table1(gamma_l) for cell in row.cells}
    shown |= {cell for gamma_p in POLLUTIONS for row in table2(gamma_p) for cell in row.cells}
    shown |= {cell for row in matrix_rows() for cell in row.cells}
    shown |= {
        cell for count in (1, 50, 100, 200, 500) for gamma_p in POLLUTIONS for cell in prototype_cells(count, gamma_p)
    }
    elsewhere = ("scenario3", "ablations", "imagenet10", "theory")
    assert {cell for name, plan in PLANS.items() if name not in elsewhere for cell in plan()} <= shown


def test_the_last_line_of_a_cell_counts_and_other_plans_do_not(tmp_path):
    cell = PLANS["pilot"]()[0]
    lines = [
        {**line_of(cell, 1.0), "plan": "pilot"},
        {**line_of(cell, 2.0), "plan": "scenario2"},
        {**line_of(cell, 3.0), "plan": "a trial"},
        {"run": "speed lines have no plan"},
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, notes = read_results(tmp_path)
    assert found[cell]["auroc"] == 2.0
    assert notes == ["1 lines are of cells that were run again later; the later line counts."]
    assert "run again later" in text(found, notes)


def test_an_ablation_lies_behind_elsa_plus_on_the_same_cells():
    cells = {(cell.labelled, cell.seed, cell.variant): cell for cell in PLANS["ablations"]()}
    lines = {}
    for n, labelled in enumerate(("Car", "Bird", "Cat")):
        lines[cells[labelled, 0, WATCHED]] = line_of(cells[labelled, 0, WATCHED], 90.0 + n)
        lines[cells[labelled, 0, "naive loss"]] = line_of(cells[labelled, 0, "naive loss"], 84.0 + n)
        lines[cells[labelled, 0, "cosine score"]] = line_of(cells[labelled, 0, "cosine score"], 90.0 + n - (n - 1) * 3)
    lines[cells["Ship", 0, "naive loss"]] = line_of(cells["Ship", 0, "naive loss"], 20.0)  # nothing to compare with
    rows = {row.split("|")[1].strip(): row for row in table4(lines) if "|" in row}
    assert "| 6.0 ± 0.0 | apart |" in rows["naive loss"]
    assert "| 0.0 ± 1.7 | tie |" in rows["cosine score"]
    assert "4 of 27" in rows["naive loss"]
    assert "| 82.6 |" in rows["naive loss"]


def test_scenario_3_names_what_it_was_measured_on():
    cells = {cell.detector: cell for cell in PLANS["scenario3"]()}
    one = line_of(
        cells["csi"], 99.0, auroc_per_class={"SVHN": 98.0}, sets={"SVHN": "svhn-test-cropped-10k", "auxiliary": "a"}
    )
    rows = table3({cells["csi"]: one})
    svhn = next(row for row in rows if row.startswith("| SVHN"))
    assert svhn == "| SVHN | svhn-test-cropped-10k | – | 99.4 | – | 98.0 | 99.8 | -1.8 | – | 96.3 | – |"
    assert next(row for row in rows if row.startswith("| LSUN |")).startswith("| LSUN | not measured yet | – |")
    assert rows[-1].startswith("1 of 3 cells (csi)")


def test_the_correlation_is_taken_within_each_fit():
    first, second, *_ = (cell for cell in PLANS["ablations"]() if cell.variant == WATCHED)
    lines = {
        first: line_of(first, 90.0, early_stop=[0.1, 0.2, 0.3], watched={"test_auroc": [1.0, 2.0, 3.0]}),
        second: line_of(second, 90.0, early_stop=[0.9, 0.8, 0.7], watched={"test_auroc": [1.0, 2.0, 3.0]}),
    }
    assert list(early_stop_correlations(lines).values()) == pytest.approx([1.0, -1.0])


def test_missing_cells_of_a_matrix_stay_missing():
    cell = matrix_rows()[0].cells[4]
    data = FIGURES["matrices"]({cell: line_of(cell, 77.0)})
    values = [value for matrix in data["matrices"] for row in matrix["rows"] for value in row]
    assert len(values) == 900
    assert [value for value in values if value is not None] == [77.0]
    assert data["matrices"][0]["title"].endswith("(1 of 90)")


def test_one_cell_has_no_standard_error():
    row = Row("x", (Cell("kde", "cifar10", "Car", None, 0.0, 0.0, 0),), None)
    found = find(row, {row.cells[0]: line_of(row.cells[0], 60.0)})
    assert (found.mean, found.error, found.difference) == (60.0, None, None)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the paper's tables")
def test_the_papers_figures_are_those_of_its_tables():
    import sys

    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import paper_numbers
    finally:
        sys.path.pop(0)
    assert paper_numbers.TARGET.read_text() == paper_numbers.text(PUBLISHED)
    assert paper()["matrices"]["0.05 0.1"]["rows"][3][5] == 60.9  # Cat with labelled Dog: the paper's weakest
