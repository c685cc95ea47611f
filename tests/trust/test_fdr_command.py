"""`elsa score --fdr`: verdicts of a whole batch, whatever its shards."""

import csv

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from elsa.cli import run
from elsa.detectors.ssad import SSADDetector
from elsa.head import ElsaHead
from elsa.saved import save_model
from elsa.trust.calibrate import discoveries

SIZE = 32


def picture(generator, bright):
    return generator.integers(120, 256, (SIZE, SIZE)) if bright else generator.integers(0, 136, (SIZE, SIZE))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """37 dark pictures as in training, 13 bright ones."""
    folder, generator = tmp_path_factory.mktemp("fdr"), np.random.default_rng(0)
    for number in range(50):
        Image.fromarray(picture(generator, number >= 37).astype(np.uint8)).save(folder / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, generator = tmp_path_factory.mktemp("fdr-model") / "m", np.random.default_rng(1)
    images = torch.from_numpy(np.stack([picture(generator, False) for _ in range(197)]).astype(np.uint8))[:, None]
    detector = SSADDetector(seed=0).fit(images, [""] * 197)
    preprocessing = {"size": SIZE, "channels": 1, "resize": "stretch", "pixel_limit": 10_000_000}
    save_model(detector, folder, {"preprocessing": preprocessing})
    return folder


def score(model, source, out, *options):
    return run(["score", str(model), str(source), "--out", str(out), "--device", "cpu", *options])


def check(rows, rate):
    """Verdicts are those of the rule over all p-values."""
    expected = discoveries(torch.tensor([float(row["p_value"]) for row in rows], dtype=torch.float64), rate)
    assert [row["verdict"] == "anomaly" for row in rows] == expected.tolist()
    return int(expected.sum())


def test_verdicts_follow_the_rule_in_a_table_and_in_a_folder_of_shards(model, photos, tmp_path, capsys):
    options = ["--fdr", "0.2", "--workers", "1"]
    assert score(model, photos, tmp_path / "s.csv", *options) == 0
    with open(tmp_path / "s.csv") as file:
        called = check(list(csv.DictReader(file)), 0.2)
    assert 13 <= called <= 20
    assert f"{called} called anomalies" in capsys.readouterr().out
    assert score(model, photos, tmp_path / "shards", "--shard-size", "17", *options) == 0
    rows = [row for part in sorted((tmp_path / "shards").glob("part-*")) for row in pq.read_table(part).to_pylist()]
    assert len(rows) == 50
    assert check(rows, 0.2) == called


def test_a_finished_folder_is_not_told_again_with_another_rate(model, photos, tmp_path, capsys):
    for rate, code in (("0.2", 0), ("0.2", 0), ("0.3", 2)):
        assert score(model, photos, tmp_path / "s", "--fdr", rate, "--workers", "1", "--resume") == code
    assert "other verdicts" in capsys.readouterr().err
    assert score(model, photos, tmp_path / "s", "--workers", "1", "--resume") == 2


def test_a_rate_too_low_for_the_held_out_images_calls_nothing_and_says_so(model, photos, tmp_path, capsys):
    assert score(model, photos, tmp_path / "s.csv", "--fdr", "0.001", "--workers", "1") == 0
    said = capsys.readouterr().out
    assert "0 called anomalies" in said
    assert "--fdr 0.001 called nothing" in said
    assert "all 30 held-out images" in said


def test_vectors_are_judged_by_the_same_rule(tmp_path):
    draw = torch.Generator().manual_seed(0)
    train, new = torch.randn(211, 7, generator=draw) + 2, torch.randn(47, 7, generator=draw) + 2
    new[:11] *= -1
    detector = ElsaHead(seed=0, num_prototypes=13).fit(train, [""] * 211)
    save_model(detector, tmp_path / "m", {"preprocessing": {}})
    np.savez(tmp_path / "v.npz", vectors=new.numpy())
    assert score(tmp_path / "m", tmp_path / "v.npz", tmp_path / "s.parquet", "--fdr", "0.3") == 0
    assert check(pq.read_table(tmp_path / "s.parquet").to_pylist(), 0.3) >= 8


@pytest.mark.parametrize("other", [["--false-alarms", "0.1"], ["--views", "1"]])
def test_two_rules_at_once_are_refused(other, model, photos, tmp_path, capsys):
    assert score(model, photos, tmp_path / "s.csv", "--fdr", "0.1", *other) == 2
    assert other[0] in capsys.readouterr().err
    assert not (tmp_path / "s.csv").exists()
