"""What the detectors with a network of their own share, and that a GPU will be able to compile their steps."""

import dataclasses
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from elsa.detectors import deep_sad, goad, ss_dgm, ssad
from elsa.detectors.contrastive import CSIDetector
from elsa.detectors.deep_sad import Autoencoder, DeepSADDetector, LeNet
from elsa.detectors.goad import GOADDetector, WideResNet
from elsa.detectors.networks import (
    autocast,
    each_batch,
    initialise,
    refuse_below,
    refuse_unless_positive,
    score_batches,
    train_epochs,
)
from elsa.detectors.ss_dgm import M2, SSDGMDetector
from elsa.errors import UserError
from elsa.progress import silent

HALVES = (math.log(0.5), math.log(0.5))
CPU = torch.device("cpu")
IMAGES = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, -1, 0, -1, 1, 0], dtype=torch.int8)
STEPS = {
    "autoencoder": lambda: (deep_sad.reconstruction_loss, Autoencoder(LeNet(3, 16, 16), 3), IMAGES),
    "deep-sad": lambda: (deep_sad.step_loss, LeNet(3, 16, 16), IMAGES, LABELS, torch.ones(128), 1.0),
    "deep-sad score": lambda: (deep_sad.squared_distance, LeNet(3, 16, 16), torch.ones(128), IMAGES),
    "goad": lambda: (goad.step_loss, WideResNet(3, 1, 1), IMAGES, 1.0, 0.1, 10.0),
    "goad score": lambda: (goad.score_views, WideResNet(3, 1, 1), torch.ones(72, 64), IMAGES),
    "ss-dgm": lambda: (
        ss_dgm.step_loss, M2((3, 16, 16), 5, 3), IMAGES, LABELS, torch.zeros(2, 7, 3), HALVES, 0.1,
    ),
    "ss-dgm score": lambda: (ss_dgm.log_odds, M2((3, 16, 16), 5, 3), IMAGES),
}  # fmt: skip


