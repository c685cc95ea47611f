"""Sets that memory does not hold, file names that are no UTF-8, and files of other versions, through the commands."""

import csv
import json
import os
import shutil

import pyarrow.parquet as pq
import pytest
from tiny_folder import QUICK

import elsa.checkpoint
from elsa.cli import run
from elsa.data import load
from elsa.model_file import read_checkpoint, read_model, write_checkpoint, write_model


@pytest.fixture
def little_memory(monkeypatch):
    """Room for 20 of the 48 photos."""
    monkeypatch.setitem(load.load_images.__kwdefaults__, "memory_limit", 20 * 3 * 32 * 32)


def test_a_set_larger_than_memory_is_fitted_scored_and_evaluated_alike(
    little_memory, photos, labels, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arguments = ["--out", str(tmp_path / "m"), *QUICK]
    assert run(["fit", str(photos), "--labels", str(labels), *arguments]) == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert f"stay in {tmp_path / 'm.cache'}" in capsys.readouterr().out
    table = tmp_path / "all.csv"
    table.write_text("path,label\n" + "".join(f"{n:03}.png,{'normal' if n % 8 else 'anomaly'}\n" for n in range(48)))
    before = sorted(os.listdir(tmp_path))
    assert run(["evaluate", str(model), str(photos), "--labels", str(table), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["normals"] == 42
    assert sorted(os.listdir(tmp_path)) == before  # the user named no place where the decoded images could stay


@pytest.mark.skipif(os.name != "posix", reason="such names cannot be made on Windows")
def test_a_file_name_that_is_no_utf8_is_fitted_and_scored(photos, tmp_path, capsys):
    folder = shutil.copytree(photos, tmp_path / "photos")
    try:
        os.rename(os.fsencode(folder / "001.png"), os.fsencode(folder) + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    (folder / os.fsdecode(b"broken\xe9.png")).write_bytes(b"")
    assert run(["fit", str(folder), "--out", str(tmp_path / "m"), *QUICK]) == 0
    for name in ("s.csv", "s.parquet"):
        assert run(["score", str(tmp_path / "m"), str(folder), "--out", str(tmp_path / name), "--device", "cpu"]) == 0
    with open(tmp_path / "s.csv", encoding="utf-8", newline="") as file:
        names = [row["path"] for row in csv.DictReader(file)]
    assert {r"caf\udce9.png", r"broken\udce9.png"} <= set(names)
    assert pq.read_table(tmp_path / "s.parquet")["path"].to_pylist() == names


def test_a_model_of_another_version_is_refused_in_one_line(photos, model, tmp_path, capsys):
    tensors, about = read_model(model)
    renamed = {name.replace("net/", "net/old."): tensor for name, tensor in tensors.items()}
    write_model(tmp_path / "m", renamed, {**about, "versions": {"elsa": "0.0.9"}})
    capsys.readouterr()
    assert run(["score", str(tmp_path / "m"), str(photos), "--out", str(tmp_path / "s.csv"), "--device", "cpu"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error")]
    assert "other parts than those of this elsa" in line
    assert "it was written by 0.0.9" in line
    assert not (tmp_path / "s.csv").exists()


def test_a_checkpoint_of_another_version_is_refused_in_one_line(photos, tmp_path, monkeypatch, capsys):
    arguments = ["fit", str(photos), "--out", str(tmp_path / "m"), *QUICK, "--set", "pretrain_epochs=2"]
    monkeypatch.setattr(elsa.checkpoint, "SECONDS_BETWEEN", 0)

    def write_and_stop(path, tensors, state):
        write_checkpoint(path, {name.replace("net/", "net/old."): t for name, t in tensors.items()}, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as first_try:
        first_try.setattr(elsa.checkpoint, "write_checkpoint", write_and_stop)
        assert run(arguments) == 130
    assert read_checkpoint(tmp_path / "m.checkpoint")[1]["stage"] == "pretrain"
    capsys.readouterr()
    assert run([*arguments, "--resume"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error")]
    assert "m.checkpoint was written by another version of elsa" in line
    assert (tmp_path / "m.checkpoint").exists()  # that version may still want it
