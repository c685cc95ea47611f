"""The commands do what they say, from images to figures."""

import csv
import json
import os
import shutil
import signal

import click
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny_folder import QUICK, make_photos

import elsa.checkpoint
from elsa import load
from elsa.cli import METHODS, cli, run
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.detectors import DETECTORS
from elsa.saved import SAVED_CLASSES


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_commands_and_their_main_options_are_these():
    """Scripts rely on them."""
    names = {name: {o for p in command.params for o in p.opts} for name, command in cli.commands.items()}
    people = ["demo", "data", "fit", "score", "evaluate", "explain", "label", "labels", "report"]
    assert list(names) == [*people, "export", "serve", "bench"]
    assert names["demo"] >= {"--out", "--from-scratch"}
    assert names["fit"] >= {"source", "--labels", "--out", "--method", "--encoder", "--size", "--set", "--seed"}
    assert names["fit"] >= {"--device", "--resume"}
    assert names["score"] >= {"model", "source", "--out", "--false-alarms", "--device"}
    assert names["evaluate"] >= {"model", "source", "--labels", "--json"}
    data = cli.commands["data"]
    assert isinstance(data, click.Group)
    assert {o for p in data.commands["check"].params for o in p.opts} >= {"source", "--labels", "--json"}


def test_every_method_of_fit_is_a_detector_whose_class_can_be_saved():
    assert {DETECTORS[method].split(":")[1] for method in METHODS} == set(SAVED_CLASSES)
    assert set(SAVED_CLASSES.values()) == {DETECTORS[method] for method in METHODS}


def test_a_model_says_where_it_comes_from(model):
    about = json.loads((model / "model.json").read_text())
    assert about["higher_is"] == "anomalous"
    assert about["data"]["images"] == 48
    assert about["data"]["labels"] == {"normal": 12, "anomaly": 3, "unlabelled": 33}
    assert about["preprocessing"] == {"size": 32, "channels": 3, "resize": "stretch", "pixel_limit": 200_000_000}
    assert about["seed"] == 0
    assert about["command"].startswith("elsa fit ")
    assert "--encoder tiny" in about["command"]
    assert about["versions"]["torch"] == torch.__version__
    assert not (model.parent / "model.checkpoint").exists()


def test_a_saved_model_scores_like_the_library_and_ranks_the_highest_first(model, photos, tmp_path, capsys):
    out = tmp_path / "s.csv"
    assert run(["score", str(model), str(photos), "--out", str(out), "--false-alarms", "0.5", "--device", "cpu"]) == 0
    rows = rows_of(out)
    assert list(rows[0]) == ["path", "score", "p_value", "verdict", "error"]
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    detector, images = load(model), load_images(open_source(photos), size=32, channels=3)
    expected = dict(zip(images.names, detector.anomaly_score(images.images).tolist(), strict=True))
    assert {row["path"]: float(row["score"]) for row in rows} == expected
    ps = [float(row["p_value"]) for row in rows]
    assert ps == sorted(ps)
    assert [row["verdict"] for row in rows] == ["anomaly" if p <= 0.5 else "normal" for p in ps]
    assert f"{sum(p <= 0.5 for p in ps)} called anomalies" in capsys.readouterr().out


def test_parquet_says_the_same_as_csv(model, photos, tmp_path):
    for name in ("s.csv", "s.parquet"):
        assert run(["score", str(model), str(photos), "--out", str(tmp_path / name), "--device", "cpu"]) == 0
    table = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert [{k: str(v) for k, v in row.items()} for row in table] == rows_of(tmp_path / "s.csv")


def test_an_unreadable_image_becomes_a_row_with_its_reason(model, photos, tmp_path, capsys):
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "007.png").write_bytes((folder / "007.png").read_bytes()[:300])
    out = tmp_path / "s.csv"
    assert run(["score", str(model), str(folder), "--out", str(out), "--device", "cpu"]) == 0
    rows = rows_of(out)
    assert len(rows) == 48
    assert rows[-1]["path"] == "007.png"
    assert "truncated" in rows[-1]["error"]
    assert rows[-1]["score"] == rows[-1]["verdict"] == ""
    assert "could not be read (1): 007.png" in capsys.readouterr().out


