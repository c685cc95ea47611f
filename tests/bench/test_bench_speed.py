import json
import time
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from elsa.bench.plain import finetune_step, loader, score_batch, train_step, weak_view
from elsa.bench.speed import Measured, measure_speed, measure_time_to, views_flops, write_speed
from elsa.bench.speed_plot import STAGES, write_speed_plot
from elsa.bench.time_to import Learning, _Clock
from elsa.energy import energy, ensemble_of_projections
from elsa.losses import energy_loss, nt_xent, rotation_loss
from elsa.nets import build_net
from elsa.seeds import generator

SETTINGS = {"preset": "cpu", "num_prototypes": 8, "pretrain_batch": 4, "finetune_batch": 4, "views": 2}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_the_plain_step_computes_the_loss_that_ours_does():
    net = build_net("tiny", "auto", 3, 32, 4, generator(0, "w"))
    views = torch.rand(5, 8, 3, 32, 32, generator=generator(0, "x"))
    raw, logits = net(views.transpose(0, 1).flatten(0, 1))
    rotation = torch.arange(4).repeat_interleave(5).repeat(2)
    ours = nt_xent(F.normalize(raw, dim=1), 0.5) + F.cross_entropy(logits, rotation)
    theirs = train_step(net, views, 4, 0.5, torch.optim.SGD(net.parameters(), 0.0))
    torch.testing.assert_close(theirs, ours.detach(), rtol=1e-5, atol=1e-5)


