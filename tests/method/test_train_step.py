import pytest
import torch
from torch import nn

from elsa.lars import Lars
from elsa.muon import Muon
from elsa.seeds import generator
from elsa.training import EAGER_STEPS, TrainStep, build_optimizer, set_rate

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # the compiler's own
]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
OPTIMIZERS = ["lars", "sgd", "adam", "muon"]
STEPS = EAGER_STEPS + 4  # on a GPU: eager, then recorded, then replayed


def network(device):
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 7))
    with torch.no_grad():
        for i, weight in enumerate(net.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator(i, "weights")) * 0.1)
    return net.to(device, memory_format=torch.channels_last)


def square_loss(net, x, target, scale):
    return scale * (net(x) - target).square().mean()


def batch(step, device):
    shapes = ((11, 3, 8, 8), (11, 7))
    return [torch.randn(shape, generator=generator(step, "batch", i)).to(device) for i, shape in enumerate(shapes)]


def rate(step):
    return 0.01 * (1 + step % 3)


def by_hand(name):
    """Losses and weights of a loop as one would write it, on the CPU."""
    net = network("cpu")
    optimizer = {
        "lars": lambda p: Lars(p, lr=0.01, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        "muon": lambda p: Muon(p, lr=0.01, weight_decay=0.1),
    }[name](list(net.parameters()))
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = square_loss(net, *batch(step, "cpu"), 2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("device", DEVICES)
def test_steps_give_the_losses_and_weights_of_a_plain_loop(name, device):
    net = network(device)
    optimizer = build_optimizer(name, net, 0.5, 0.1)
    update, losses = TrainStep(square_loss, net, optimizer, 2.0), []
    for step in range(STEPS):
        set_rate(optimizer, rate(step))
        losses.append(update(*batch(step, device)).item())
    expected, weights = by_hand(name)
    loose = {"rtol": 2e-2, "atol": 2e-3} if device == "cuda" else {"rtol": 1e-5, "atol": 1e-6}  # Muon's bf16
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **loose)
    for key, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor.cpu(), weights[key], **loose)
    assert len(set(losses)) == STEPS  # each batch had a loss of its own: none was answered from memory


def test_the_loss_comes_back_without_its_graph():
    net = network("cpu")
    update = TrainStep(square_loss, net, build_optimizer("sgd", net, 0.1, 0.0), 1.0)
    assert not update(*batch(0, "cpu")).requires_grad