@pytest.fixture
def no_second_compilation():
    """Each costs 15 to 20 s on a GPU, and after eight of them a function is no longer compiled at all."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch.compiler.reset()


@pytest.mark.usefixtures("no_second_compilation")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_graph_that_serves_the_networks_of_all_cells(name):
    compiled = None
    for seed in (0, 1):
        torch.manual_seed(seed)
        function, *given = STEPS[name]()
        given[0].eval()
        compiled = compiled or torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(*given), function(*given))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_in_bf16_gives_about_the_same_in_fp32_with_gradients(name):
    torch.manual_seed(0)
    function, net, *given = STEPS[name]()
    net.eval()
    exact = function(net, *given)
    with autocast("bf16", CPU):
        close = function(net, *given)
    assert close.dtype == torch.float32
    # a score of hundreds made of squared distances keeps two digits
    torch.testing.assert_close(close, exact, rtol=0.05, atol=0.05 * exact.abs().max().item())
    close.sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())


def test_precision_auto_is_fp32_on_a_cpu():
    with autocast("auto", CPU):
        assert not torch.is_autocast_enabled("cpu")
    with autocast("bf16", CPU):
        assert torch.is_autocast_enabled("cpu")
    with pytest.raises(UserError, match="precision='fp8'"):
        autocast("fp8", CPU)


def test_weights_come_from_the_generator_alone_within_their_bound():
    def fresh(seed, outside):
        torch.manual_seed(outside)
        net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(7, 11))
        initialise(net, torch.Generator().manual_seed(seed))
        return net

    first, same, other = fresh(0, 1), fresh(0, 2), fresh(1, 1)
    for a, b, c in zip(first.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert 0.9 / math.sqrt(27) < first[0].weight.abs().max() <= 1 / math.sqrt(27)
    assert first[1].bias.abs().max() <= 1 / math.sqrt(7)


def test_epochs_see_every_batch_with_the_epochs_randomness_and_report_the_mean_loss():
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    seen, reports, rates, modes = [], [], [], []

    def inputs_of(index_B, draws_of):
        seen.append((index_B.tolist(), torch.rand(1, generator=draws_of).item()))
        rates.append(optimizer.param_groups[0]["lr"])
        return (torch.tensor(float(len(seen))),)

    def loss(net, number, offset):
        modes.append(net.training)
        return net.weight.sum() * 0 + number + offset

    index = torch.arange(10, 24)
    train_epochs(
        "stage", net, optimizer, loss, (0.5,), inputs_of, index, epochs=3, batch=5, seed=4, slower_from=1,
        norms_fixed_from=2, views=72, progress=lambda *report: reports.append(report),
    )  # fmt: skip
    assert [report[:3] for report in reports] == [("stage", 1, 3), ("stage", 2, 3), ("stage", 3, 3)]
    assert [report[3]["loss"] for report in reports] == [2.0, 4.0, 6.0]
    assert modes == [True] * 4 + [False] * 2
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.1])
    assert len({draw for _, draw in seen}) == 6  # the generator goes on within an epoch and is another in the next
    assert len({tuple(places) for places, _ in seen}) == 6
    assert all(set(places) <= set(index.tolist()) and len(places) == 5 for places, _ in seen)


def test_batches_are_put_together_in_order():
    index = torch.tensor([6, 0, 3, 3, 1])
    sums = each_batch(IMAGES, index, 2, CPU, lambda batch: batch.float().sum(dim=(1, 2, 3)))
    torch.testing.assert_close(sums, IMAGES[index].float().sum(dim=(1, 2, 3)))


def test_scores_are_doubles_on_the_cpu_for_any_number_of_images():
    def score(images):
        return images.float().mean(dim=(1, 2, 3))

    reports = []
    scores = score_batches(IMAGES, (3, 16, 16), 3, CPU, score, lambda *report: reports.append(report[:3]))
    torch.testing.assert_close(scores, score(IMAGES).double())
    assert [report[1] for report in reports] == [3, 6, 7]
    assert score_batches(IMAGES[:0], (3, 16, 16), 3, CPU, score, silent).shape == (0,)
    with pytest.raises(UserError, match=r"\[3, 16, 16\] given, the model was fitted on \[1, 16, 16\]"):
        score_batches(IMAGES, (1, 16, 16), 3, CPU, score, silent)


def test_bounds_of_settings():
    assert refuse_below(SimpleNamespace(a=0), 0, ["a"]) is None
    for value in (-0.1, math.nan, math.inf):
        with pytest.raises(UserError, match="a=.*at least 0"):
            refuse_below(SimpleNamespace(a=value), 0, ["a"])
    for value in (0, math.nan, math.inf):
        with pytest.raises(UserError, match="b=.*above 0"):
            refuse_unless_positive(SimpleNamespace(b=value), ["b"])


class Stored:
    """Images that lie on a disk: what elsa.data.shards.Shards offers, and no more."""

    def __init__(self, images):
        self.images, self.shape = images, images.shape

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


@pytest.mark.parametrize(
    ("detector_class", "settings"),
    [
        (DeepSADDetector, {"autoencoder_epochs": 1, "epochs": 1}),
        (GOADDetector, {"epochs": 0, "width": 1}),
        (SSDGMDetector, {"epochs": 1, "hidden": 5}),
        (CSIDetector, {"preset": "cpu", "pretrain_epochs": 1, "views": 1}),
    ],
)
def test_images_in_shards_are_as_good_as_a_tensor(detector_class, settings):
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    labels = ["anomaly" if n < 4 else "normal" if n < 20 else "" for n in range(40)]
    first, second = (detector_class(**settings).fit(x, labels).anomaly_score(x) for x in (images, Stored(images)))
    assert torch.equal(first, second)


def test_every_setting_is_read():
    """A field that nothing reads would promise what it does not keep."""
    for module, config in (
        (deep_sad, deep_sad.DeepSADConfig), (goad, goad.GOADConfig), (ss_dgm, ss_dgm.SSDGMConfig),
        (ssad, ssad.SSADConfig),
    ):  # fmt: skip
        text = inspect.getsource(module).replace(inspect.getsource(config), "")
        for field in dataclasses.fields(config):
            assert f"config.{field.name}" in text, field.name
