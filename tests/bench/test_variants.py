"""Cells beyond the two tables: watched fits, kept encoders, plans together, other protocols, rows as published."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import KernelDensity
from sklearn.svm import OneClassSVM
from small import QUICK, small_cifar10

from elsa.bench import as_published, encoders, watch
from elsa.bench import run as module
from elsa.bench.__main__ import main
from elsa.bench.as_published import score_as_published, stratified_tenth
from elsa.bench.cell import Told
from elsa.bench.encoders import EncoderStore
from elsa.bench.lines import cell_of, provenance, read_lines
from elsa.bench.plans import ABLATED, AS_PUBLISHED, PLANS, VARIANTS, WATCHED, Cell
from elsa.bench.protocols import AllAgainstOutliers, load_benchmark
from elsa.bench.run import run_plan
from elsa.bench.steered import SteeredElsa
from elsa.bench.watch import FinetuningWatch, Lookout, principal_coordinates
from elsa.config import CHOICES
from elsa.data.benchmark_sets import write_packed
from elsa.data.benchmarks import IMAGENETTE_CLASSES
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.progress import silent
from elsa.trust.metrics import auroc

CELL = Cell("elsa+", "cifar10", "Car", "Cat", 0.1, 0.1, 0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "load_cifar10", small_cifar10)


def fill(monkeypatch, results, plans, **more):
    for name, cells in plans.items():
        monkeypatch.setitem(PLANS, name, lambda cells=cells: cells)
    return run_plan(list(plans), results, Path("cifar"), 1e9, "cpu", QUICK, silent, **more)


def cell(**changes):
    return dataclasses.replace(CELL, **changes)


def test_a_watched_fit_learns_the_same_to_the_bit_and_is_seen_after_every_epoch():
    images, classes, test_images, test_classes = small_cifar10(None)
    chosen = classes < 4
    images, labels = images[chosen], ["anomaly" if n % 10 == 0 else "" for n in range(int(chosen.sum()))]
    settings = {**QUICK, "finetune_epochs": 3, "prototypes_every": 2, "finetune_batchnorm": "train"}
    weights = Elsa(seed=1, **settings).pretrain(images, labels)
    plain = Elsa(seed=1, **settings).fit(images, labels, weights)
    watched, seen = SteeredElsa(seed=1, **settings), []
    watched.steered_by = Lookout(lambda epoch, net, given: seen.append((epoch, net.training, given.shape)))
    watched.fit(images, labels, weights)
    assert torch.equal(watched.anomaly_score(test_images), plain.anomaly_score(test_images))
    assert watched.history_ == plain.history_
    assert torch.equal(watched.calibration_, plain.calibration_)
    assert seen == [(epoch, False, (8, 128)) for epoch in (1, 2, 3)]
    is_anomaly = (test_classes > 3).numpy()
    told = watched.config
    watch.both_ensembles(watched, test_images, (test_classes > 3).numpy())
    assert watched.config == told
    watch_of = FinetuningWatch(watched.config, test_images, is_anomaly, watched.device)
    watch_of(1, watched.net_, watched.prototypes_)
    histogram = watch_of.histograms["1"]
    assert sum(histogram["normal"]) == (~is_anomaly).sum()
    assert sum(histogram["anomalous"]) == is_anomaly.sum()
    assert len(histogram["edges"]) == watch.BINS + 1


def test_the_line_of_a_watched_cell_carries_what_the_figures_need(tmp_path, monkeypatch):
    fill(monkeypatch, tmp_path / "r", {"small": [cell(variant=WATCHED)]})
    [line] = read_lines(tmp_path / "r")
    seen = line["watched"]
    assert len(seen["test_auroc"]) == len(line["early_stop"]) == QUICK["finetune_epochs"]
    assert len(seen["prototypes"]["images"]) == QUICK["num_prototypes"]
    assert sum(seen["prototypes"]["images"]) > sum(seen["prototypes"]["hidden"]) > 0
    embedding = seen["embedding"]
    assert len(embedding["csi"]["points"]) == len(embedding["elsa+"]["points"]) == len(embedding["is_anomaly"]) == 100
    assert embedding["csi"] != embedding["elsa+"]
    assert set(seen["ensembles"]) == {"projections", "scores"}
    assert seen["ensembles"]["projections"] == pytest.approx(line["auroc"], abs=0.5)
    assert cell_of(line) == cell(variant=WATCHED)


def test_watched_pretraining_measures_the_theory_on_an_encoder_of_its_own(tmp_path, monkeypatch):
    watched = Cell("csi", "cifar10", "Car", None, 0.0, 0.1, 0, WATCHED)
    assert watched.encoder is None
    fill(monkeypatch, tmp_path / "r", {"small": [watched, cell(detector="csi", labelled=None, gamma_l=0.0)]})
    first, second = read_lines(tmp_path / "r")
    [figures] = first["watched"]["pretraining"]
    assert figures["epoch"] == 1
    assert {"uniformity", "energy of hidden anomalies", "auroc"} < set(figures)
    assert figures["uniformity"] < 0
    assert first["auroc"] == second["auroc"]  # looking changes nothing
    assert second["seconds"]["pretrain"] > 0


def test_several_plans_share_an_encoder_and_each_keeps_its_own_lines(tmp_path, monkeypatch):
    plans = {
        "one": [CELL, cell(normal="Bird")],
        "two": [cell(detector="knn", labelled=None, gamma_l=0.0), cell(detector="csi", labelled=None, gamma_l=0.0)],
    }
    assert fill(monkeypatch, tmp_path / "r", plans) == 4
    lines = read_lines(tmp_path / "r")
    assert [(line["plan"], line["detector"], line["normal"]) for line in lines] == [
        ("one", "elsa+", "Car"),
        ("two", "knn", "Car"),
        ("two", "csi", "Car"),
        ("one", "elsa+", "Bird"),
    ]
    assert [line["seconds"]["pretrain"] > 0 for line in lines] == [True, False, False, True]
    assert lines[1]["settings"]["metric_"] == "cosine"
    assert fill(monkeypatch, tmp_path / "r", plans) == 0


def test_a_kept_encoder_is_not_made_again_unless_its_settings_changed(tmp_path, monkeypatch):
    made, stages = tmp_path / "encoders", []

    def noting(stage, done, total, figures):
        stages.append(stage)

    def run(settings):
        stages.clear()
        results = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        run_plan("small", results, Path("cifar"), 1e9, "cpu", settings, noting, encoders=made)
        return read_lines(results)[0]["auroc"], "pretrain" in stages

    monkeypatch.setitem(PLANS, "small", lambda: [CELL])
    first = run(QUICK)
    assert first == (run(QUICK)[0], True)
    assert run(QUICK) == (first[0], False)
    assert run({**QUICK, "finetune_lr": 2e-4})[1] is False
    assert run({**QUICK, "pretrain_lr": 2e-4})[1] is True
    monkeypatch.setenv("ELSA_COMMIT", "another")
    assert run(QUICK)[1] is True
    assert len(list(made.glob("*.npz"))) == 3


@pytest.mark.parametrize("optimizer", CHOICES["pretrain_optimizer"])
def test_a_stopped_pretraining_goes_on_where_it_stood_to_the_same_bits(tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr(encoders, "SECONDS_BETWEEN", 0.0)
    settings = {**QUICK, "pretrain_epochs": 4, "pretrain_warmup": 1, "pretrain_optimizer": optimizer}
    images, labels = small_cifar10(None)[0][:40], [""] * 40
    expected = Elsa(seed=3, **settings).pretrain(images, labels)
    store, epochs = EncoderStore(tmp_path / "encoders"), []

    def killed(stage, done, total, figures):
        epochs.append(done)
        if epochs == [1, 2, 3]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.weights(CELL, SteeredElsa(seed=3, progress=killed, **settings), images, labels)
    found = store.weights(CELL, SteeredElsa(seed=3, progress=killed, **settings), images, labels)
    assert epochs == [1, 2, 3, 3, 4]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(list((tmp_path / "encoders").iterdir())) == 1
    kept = store.weights(CELL, SteeredElsa(seed=3, progress=killed, **settings), images, labels)
    assert len(epochs) == 5
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


def test_variants_change_the_detector_and_leave_the_encoder_alone(tmp_path, monkeypatch):
    plans = {"small": [CELL, cell(variant="K=50"), cell(variant="K=100")]}
    fill(monkeypatch, tmp_path / "r", plans)
    lines = read_lines(tmp_path / "r")
    assert [line["settings"]["num_prototypes"] for line in lines] == [8, 50, 100]
    assert [line["variant"] for line in lines] == ["", "K=50", "K=100"]
    assert [line["seconds"]["pretrain"] > 0 for line in lines] == [True, False, False]


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        ("scenario2-knn", 3 * 10 * 3),
        ("as-published", 3 * 3 * 10 * 3),
        ("as-published-ssad", 5 * 10 * 3),
        ("scenario3", 3),
        ("imagenet10", 10 * 2 * 4),
        ("ablations", 3 * 9 * (1 + len(ABLATED))),
        ("prototype-counts", 3 * 3 * 4),
        ("theory", 1),
    ],
)
def test_the_other_plans_have_every_cell_once(plan, count):
    cells = PLANS[plan]()
    assert len(cells) == len(set(cells)) == count
    assert all(one.variant == "" or one.variant in VARIANTS for one in cells)
    order = [one.encoder for one in cells if one.encoder]
    assert order == sorted(order, key=order.index)  # what stands on an encoder stands together


def test_a_data_set_has_settings_of_its_own_that_the_user_can_change():
    one = Cell("elsa+", "imagenette64", "tench", "church", 0.1, 0.0, 0)
    found = Told("cpu", {}, {}, silent).of(one)
    assert (found["num_prototypes"], found["finetune_batch"], found["finetune_lr"]) == (20, 32, 5e-5)
    assert Told("cpu", {"num_prototypes": 9}, {}, silent).of(one)["num_prototypes"] == 9
    assert "num_prototypes" not in Told("cpu", {}, {}, silent).of(CELL)


def test_imagenet10_runs_on_its_stand_in(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3), dtype=np.uint8)
    for part, copies in (("train", 20), ("val", 2)):
        classes = [name for name in IMAGENETTE_CLASSES for _ in range(copies)]
        files = [encoded(pixels[n % 20]) for n in range(len(classes))]
        write_packed(tmp_path / f"imagenette64-{part}.npz", files, classes)
    cells = [one for one in PLANS["imagenet10"]() if one.normal == "church" and one.gamma_p == 0.1][-2:]
    monkeypatch.setattr(module, "load_cifar10", None)  # it must not be needed
    fill(monkeypatch, tmp_path / "r", {"small": cells}, data=tmp_path)
    lines = read_lines(tmp_path / "r")
    assert [line["detector"] for line in lines] == ["elsa+", "csi"]
    assert set(lines[0]["auroc_per_class"]) == set(IMAGENETTE_CLASSES) - {"church"}
    assert lines[0]["sets"] == {"ImageNet-10": "imagenette64"}


def test_lines_that_know_no_variant_are_cells_without_one():
    old = {"plan": "x", **{name: value for name, value in CELL.fields().items() if name != "variant"}, "auroc": 1.0}
    assert cell_of(old) == CELL


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def outliers(folder):
    def encode(value):
        return encoded(np.full((32, 32, 3), value, np.uint8))

    for name, number, value in (("svhn-test-cropped-10k", 7, 250), ("cifar100-test", 5, 240)):
        write_packed(folder / f"{name}.npz", [encode(value)] * number, ["x"] * number)
    write_packed(folder / "tinyimagenet-aux20k-32.npz", [encode(250)] * 11, ["x"] * 11)


def test_scenario_3_trains_on_all_of_cifar10_and_tests_against_the_sets_at_hand(tmp_path, monkeypatch):
    outliers(tmp_path)
    plan = {"small": [one for one in PLANS["scenario3"]() if one.detector != "goad"]}
    fill(monkeypatch, tmp_path / "r", plan, data=tmp_path)
    lines = read_lines(tmp_path / "r")
    assert [line["detector"] for line in lines] == ["elsa+", "csi"]
    for line in lines:
        assert set(line["auroc_per_class"]) == {"SVHN", "CIFAR-100"}
        assert line["auroc"] == pytest.approx(np.mean(list(line["auroc_per_class"].values())), abs=1e-3)
        assert line["sets"]["SVHN"] == "svhn-test-cropped-10k"
        assert line["sets"]["auxiliary"] == "tinyimagenet-aux20k-32"
    benchmark = load_benchmark("cifar10-all", small_cifar10(None), tmp_path, "cpu")
    assert isinstance(benchmark, AllAgainstOutliers)
    images, labels, _ = benchmark.training_set(plan["small"][0])
    assert len(images) == 311
    assert labels == [""] * 300 + ["anomaly"] * 11
    assert len(benchmark.training_set(plan["small"][1])[0]) == 300
    scores = benchmark.test_images.float().mean((1, 2, 3)).numpy()
    assert benchmark.auroc_per_class(scores, plan["small"][0]) == {"SVHN": 100.0, "CIFAR-100": 100.0}
    assert benchmark.is_anomaly(plan["small"][0]).sum() == 12
    apart = np.repeat([0.5, 1.0, 0.0], [100, 7, 5])  # normal images, then the sets in their order
    assert benchmark.auroc_per_class(apart, plan["small"][0]) == {"SVHN": 100.0, "CIFAR-100": 0.0}


def test_missing_folders_are_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--data is needed for cells on cifar10-all"):
        fill(monkeypatch, tmp_path / "r", {"small": PLANS["scenario3"]()})
    monkeypatch.setitem(PLANS, "small", lambda: [CELL])
    with pytest.raises(UserError, match="--cifar10 is needed for cells on cifar10"):
        run_plan("small", tmp_path / "r", None, 1e9, "cpu", QUICK, silent)
    with pytest.raises(UserError, match="imagenette64-train.npz is not there"):
        fill(monkeypatch, tmp_path / "r", {"small": PLANS["imagenet10"]()}, data=tmp_path)


def shallow_problem(brighter=20, tests=100):
    generator = torch.Generator().manual_seed(0)
    train = torch.randint(0, 120, (60, 3, 8, 8), generator=generator, dtype=torch.uint8)
    test = torch.randint(0, 120, (tests, 3, 8, 8), generator=generator, dtype=torch.uint8)
    is_anomaly = np.arange(tests) >= tests // 2
    test[tests // 2 :] += brighter
    train[:5] += 100
    return train, ["anomaly"] * 5 + ["normal"] * 5 + [""] * 50, test, is_anomaly


@pytest.mark.parametrize("detector", as_published.SHALLOW)
def test_rows_as_published_find_anomalies_and_say_how_they_were_selected(detector):
    train, labels, test, is_anomaly = shallow_problem(brighter=100)
    scores, chosen = score_as_published(detector, train, labels, test, is_anomaly, 0, "cpu")
    assert scores.shape == (100,)
    assert auroc(scores, is_anomaly) > 0.9
    assert chosen["selected by"]


def test_the_published_selection_takes_the_width_that_is_best_on_a_tenth_of_the_test_set():
    train, labels, test, is_anomaly = shallow_problem(brighter=7, tests=600)
    scores, chosen = score_as_published("oc-svm", train, labels, test, is_anomaly, 0, "cpu")
    rows, new = train[5:].flatten(1).numpy() / 255, test.flatten(1).numpy() / 255
    seen = stratified_tenth(is_anomaly, 0)
    by_gamma = {g: -OneClassSVM(nu=0.1, gamma=g).fit(rows).decision_function(new) for g in as_published.GAMMAS}
    aurocs = {auroc(found[seen], is_anomaly[seen]) for found in by_gamma.values()}
    best = max(aurocs)
    assert min(aurocs) < best
    assert auroc(by_gamma[chosen["gamma"]][seen], is_anomaly[seen]) == best
    np.testing.assert_allclose(scores, by_gamma[chosen["gamma"]], atol=1e-6)


def test_a_tenth_of_each_kind_is_seen():
    is_anomaly = np.arange(1000) % 10 > 0
    seen = stratified_tenth(is_anomaly, 3)
    assert len(set(seen)) == 100
    assert is_anomaly[seen].sum() == 90
    assert set(seen) != set(stratified_tenth(is_anomaly, 4))


def test_a_row_as_published_is_a_variant_of_its_own_and_no_other_detector_has_it(tmp_path, monkeypatch):
    fill(monkeypatch, tmp_path / "r", {"small": [cell(detector="ssad", variant=AS_PUBLISHED)]})
    [line] = read_lines(tmp_path / "r")
    assert line["settings"]["selected by"] == "labels of a tenth of the test set"
    with pytest.raises(UserError, match="detector goad has no variant 'as published'"):
        fill(
            monkeypatch,
            tmp_path / "r2",
            {"small": [cell(detector="goad", labelled=None, gamma_l=0.0, variant=AS_PUBLISHED)]},
        )


def test_principal_coordinates_are_those_of_the_covariance():
    z = torch.randn(31, 5, generator=torch.Generator().manual_seed(0)).double() * torch.tensor([3.0, 1, 5, 1, 1])
    found = principal_coordinates(z)
    values = torch.linalg.eigvalsh(torch.cov(z.T))
    torch.testing.assert_close(torch.cov(found.T), torch.diag(values.flip(0)[:2]))


def test_a_command_hides_folders_given_after_an_equals_sign(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "run", "pilot", "--cifar10=/home/ann/cifar", "--set", "tau=0.3"])
    assert provenance("cpu")["command"] == "python -m elsa.bench run pilot --cifar10=DIR/cifar --set tau=0.3"


def test_a_line_is_json_that_any_reader_takes(tmp_path, monkeypatch):
    fill(monkeypatch, tmp_path / "r", {"small": [cell(variant=WATCHED)]})

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    json.loads((tmp_path / "r").read_text(), parse_constant=refuse)


def test_a_bandwidth_is_judged_on_folds_it_was_not_fitted_to():
    rows = torch.randn(23, 3, generator=torch.Generator().manual_seed(0)).double()
    order = np.random.default_rng([5, 2]).permutation(23)
    folds = [part.numpy() for part in torch.from_numpy(order).chunk(as_published.FOLDS)]
    by_hand = 0.0
    for fold in folds:
        rest = np.setdiff1d(order, fold)
        by_hand += KernelDensity(bandwidth=0.7).fit(rows[rest].numpy()).score(rows[fold].numpy())
    distances = torch.cdist(rows, rows).square()
    assert as_published.cross_validated(distances, 0.7, 3, seed=5) == pytest.approx(by_hand / 23)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "scenario2", "scenario3"], "--cifar10 is needed for cells on cifar10"),
        (["run", "imagenet10"], "--data is needed for cells on imagenette64"),
        (["run"], "PLAN"),
        (["pack", "{}", "--out", "{}"], "cifar100_test.parquet"),
        (["report", "--check", "--results", "{}", "--out", "{}/none.md"], "none.md is stale"),
    ],
)
def test_the_command_tells_what_is_missing_in_one_line(arguments, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([word.format(tmp_path) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.startswith("Error: ")
    assert error.count("\n") == 1


def test_the_command_fills_several_plans(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, cells in {
        "scenario2": [CELL],
        "scenario2-knn": [cell(detector="knn", labelled=None, gamma_l=0.0)],
    }.items():
        monkeypatch.setitem(PLANS, name, lambda cells=cells: cells)
    settings = [f"--set={name}={value}" for name, value in QUICK.items() if name != "preset"]
    where = ["--cifar10", "x", "--encoders", "e", "--device", "cpu", "--preset", "cpu"]
    assert main(["run", "scenario2", "scenario2-knn", *where, *settings]) == 0
    assert "scenario2, scenario2-knn: 2 cells added to results/results.jsonl" in capsys.readouterr().out
    assert len(read_lines(tmp_path / "results" / "results.jsonl")) == 2
    assert len(list((tmp_path / "e").glob("*.npz"))) == 1
