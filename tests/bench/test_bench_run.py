import json

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from elsa.bench import run as module
from elsa.bench.__main__ import main
from elsa.bench.plans import PLANS, Cell, next_classes
from elsa.bench.run import append_line, auroc_per_class, finished_cells, repeat_cell, run_plan
from elsa.data.benchmarks import CIFAR10_CLASSES
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
    return run_plan("small", results, None, budget, "cpu", QUICK, progress)


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
        run_plan("tabel1", tmp_path / "r", None, 1, "cpu", QUICK, silent)


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


def test_scenario_2_has_its_ninety_priority_cells_grouped_by_encoder():
    cells = PLANS["scenario2"]()
    assert len(cells) == len(set(cells)) == 90
    order = [cell.encoder for cell in cells]
    assert len(set(order)) == 30
    assert order == sorted(order, key=order.index)


def test_two_fits_with_one_seed_agree_on_a_cpu():
    line = repeat_cell(None, "cpu", QUICK, silent)
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
