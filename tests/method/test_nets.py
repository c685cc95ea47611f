import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elsa.config import method_config
from elsa.inference import filled_up, fold_norms, project
from elsa.nets import ConvNorm, Norm, build_net, convolve_as_product
from elsa.seeds import generator

CONFIG = method_config("elsa+", "cpu")


def lived_in(net):
    """The net with statistics and scales as training leaves them, so that no norm is the identity."""
    g = generator(0, "norms")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_var):
                tensor.uniform_(0.5, 2, generator=g)
            for tensor in (module.bias.data, module.running_mean):
                tensor.normal_(0, 0.3, generator=g)
    return net.eval()


@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "stride", "padding", "side"),
    [(3, 7, 3, 1, 1, 11), (5, 7, 1, 2, 0, 11), (5, 7, 1, 2, 0, 12), (1, 2, 3, 2, 1, 13), (2, 3, 5, 3, 2, 17)],
)
def test_a_product_of_patches_is_the_convolution_and_has_its_gradients(
    channels, outputs, kernel, stride, padding, side
):
    x = torch.randn(2, channels, side, side, dtype=torch.float64, generator=generator(0, "x"), requires_grad=True)
    weight = torch.randn(outputs, channels, kernel, kernel, dtype=torch.float64, generator=generator(0, "w"))
    weight.requires_grad_()
    expected, got = F.conv2d(x, weight, None, stride, padding), convolve_as_product(x, weight, stride, padding)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=generator(0, "upstream"))
    for ours, theirs in zip(
        torch.autograd.grad(got, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_one_pass_norm_is_batch_norm_with_its_statistics_and_gradients():
    ours, theirs = Norm(5), nn.BatchNorm2d(5)
    for norm in (ours, theirs):
        norm.weight.data = torch.rand(5, generator=generator(0, "scale")) + 0.5
        norm.bias.data = torch.randn(5, generator=generator(0, "shift"))
    for step in range(2):
        x = 3 + torch.randn(2, 5, 7, 11, generator=generator(step, "x"))
        upstream = torch.randn(2, 5, 7, 11, generator=generator(step, "upstream"))
        results = []
        for norm, call in ((ours, ours.in_one_pass), (theirs, theirs)):
            given = x.clone().requires_grad_()
            y = call(given)
            results.append((y, *torch.autograd.grad(y, (given, norm.weight, norm.bias), upstream)))
        for mine, reference in zip(*results, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [("resnet18", "small"), ("resnet18", "large"), ("tiny", "auto")])
def test_folded_norms_change_nothing_but_the_last_digits(shape):
    net = lived_in(build_net(*shape, 3, 32, 4, generator(0, "w")))
    x = torch.rand(3, 3, 32, 32, generator=generator(0, "x"))
    raw, logits = net(x)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    folded = fold_norms(net, CONFIG)
    assert not any(isinstance(module, ConvNorm | nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(x)[0], raw, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded(x)[1], logits, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_strided_shortcut_as_a_product_is_the_folded_convolution():
    layer = lived_in(ConvNorm(5, 7, 1, 2, relu=False))
    folded = next(fold_norms(nn.Sequential(layer), CONFIG).children())
    x = torch.randn(2, 5, 11, 11, generator=generator(0, "x"))
    torch.testing.assert_close(folded._product(x), layer(x), rtol=1e-4, atol=1e-5)


def test_projections_in_bf16_are_close_to_those_in_fp32():
    net = lived_in(build_net("resnet18", "small", 3, 32, 4, generator(0, "w")))
    x = torch.rand(5, 3, 32, 32, generator=generator(0, "x"))
    exact = project(fold_norms(net, CONFIG), x, CONFIG)
    config = method_config("elsa+", "cpu", precision="bf16")
    close = project(fold_norms(net, config), x, config)
    assert close.dtype == torch.float32
    assert 0 < (close - exact).norm() / exact.norm() < 0.02


def test_projecting_in_batches_is_projecting_at_once(monkeypatch):
    net = fold_norms(lived_in(build_net("tiny", "auto", 3, 32, 4, generator(0, "w"))), CONFIG)
    x = torch.rand(11, 3, 32, 32, generator=generator(0, "x"))
    whole = project(net, x, CONFIG)
    monkeypatch.setattr("elsa.inference.PROJECTION_BATCH", 3)
    torch.testing.assert_close(project(net, x, CONFIG), whole, rtol=1e-5, atol=1e-6)


def test_batches_on_a_cpu_are_not_filled_up():
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    assert filled_up(images, 7) is images


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", [("resnet18", "small"), ("resnet18", "large"), ("tiny", "auto")])
def test_on_a_gpu_the_fused_kernels_compute_the_same(shape):
    net = lived_in(build_net(*shape, 3, 32, 4, generator(0, "w")))
    x = torch.rand(300, 3, 32, 32, generator=generator(0, "x"))
    exact, config = project(fold_norms(net, CONFIG), x, CONFIG), method_config("elsa+", "paper")
    net = net.to("cuda", memory_format=torch.channels_last)
    close = project(fold_norms(net, config), x.cuda(), config).cpu()
    assert (close - exact).norm() / exact.norm() < 0.02
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        trained_with = net(x.cuda().contiguous(memory_format=torch.channels_last))[0].float().cpu()
    assert (trained_with - exact).norm() / exact.norm() < 0.02
    images = torch.arange(3 * 64, dtype=torch.uint8, device="cuda").view(3, 1, 8, 8)
    assert filled_up(images, 7).shape == (7, 1, 8, 8)
    assert torch.equal(filled_up(images, 7)[:3], images)