def test_the_plain_score_is_the_ensembled_energy():
    net = build_net("tiny", "auto", 3, 32, 4, generator(0, "w")).eval()
    prototypes = F.normalize(torch.randn(8, 128, generator=generator(0, "p")), dim=1)
    views = torch.rand(3, 2 * 4, 3, 32, 32, generator=generator(0, "x"))
    with torch.no_grad():
        raw = net(views.flatten(0, 1))[0].view(3, 2, 4, -1).permute(1, 2, 0, 3)
    expected = ensemble_of_projections(raw, prototypes, 0.5)
    torch.testing.assert_close(score_batch(net, views, prototypes, 4, 0.5), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_plain_loader_makes_views_of_every_rotation(mode):
    channels = 3 if mode == "RGB" else 1
    pixels = np.random.default_rng(0).integers(0, 256, (6, channels, 16, 16), dtype=np.uint8)
    batch = next(iter(loader(pixels, 2, 4, 0.54, 3, workers=0)))
    assert batch.shape == (3, 8, channels, 16, 16)
    assert batch.min() >= 0
    assert batch.max() <= 1
    assert weak_view(Image.new(mode, (16, 16)), 0.54, np.random.default_rng(0)).mode == mode


def test_operations_of_a_view_are_those_that_were_published():
    # measured.md has 3.34 GFLOP for forward and backward of ResNet-18 at 32 px
    forward, both = views_flops(build_net("resnet18", "auto", 3, 32, 4, generator(0, "w")), 3, 32)
    assert both == pytest.approx(3.34e9, rel=0.01)
    assert forward == pytest.approx(both / 3, rel=0.01)


@pytest.mark.slow
def test_a_run_measures_every_stage_and_writes_its_lines_under_one_id(tmp_path):
    figures = measure_speed("cpu", SETTINGS, 32, 3, turns=1, seconds=0.01)
    named = {(figure.what, figure.variant): figure for figure in figures}
    for what in ("augment", "pretrain", "score"):
        ratio = named[what, "elsa"].value / named[what, "plain"].value
        assert named[what, "elsa / plain"].value == pytest.approx(ratio)
    assert named["finetune", "elsa"].value > 0
    assert named["limit", "score"].value > 2 * named["limit", "train"].value
    printed = write_speed(figures, tmp_path / "speed.jsonl", "cpu", SETTINGS)
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert len(lines) == len(figures) == len(printed)
    assert len({line["run"] for line in lines}) == 1
    assert {"what", "variant", "value", "unit", "card", "commit", "command"} <= set(lines[0])
    assert write_speed([Measured("a", "b", 1.0, 1.0, 1.0, "x")], tmp_path / "speed.jsonl", "cpu", {})[0].startswith(
        "a, b"
    )


def test_elsa_bench_is_the_same_command_and_errs_in_one_line(capsys):
    from elsa.cli import run

    assert run(["bench", "run", "no-such-plan", "--cifar10", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: argument PLAN: invalid choice: 'no-such-plan'")
    assert error.count("\n") == 1
    assert run(["bench"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit, match="0"):
        run(["bench", "speed", "--help"])
    assert "--turns" in capsys.readouterr().out


def test_the_plain_fine_tuning_step_computes_the_loss_that_ours_does():
    net = build_net("tiny", "auto", 3, 32, 4, generator(0, "w"))
    prototypes = F.normalize(torch.randn(11, 128, generator=generator(0, "p")), dim=1)
    views = torch.rand(5, 8, 3, 32, 32, generator=generator(0, "x"))
    labels = torch.tensor([-1, 0, 1, 0, -1])
    raw, logits = net(views.transpose(0, 1).flatten(0, 1))
    label_N = labels.repeat(8)
    rotation = torch.arange(4).repeat_interleave(5).repeat(2)
    ours = energy_loss(energy(F.normalize(raw, dim=1), prototypes, 0.5), label_N, 11, 0.5)
    ours = ours + rotation_loss(logits, rotation, label_N)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    theirs = finetune_step(net, views, labels, prototypes, 4, 0.5, optimizer)
    torch.testing.assert_close(theirs, ours.detach(), rtol=1e-5, atol=1e-5)


def test_the_time_to_an_auroc_is_that_of_the_first_epoch_there():
    learning = Learning([1.0, 2.0, 3.0, 4.0], [60.0, 91.0, 89.0, 93.0])
    assert learning.seconds_to(90.0) == 2.0
    assert learning.seconds_to(93.0) == 4.0
    assert learning.seconds_to(95.0) is None


def test_looking_is_not_counted_as_learning():
    class Slow:
        auroc: ClassVar = []

        def __call__(self, epoch, net, prototypes):
            time.sleep(0.2)

    clock = _Clock(Slow())
    clock(1, None, torch.empty(0))  # pre-training: there is nothing to look with
    for epoch in (1, 2):
        clock(epoch, None, torch.ones(1))
    assert len(clock.marks) == 2
    assert clock.marks[1] < 0.15


@pytest.mark.slow
def test_both_loops_learn_the_garments_and_their_times_are_compared():
    figures = measure_time_to("cpu", 0, target=51.0, pretrain_epochs=0, finetune_epochs=1, num_prototypes=8)
    named = {figure.variant: figure for figure in figures}
    assert set(named) == {"elsa", "plain", "plain / elsa"}
    assert named["plain / elsa"].value == pytest.approx(named["plain"].value / named["elsa"].value)
    assert {figure.what for figure in figures} == {"time to AUROC 51"}


def test_the_plot_shows_every_stage_and_the_limits(tmp_path):
    figures = [Measured(what, "elsa", 100.0, 90.0, 120.0, "views/s") for what in STAGES]
    figures += [Measured(what, "plain", 10.0, 9.0, 12.0, "views/s") for what in ("augment", "pretrain", "score")]
    figures += [Measured("limit", what, 1000.0, 900.0, 1100.0, "views/s") for what in ("train", "score")]
    assert write_speed_plot(figures, tmp_path / "speed.svg", "cpu") == f"plot: {tmp_path / 'speed.svg'}"
    drawn = (tmp_path / "speed.svg").read_text()
    assert drawn.startswith("<?xml")
    with pytest.raises(KeyError):  # no limit measured: nothing is drawn in its place
        write_speed_plot(figures[:-2], tmp_path / "none.svg", "cpu")
    assert not (tmp_path / "none.svg").exists()
