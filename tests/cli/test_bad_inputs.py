"""Whatever the user gets wrong: exit code 2, one line that says what to change, and nothing half-written."""

import errno
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from tiny_folder import QUICK, make_photos

from elsa.cli import run

PROGRESS = re.compile(r"^[\w ]+ \d+/\d+\b")


def complaints(stderr):
    return [line for line in stderr.splitlines() if not PROGRESS.match(line)]


def files_below(folder):
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*")}


def table(folder, *rows, name="labels.csv", header="path,label"):
    path = folder / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def png(width, height):
    """A PNG that claims its size and holds next to nothing."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def folder_of(tmp_path, **contents):
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in contents.items():
        (folder / f"{name}.png").write_bytes(content)
    return folder


def one_image(tmp_path, photos):
    return folder_of(tmp_path, only=(photos / "001.png").read_bytes())


def all_anomalies(tmp_path, photos):
    rows = [f"{path.name},anomaly" for path in photos.iterdir()]
    return ["--labels", table(tmp_path, *rows)]


def manifest_that_leaves(tmp_path, photos):
    folder = folder_of(tmp_path, a=(photos / "001.png").read_bytes())
    shutil.copy(photos / "002.png", tmp_path / "outside.png")
    return table(folder, "a.png,", "../outside.png,", name="manifest.csv")


def link_that_leaves(tmp_path, photos):
    folder = folder_of(tmp_path, a=(photos / "001.png").read_bytes())
    (folder / "b.png").symlink_to(photos / "002.png")
    return folder


def not_a_model(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("my only copy")
    return []


def interrupted_before(tmp_path):
    (tmp_path / "out.checkpoint").write_bytes(b"half a fit")
    return []


def file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    return ["--out", tmp_path / "file" / "out"]


# name: (SOURCE made from tmp_path and photos, or None for the photos; further options; what the line must say)
FIT = {
    "missing source": (lambda t, p: t / "nowhere", [], "nowhere"),
    "empty folder": (lambda t, p: folder_of(t), [], "holds no images"),
    "folder without images": (lambda t, p: table(folder_of(t), "a").parent, [], "holds no images"),
    "one image": (one_image, [], "16"),
    "only broken images": (lambda t, p: folder_of(t, a=b"", b=b"no png"), [], "can be decoded"),
    "decompression bomb": (lambda t, p: folder_of(t, bomb=png(40_000, 40_000)), [], "pixel limit"),
    "manifest leaves the source": (manifest_that_leaves, [], "leaves the source"),
    "link leaves the source": (link_that_leaves, [], "leaves the source"),
    "unknown table format": (lambda t, p: table(t, "a", name="a.xlsx"), [], "xlsx"),
    "manifest without path": (lambda t, p: table(t, "a,b", header="file,label"), [], "column `path`"),
    "no normals": (None, lambda t, p: all_anomalies(t, p), "16"),
    "missing label file": (None, ["--labels", "nowhere.csv"], "nowhere.csv"),
    "labels for files that do not exist": (None, lambda t, p: ["--labels", table(t, "no.png,normal")], "no.png"),
    "unknown label words": (None, lambda t, p: ["--labels", table(t, "001.png,good")], "'good'"),
    "integers as labels": (None, lambda t, p: ["--labels", table(t, "001.png,1")], "number"),
    "two labels for one file": (
        None,
        lambda t, p: ["--labels", table(t, "001.png,normal", "001.png,anomaly")],
        "two labels",
    ),
    "labels without a label column": (None, lambda t, p: ["--labels", table(t, "a", header="path")], "column `label`"),
    "K larger than the data": (None, ["--set", "num_prototypes=1000"], "num_prototypes=1000"),
    "tau that lets 1/E explode": (None, ["--set", "tau=0.1"], "tau=0.1"),
    "unknown setting": (None, ["--set", "tua=0.4"], "'tua'"),
    "setting of the wrong type": (None, ["--set", "tau=hot"], "--set"),
    "setting without a value": (None, ["--set", "tau"], "NAME=VALUE"),
    "a rate at which the training diverges": (None, ["--set", "finetune_lr=1e30"], "diverged"),
    "unknown preset": (None, ["--set", "preset=best"], "preset"),
    "unknown encoder": (None, ["--encoder", "resnet50"], "--encoder resnet50"),
    "file for a network that takes none": (None, ["--encoder", "tiny:weights.pth"], "--encoder tiny:weights.pth"),
    "method and encoder that do not fit": (None, ["--method", "elsa-head"], "--method elsa-head"),
    "encoder that only the head takes": (
        None,
        ["--method", "elsa", "--encoder", "mobilenet_v2:w.pth"],
        "--method elsa with",
    ),
    "missing weight file": (None, ["--encoder", "mobilenet_v2:nowhere.pth"], "nowhere.pth"),
    "rubbish as weight file": (
        None,
        lambda t, p: ["--encoder", f"mobilenet_v2:{table(t, 'x', name='w-b0353104.pth')}"],
        "w-b0353104.pth",
    ),
    "unknown method": (None, ["--method", "best"], "--method"),
    "missing device": (None, ["--device", "cuda:7"], "--device cuda:7"),
    "nonsense device": (None, ["--device", "toaster"], "--device toaster"),
    "negative seed": (None, ["--seed", "-1"], "--seed"),
    "size out of range": (None, ["--size", "7"], "--size"),
    "place taken by other files": (None, lambda t, p: not_a_model(t), "not a MODEL folder"),
    "checkpoint left": (None, lambda t, p: interrupted_before(t), "--resume"),
    "checkpoint damaged": (None, lambda t, p: [*interrupted_before(t), "--resume"], "incomplete"),
    "output below a file": (None, lambda t, p: file_in_the_way(t), "cannot write --out"),
    "output nobody can write": (None, ["--out", "/proc/elsa/model"], "cannot write --out"),
}


@pytest.mark.parametrize("case", FIT)
def test_fit_refuses(case, tmp_path, photos, capsys):
    make_source, make_options, words = FIT[case]
    source = photos if make_source is None else make_source(tmp_path, photos)
    options = make_options(tmp_path, photos) if callable(make_options) else make_options
    if "/proc/elsa/model" in options and not Path("/proc").is_dir():
        pytest.skip("no /proc here")
    before = files_below(tmp_path)
    quick = [] if "mobilenet_v2:" in " ".join(map(str, options)) else QUICK  # the head has other settings
    code = run(["fit", str(source), "--out", str(tmp_path / "out"), *quick, *map(str, options)])
    [line] = complaints(capsys.readouterr().err)
    assert code == 2
    assert line.startswith("Error: ")
    assert words in line
    assert files_below(tmp_path) == before


def test_fit_asks_for_a_choice_rather_than_start_what_takes_days(photos, tmp_path, capsys):
    assert run(["fit", str(photos), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    [line] = complaints(capsys.readouterr().err)
    assert "--encoder" in line
    assert "hours" in line
    assert files_below(tmp_path) == {}


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tampered(tmp_path, model, name):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    flip_a_byte(copy / name)
    return copy


def half_a_model(tmp_path, model):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    (copy / "model.safetensors").unlink()
    return copy


# name: (MODEL made from tmp_path and the model, or None; --out below tmp_path; further options; what the line must say)
SCORE = {
    "no such model": (lambda t, m: t / "nowhere", "s.csv", [], "nowhere"),
    "a folder that is no model": (lambda t, m: t, "s.csv", [], "not a MODEL folder"),
    "half a model": (half_a_model, "s.csv", [], "not a MODEL folder"),
    "tampered weights": (lambda t, m: tampered(t, m, "model.safetensors"), "s.csv", [], "model.safetensors"),
    "tampered description": (lambda t, m: tampered(t, m, "model.json"), "s.csv", [], "model.json"),
    "unknown table format": (None, "s.xlsx", [], ".parquet"),
    "a false-alarm rate too low to keep": (None, "s.csv", ["--false-alarms", "0.0001"], "--false-alarms"),
    "a false-alarm rate that is none": (None, "s.csv", ["--false-alarms", "1.5"], "--false-alarms"),
    "output nobody can write": (None, "/proc/elsa/s.csv", [], "cannot write --out"),
}


@pytest.mark.parametrize("case", SCORE)
def test_score_refuses(case, tmp_path, photos, model, capsys):
    make_model, out, options, words = SCORE[case]
    if out.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("no /proc here")
    model = make_model(tmp_path, model) if make_model else model
    before = files_below(tmp_path)
    code = run(["score", str(model), str(photos), "--out", str(tmp_path / out), "--device", "cpu", *options])
    [line] = complaints(capsys.readouterr().err)
    assert code == 2
    assert line.startswith("Error: ")
    assert words in line
    assert files_below(tmp_path) == before


def test_evaluate_refuses_images_without_labels(photos, model, capsys):
    assert run(["evaluate", str(model), str(photos)]) == 2
    assert "--labels" in complaints(capsys.readouterr().err)[0]


def test_a_mistyped_command_gets_one_line(capsys):
    assert run(["fti"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: No such command 'fti'")


@pytest.mark.parametrize("command", ["fit", "score"])
def test_a_full_disk_is_reported_and_leaves_nothing(command, photos, model, tmp_path, monkeypatch, capsys):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    if command == "fit":
        arguments = ["fit", str(photos), "--out", str(tmp_path / "out"), *QUICK]
    else:
        arguments = ["score", str(model), str(photos), "--out", str(tmp_path / "s.csv"), "--device", "cpu"]
    assert run(arguments) == 2
    [line] = complaints(capsys.readouterr().err)
    assert "No space left on device" in line
    assert files_below(tmp_path) == {}


def test_a_full_disk_keeps_the_table_that_was_there(photos, model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "s.csv"
    out.write_text("yesterday's scores\n")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EDQUOT, "Quota exceeded")))
    assert run(["score", str(model), str(photos), "--out", str(out), "--device", "cpu"]) == 2
    assert "Quota exceeded" in capsys.readouterr().err
    assert files_below(tmp_path) == {"s.csv": len("yesterday's scores\n")}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files with RLIMIT_FSIZE")
def test_a_write_the_kernel_cuts_short_leaves_nothing(tmp_path):
    """No simulation: the kernel refuses every byte behind the first 20,000 of any file."""
    photos = make_photos(tmp_path / "photos", count=24)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "from elsa.cli import main; main()"
    )
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", str(photos), "--out", str(out), *QUICK],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "File too large" in complaints(done.stderr)[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.csv", "photos"]