def test_new_images_are_prepared_as_the_model_says_not_as_they_look(model, photos, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("001.png", "008.png"):  # enlarged twice and grey, they would be read at 64 px and one channel
        Image.open(photos / name).convert("L").resize((96, 80)).save(folder / name)
    assert run(["score", str(model), str(folder), "--out", str(tmp_path / "s.csv"), "--device", "cpu"]) == 0
    assert len(rows_of(tmp_path / "s.csv")) == 2


def test_a_rate_nobody_asked_for_costs_the_verdicts_not_the_scores(model, photos, tmp_path, capsys):
    """The tiny model holds back two images: they support no rate of 5%."""
    out = tmp_path / "s.csv"
    assert run(["score", str(model), str(photos), "--out", str(out), "--device", "cpu"]) == 0
    assert {row["verdict"] for row in rows_of(out)} == {""}
    assert "No verdicts" in capsys.readouterr().out


def test_evaluate_agrees_with_scores_and_labels_and_holds_back_what_few_labels_cannot_say(
    model, photos, labels, tmp_path, capsys
):
    assert run(["evaluate", str(model), str(photos), "--labels", str(labels), "--json", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "read images 15/15" in printed.err  # nobody waits for images without a label
    assert (found["anomalies"], found["normals"], found["unlabelled"]) == (3, 12, 33)
    assert found["auroc"]["value"] is None
    assert found["auroc"]["missing_anomalies"] > 0
    everything = tmp_path / "all.csv"
    words = [f"{n:03}.png,{'anomaly' if n < 20 else 'normal'}" for n in range(48)]
    everything.write_text("\n".join(["path,label", *words]))
    assert run(["evaluate", str(model), str(photos), "--labels", str(everything), "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert run(["score", str(model), str(photos), "--out", str(tmp_path / "s.csv"), "--device", "cpu"]) == 0
    score = {row["path"]: float(row["score"]) for row in rows_of(tmp_path / "s.csv")}
    pairs = [score[f"{a:03}.png"] - score[f"{n:03}.png"] for a in range(20) for n in range(20, 48)]
    wins = sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in pairs)
    assert found["auroc"]["value"] == pytest.approx(wins / len(pairs))
    assert run(["evaluate", str(model), str(photos), "--labels", str(everything), "--device", "cpu"]) == 0
    assert "AUROC" in capsys.readouterr().out


def test_evaluate_warns_where_the_model_may_have_learned_from_the_images_and_names_those_it_could_not_read(
    model, photos, labels, tmp_path, capsys
):
    assert run(["evaluate", str(model), str(photos), "--labels", str(labels), "--device", "cpu"]) == 0
    assert "the figures flatter" in capsys.readouterr().err
    others = shutil.copytree(photos, tmp_path / "others")
    (others / "047.png").unlink()
    (others / "001.png").write_bytes(b"")
    assert run(["evaluate", str(model), str(others), "--labels", str(labels), "--json", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "flatter" not in printed.err
    assert "could not be read (1): 001.png" in printed.err
    assert json.loads(printed.out)["normals"] == 11


def test_data_check_finds_a_copy_with_another_label(photos, tmp_path, capsys):
    folder = shutil.copytree(photos, tmp_path / "photos")
    shutil.copy(folder / "001.png", folder / "copy.png")
    table = tmp_path / "labels.csv"
    table.write_text("path,label\n001.png,normal\ncopy.png,anomaly\n")
    assert run(["data", "check", str(folder), "--labels", str(table), "--json"]) == 0
    assert "copy.png" in str([finding["examples"] for finding in json.loads(capsys.readouterr().out)["findings"]])
    assert run(["data", "check", str(folder), "--labels", str(table)]) == 0
    assert "copy.png" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_model_and_another_seed_another(model, photos, labels, tmp_path):
    def weights(seed):
        out = tmp_path / f"seed{seed}"
        arguments = ["fit", str(photos), "--labels", str(labels), "--out", str(out), *QUICK, "--seed", seed]
        assert run(arguments) == 0
        return (out / "model.safetensors").read_bytes()

    assert weights("0") == (model / "model.safetensors").read_bytes()
    assert weights("1") != (model / "model.safetensors").read_bytes()


def test_an_error_of_ours_is_short_and_says_how_to_see_more(monkeypatch, photos, tmp_path, capsys):
    def broken(*_, **__):
        raise ZeroDivisionError("in\nthe middle")

    monkeypatch.setattr("elsa.jobs.fit_source", broken)
    arguments = ["fit", str(photos), "--out", str(tmp_path / "m")]
    assert run(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("ZeroDivisionError: in the middle")
    assert lines[1] == f"To report it, run: elsa --traceback {' '.join(arguments)}"
    assert len(lines) == 2
    assert run(["--traceback", *arguments]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_control_c_then_resume_gives_the_model_of_an_unbroken_fit(photos, labels, tmp_path, monkeypatch, capsys):
    """Interrupted once the first checkpoint stands; the resumed fit ends at the same bytes."""
    write = elsa.checkpoint.write_checkpoint
    monkeypatch.setattr(elsa.checkpoint, "SECONDS_BETWEEN", 0)

    def fit(name, *more):
        options = ["--labels", str(labels), "--out", str(tmp_path / name), *QUICK, "--set", "pretrain_epochs=3"]
        return run(["fit", str(photos), *options, *more])

    def write_and_interrupt(*arguments):
        write(*arguments)
        signal.raise_signal(signal.SIGINT)  # what a terminal sends

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs this in background
    with monkeypatch.context() as first_try:
        first_try.setattr(elsa.checkpoint, "write_checkpoint", write_and_interrupt)
        assert fit("broken") == 130
    signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "Interrupted: nothing half-written is left; add --resume to the same command to go on"
    assert {path.name for path in tmp_path.iterdir()} == {"broken.checkpoint"}

    assert fit("whole") == fit("broken", "--resume") == 0
    assert "pretrain 1/3" not in capsys.readouterr().err.split("read images")[-1]  # it did go on
    broken, whole = (tmp_path / name / "model.safetensors" for name in ("broken", "whole"))
    assert broken.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"broken", "whole"}


@pytest.mark.skipif("ELSA_MOBILENET_V2" not in os.environ, reason="names torchvision's weight file")
def test_the_pretrained_head_finds_the_scratches_and_its_model_needs_no_weight_file(tmp_path, capsys):
    photos = make_photos(tmp_path / "photos", count=96)
    weights = shutil.copy(os.environ["ELSA_MOBILENET_V2"], tmp_path)
    arguments = ["fit", str(photos), "--labels", str(tmp_path / "labels.csv"), "--out", str(tmp_path / "m")]
    assert run([*arguments, "--encoder", f"mobilenet_v2:{weights}", "--set", "size=64", "--device", "cpu"]) == 0
    os.unlink(weights)
    assert run(["score", str(tmp_path / "m"), str(photos), "--out", str(tmp_path / "s.csv"), "--device", "cpu"]) == 0
    highest = {row["path"] for row in rows_of(tmp_path / "s.csv")[:12]}
    assert highest == {f"{number:03}.png" for number in range(0, 96, 8)}
