"""Ray on this machine, started once: the same file as without it, and cells of a plan on all cores."""

import json
import sys

import pytest
import torch
from PIL import Image

import elsa.bench.ray_run
from elsa.bench.plans import Cell
from elsa.cli import run
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.saved import save_model
from elsa.ship.ray_engine import connect

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own, in threads of its own as well


@pytest.fixture(scope="module")
def two_cores():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def test_ray_fills_a_plan_on_all_cores_and_no_cell_twice(two_cores, tmp_path, monkeypatch):
    cells = [Cell("kde", "cifar10", normal, None, 0.0, 0.1, seed) for seed in (0, 1) for normal in ("Car", "Bird")]
    real = elsa.bench.ray_run.run_plan

    def on_small_images(*arguments, **options):
        from elsa.bench import run as module

        classes = torch.arange(10).repeat(10)
        images = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        module.load_cifar10 = lambda _folder: (images, classes, images[:50], classes[:50])
        module.PLANS["small"] = lambda: cells
        module.LOOK_AGAIN = 0.1
        return real(*arguments, **options)

    monkeypatch.setattr(elsa.bench.ray_run, "run_plan", on_small_images)
    results = tmp_path / "r.jsonl"
    added = elsa.bench.ray_run.run_plan_on_ray(["small"], results, tmp_path, 1e9, "cpu", {})
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert added == len(cells) == len(lines)
    assert {(line["normal"], line["seed"]) for line in lines} == {(cell.normal, cell.seed) for cell in cells}
    with pytest.raises(UserError, match="the Ray cluster has no GPU"):
        elsa.bench.ray_run.run_plan_on_ray(["small"], results, None, 1e9, "cuda", {})
    with pytest.raises(UserError, match="PLAN 'none' is unknown"):
        elsa.bench.ray_run.run_plan_on_ray(["none"], results, None, 1e9, "cpu", {})


def test_ray_writes_the_file_that_local_processes_write(two_cores, tmp_path, capsys):
    """The last one: Ray Data lets go of its actors, and of both cores, when Python's garbage collector finds them."""
    (tmp_path / "photos").mkdir()
    images = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, pixels in enumerate(images.permute(0, 2, 3, 1).numpy()):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number:03}.png")
    (tmp_path / "photos" / "007.png").write_bytes(b"torn")
    settings = {"pretrain_epochs": 1, "finetune_epochs": 1, "num_prototypes": 8, "views": 1}
    detector = Elsa(preset="cpu", **settings).fit(images, [""] * 30)
    preprocessing = {"size": 32, "channels": 3, "resize": "stretch", "pixel_limit": 10_000_000}
    save_model(detector, tmp_path / "m", {"preprocessing": preprocessing})
    arguments = ["score", str(tmp_path / "m"), str(tmp_path / "photos"), "--device", "cpu", "--shard-size", "8"]
    assert run([*arguments, "--out", str(tmp_path / "local.csv"), "--workers", "1"]) == 0
    assert run([*arguments, "--out", str(tmp_path / "ray.csv"), "--engine", "ray"]) == 0
    assert (tmp_path / "ray.csv").read_bytes() == (tmp_path / "local.csv").read_bytes()
    assert "score 31/31" not in capsys.readouterr().err


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="pip install elsa\\[ray\\]"):
        connect()
