"""`elsa fit --method NAME` for the methods with a network or a boundary of their own, on a folder of photos."""

import csv

import numpy as np
import pytest
from PIL import Image

from elsa.cli import run

COUNT = 30
QUICK = {
    "deep-sad": ["autoencoder_epochs=1", "epochs=1"],
    "deep-svdd": ["autoencoder_epochs=1", "epochs=1"],
    "goad": ["epochs=0", "width=1"],
    "ss-dgm": ["epochs=1", "hidden=7"],
    "ssad": [],
    "csi": ["encoder=tiny", "preset=cpu", "pretrain_epochs=1", "views=1"],
    "simclr": ["encoder=tiny", "preset=cpu", "pretrain_epochs=1", "views=1"],
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, noise = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(COUNT):
        kind = {0: "normal", 1: "anomaly"}.get(number % 10, "rest")
        (folder / kind).mkdir(exist_ok=True)
        pixels = noise.integers(0, 90, (32, 32, 3)) + 100 * (kind == "anomaly")
        Image.fromarray(pixels.astype(np.uint8)).save(folder / kind / f"{number}.png")
    return folder


@pytest.mark.parametrize("method", QUICK)
def test_a_folder_is_fitted_and_scored(method, photos, tmp_path):
    settings = [word for setting in QUICK[method] for word in ("--set", setting)]
    options = ["--out", str(tmp_path / "m"), "--method", method, "--device", "cpu", *settings]
    assert run(["fit", str(photos), *options]) == 0
    table = tmp_path / "scores.csv"
    assert run(["score", str(tmp_path / "m"), str(photos), "--out", str(table), "--device", "cpu"]) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == COUNT
    assert all(np.isfinite(float(row["score"])) for row in rows)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "deep-sad", "--set", "eat=2"], "there is no setting 'eat'"),
        (["--method", "deep-sad", "--encoder", "tiny"], "other methods no --encoder"),
        (["--method", "csi", "--encoder", "mobilenet_v2:FILE"], "elsa-head takes mobilenet_v2:FILE"),
        (["--method", "ssad", "--set", "nu=2"], "nu=2.0"),
    ],
)
def test_options_that_do_not_fit_the_method_are_refused_in_one_line(options, says, photos, tmp_path, capsys):
    assert run(["fit", str(photos), "--out", str(tmp_path / "m"), "--device", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "m").exists()
