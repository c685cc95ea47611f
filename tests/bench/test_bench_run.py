import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from elsa.bench import run as module
from elsa.bench.__main__ import main
from elsa.bench.plans import PLANS, Cell, next_classes
from elsa.bench.run import append_line, auroc_per_class, finished_cells, repeat_cell, run_plan
from elsa.data.benchmarks import CIFAR10_CLASSES
from elsa.detectors import DETECTORS
from elsa.errors import UserError
from elsa.progress import silent

QUICK = {
    "preset": "cpu",
    "num_prototypes": 8,
    "pretrain_epochs": 1,
    "finetune_epochs": 1,
    "finetune_batch": 32,
    "views": 1,
}
CELLS = [Cell("elsa+", "cifar10", "Car", labelled, 0.1, 0.1, 0) for labelled in ("Bird", "Cat")] + [
    Cell("elsa+", "cifar10", "Bird", "Cat", 0.1, 0.1, 0)
]


def small_cifar10(_folder):
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(10).repeat(30)
    images = torch.randint(0, 256, (300, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, classes, images[:100], classes[:100]


@pytest.fixture(autouse=True)
def small_plan(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "load_cifar10", small_cifar10)
    monkeypatch.setitem(PLANS, "small", lambda: CELLS)


def fill(results, budget=1e9, progress=silent):
    return run_plan("small", results, Path("cifar"), budget, "cpu", QUICK, progress)


def test_a_plan_is_filled_once_with_all_that_a_line_must_say(tmp_path):
    results = tmp_path / "results.jsonl"
    assert fill(results) == 3
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [Cell(**{k: line[k] for k in CELLS[0].fields()}) for line in lines] == CELLS
    for line in lines:
        assert set(line["auroc_per_class"]) == set(CIFAR10_CLASSES) - {line["normal"]}
        assert line["auroc"] == pytest.approx(np.mean(list(line["auroc_per_class"].values())), abs=1e-3)
        assert {"command", "commit", "versions", "card", "settings", "seconds"} <= set(line)
    # the two cells of Car share one pre-training
    assert [line["seconds"]["pretrain"] > 0 for line in lines] == [True, False, True]
    assert fill(results) == 0


def test_a_killed_plan_resumes_without_a_lost_or_doubled_line(tmp_path):
    results, fits = tmp_path / "results.jsonl", []

    def killed(stage, done, total, figures):
        if stage == "finetune":
            fits.append(done)
        if len(fits) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(results, progress=killed)
    with open(results, "a") as file:
        file.write('{"plan": "small", "dete')  # what a crash in the middle of a write leaves
    assert finished_cells(results, "small") == set(CELLS[:1])
    assert fill(results) == 2
    lines = results.read_text().splitlines()
    assert [json.loads(line)["labelled"] for line in lines] == ["Bird", "Cat", "Cat"]


def test_no_cell_is_started_that_would_overrun_the_budget(tmp_path):
    assert fill(tmp_path / "results.jsonl", budget=-1) == 0
    assert not (tmp_path / "results.jsonl").exists()


def test_lines_of_another_plan_do_not_count(tmp_path):
    append_line(tmp_path / "r", {"plan": "other", **CELLS[0].fields()})
    assert finished_cells(tmp_path / "r", "small") == set()
    assert finished_cells(tmp_path / "r", "other") == {CELLS[0]}


def test_unknown_plans_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="'tabel1' is unknown: use .*scenario2"):
        run_plan("tabel1", tmp_path / "r", Path("cifar"), 1, "cpu", QUICK, silent)


def test_auroc_per_class_is_the_protocols():
    generator = np.random.default_rng(0)
    scores, classes = generator.normal(size=500), generator.integers(0, 10, 500)
    got = auroc_per_class(scores, classes, normal=3)
    assert len(got) == 9
    chosen = (classes == 3) | (classes == 7)
    assert got["Horse"] == pytest.approx(100 * roc_auc_score(classes[chosen] == 7, scores[chosen]), abs=1e-3)


def test_labelled_classes_follow_in_cyclic_order():
    assert next_classes("Plane", 3) == ["Car", "Bird", "Cat"]
    assert next_classes("Ship", 3) == ["Truck", "Plane", "Car"]


def test_scenario_2_has_its_ninety_priority_cells_and_csi_grouped_by_encoder():
    cells = PLANS["scenario2"]()
    assert len(cells) == len(set(cells)) == 120
    assert [cell.detector for cell in cells[:4]] == ["elsa+", "elsa+", "elsa+", "csi"]
    order = [cell.encoder for cell in cells]
    assert len(set(order)) == 30
    assert order == sorted(order, key=order.index)


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        ("scenario2-shallow", 3 * 3 * 10 * 3),
        ("scenario2-baselines", 5 * 3 * 10 * 3),
        ("scenario1-baselines", 3 * 2 * 10 * 3),
        ("scenario2-elsa", 4 * 3 * 10),
        ("scenario2-seeds", 2 * 3 * 10 * 2),
        ("scenario2-rest", 6 * 3 * 10),
        ("scenario1", 9 * 2 * 3 * 10),
        ("scenario1-elsa", 3 * 2 * 10),
    ],
)
def test_plans_have_every_cell_of_their_part_once(plan, count):
    cells = PLANS[plan]()
    assert len(cells) == len(set(cells)) == count
    for cell in cells:
        assert cell.detector in DETECTORS
        assert (cell.labelled is None) == (cell.gamma_l == 0)
        assert cell.labelled != cell.normal


def test_no_cell_stands_in_two_plans_but_the_pilots():
    cells = [cell for plan in PLANS if plan not in ("pilot", "small") for cell in PLANS[plan]()]
    assert len(set(cells)) == len(cells)


def test_encoders_are_shared_by_what_was_pretrained_alike():
    def cell(detector, **other):
        return Cell(**{**CELLS[0].fields(), "detector": detector, **other})

    assert cell("elsa+").encoder == cell("csi").encoder == cell("csi", labelled=None, gamma_l=0.0).encoder
    assert cell("elsa").encoder == cell("simclr").encoder != cell("elsa+").encoder
    assert len({cell("csi", **other).encoder for other in ({}, {"normal": "Dog"}, {"gamma_p": 0.0}, {"seed": 1})}) == 4
    assert cell("kde").encoder is None
    assert cell("kde").group != cell("kde", seed=1).group


def test_cells_of_every_kind_of_detector_run(tmp_path, monkeypatch):
    own = {
        "deep-sad": {"autoencoder_epochs": 1, "epochs": 1},
        "deep-svdd": {"autoencoder_epochs": 1, "epochs": 1},
        "ss-dgm": {"epochs": 1, "hidden": 7},
    }
    unlabelled = ("isolation-forest", "oc-svm", "kde", "knn", "deep-svdd", "csi", "simclr")
    cells = [Cell(name, "cifar10", "Car", None, 0.0, 0.1, 0) for name in unlabelled]
    cells += [Cell(name, "cifar10", "Car", "Cat", 0.1, 0.1, 0) for name in ("deep-sad", "ssad", "ss-dgm", "elsa")]
    monkeypatch.setitem(PLANS, "small", lambda: cells)
    quick = {**QUICK, "finetune_epochs": 0}
    assert run_plan("small", tmp_path / "r", Path("cifar"), 1e9, "cpu", quick, silent, own) == len(cells)
    lines = {line["detector"]: line for line in map(json.loads, (tmp_path / "r").read_text().splitlines())}
    assert set(lines) == {cell.detector for cell in cells}
    assert lines["ss-dgm"]["settings"]["hidden"] == 7
    assert lines["oc-svm"]["settings"]["nu"] == 0.1
    assert lines["oc-svm"]["settings"]["gamma_"] > 0
    assert all(0 <= line["auroc"] <= 100 for line in lines.values())
    # elsa's encoder served simclr, although other cells lie between them in the plan
    assert lines["simclr"]["seconds"]["pretrain"] > lines["elsa"]["seconds"]["pretrain"] == 0


def test_the_budget_counts_each_detector_by_its_own_longest_cell(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    budget = module.Budget(50)
    budget.spent("goad", 30)
    budget.spent("kde", 2)
    budget.spent("kde", 1)
    now[0] += 30
    assert not budget.allows("goad")
    assert budget.allows("kde")
    assert not budget.allows("never seen")  # as long as the longest of all
    now[0] += 18.5
    assert not budget.allows("kde")


def test_two_fits_with_one_seed_agree_on_a_cpu():
    line = repeat_cell(Path("cifar"), "cpu", QUICK, silent)
    assert line.startswith("two fits with seed 0 on cpu: AUROC ")
    assert line.endswith("largest difference of a score 0 standard deviations")


def test_the_command_refuses_what_the_user_can_put_right_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()  # the real loader
    assert main(["run", "pilot", "--cifar10", str(tmp_path), "--results", str(tmp_path / "r")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert main(["repeat", "--cifar10", str(tmp_path), "--set", "tua=1"]) == 2
    assert "there is no setting 'tua'" in capsys.readouterr().err


def test_a_line_names_no_folder_of_the_machine_that_made_it(monkeypatch):
    words = ["run", "pilot", "--cifar10", "/home/ann/my data/cifar-10-batches-bin", "--results", "results/new.jsonl"]
    monkeypatch.setattr("sys.argv", ["bench", *words])
    command = module.provenance("cpu")["command"]
    assert command == "python -m elsa.bench run pilot --cifar10 DIR/cifar-10-batches-bin --results results/new.jsonl"
