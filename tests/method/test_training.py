import math

import pytest
import torch
from torch import nn

from elsa.lars import Lars
from elsa.muon import Muon, orthogonalised
from elsa.nets import build_net
from elsa.seeds import fold, generator
from elsa.training import batches_per_epoch, build_optimizer, epoch_batches, warm_cosine


def test_warm_cosine_rises_linearly_then_falls_to_zero():
    shares = [warm_cosine(step, 100, 10) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == 1
    assert shares[10] == pytest.approx(1)
    assert shares[55] == pytest.approx(0.5)
    assert shares[100] == pytest.approx(0)
    assert shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True)


def test_a_schedule_of_nothing_but_warm_up_does_not_divide_by_zero():
    assert warm_cosine(4, 5, 5) == 1
    assert math.isfinite(warm_cosine(5, 5, 5))


def test_an_epoch_visits_each_image_at_most_once_in_batches_of_one_size():
    index = torch.arange(100, 123)
    batches = list(epoch_batches(index, 7, generator(0, "order")))
    assert [len(batch) for batch in batches] == [7, 7, 7]
    assert len(batches) == batches_per_epoch(23, 7)
    seen = torch.cat(batches)
    assert len(seen.unique()) == 21
    assert set(seen.tolist()) <= set(index.tolist())


def test_a_set_smaller_than_the_batch_is_one_batch():
    assert [len(b) for b in epoch_batches(torch.arange(5), 7, generator(0, "order"))] == [5]
    assert batches_per_epoch(5, 7) == 1


def test_seeds_differ_by_seed_purpose_and_step_and_repeat():
    seeds = {fold(0), fold(1), fold(0, "order"), fold(0, "draws"), fold(0, "order", 1), fold(0, "order", 11)}
    assert len(seeds) == 6
    assert fold(3, "order", 5) == fold(3, "order", 5)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert torch.equal(torch.rand(3, generator=generator(1, "a")), torch.rand(3, generator=generator(1, "a")))


def lars_by_hand(weights, grads_of, steps, lr, momentum, decay, trust):
    """One list of floats per layer, written from the formula."""
    buffers = [[0.0] * len(w) for w in weights]
    for step in range(steps):
        for w, v, g in zip(weights, buffers, grads_of(step), strict=True):
            norm_w, norm_g = math.sqrt(sum(x * x for x in w)), math.sqrt(sum(x * x for x in g))
            ratio = trust * norm_w / (norm_g + decay * norm_w + 1e-8) if norm_w and norm_g else 1
            for i in range(len(w)):
                v[i] = momentum * v[i] + ratio * (g[i] + decay * w[i])
                w[i] -= lr * v[i]
    return weights


def test_lars_matches_its_formula():
    sizes = (3, 5, 2)
    start = [torch.randn(n, dtype=torch.float64, generator=generator(n, "w")) for n in sizes]
    start[2].zero_()  # a layer that is still zero takes the plain step

    def grads(step):
        return [torch.randn(n, dtype=torch.float64, generator=generator(n, "g", step)) for n in sizes]

    layers = [nn.Parameter(w.clone()) for w in start]
    optimizer = Lars(layers, lr=0.1, momentum=0.9, weight_decay=0.01, trust=0.02)
    for step in range(4):
        for layer, grad in zip(layers, grads(step), strict=True):
            layer.grad = grad
        optimizer.step()
    expected = lars_by_hand(
        [w.tolist() for w in start], lambda step: [g.tolist() for g in grads(step)], 4, 0.1, 0.9, 0.01, 0.02
    )
    for layer, weights in zip(layers, expected, strict=True):
        assert layer.tolist() == pytest.approx(weights)


def test_a_lars_step_does_not_depend_on_the_scale_of_the_gradient():
    layers = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    layers[0].grad, layers[1].grad = torch.tensor([1.0, 2, 3]), torch.tensor([100.0, 200, 300])
    Lars(layers, lr=0.1).step()
    torch.testing.assert_close(layers[0].detach(), layers[1].detach())


@pytest.mark.parametrize(
    ("name", "kind"), [("lars", Lars), ("muon", Muon), ("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)]
)
def test_optimisers_are_what_they_are_called_and_lower_a_loss(name, kind):
    net = nn.Linear(3, 1)
    optimizer = build_optimizer(name, net, 0.1, 1e-6)
    assert isinstance(optimizer, kind)
    x = torch.randn(17, 3, generator=generator(0, "x"))
    losses = []
    for _ in range(20):
        loss = (net(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("encoder", "stem", "channels", "size"),
    [
        ("resnet18", "auto", 3, 32),
        ("resnet18", "auto", 1, 128),
        ("resnet18", "large", 3, 64),
        ("tiny", "auto", 1, 28),
        ("tiny", "auto", 3, 32),
        ("tiny", "auto", 4, 64),
        ("tiny", "auto", 3, 512),
    ],
)
def test_networks_take_any_size_and_number_of_channels(encoder, stem, channels, size):
    net = build_net(encoder, stem, channels, size, 4, generator(0, "weights")).eval()
    raw, logits = net(torch.rand(2, channels, size, size))
    assert raw.shape == (2, 128)
    assert logits.shape == (2, 4)


def test_resnet18_has_the_published_number_of_weights():
    # 11,689,512 in ImageNet form; less its 1000-class layer of 513,000
    net = build_net("resnet18", "large", 3, 224, 4, generator(0, "weights"))
    assert sum(p.numel() for p in net.backbone.parameters()) == 11_689_512 - 513_000


def test_the_small_stem_keeps_the_resolution_and_the_large_one_reduces_it_four_times():
    def side_before_the_stages(stem):
        net = build_net("resnet18", stem, 3, 64, 4, generator(0, "weights"))
        seen = []
        first_block = next(m for m in net.backbone if type(m).__name__ == "Block")
        first_block.register_forward_pre_hook(lambda _, x: seen.append(x[0].shape[2]))
        net(torch.rand(2, 3, 64, 64))
        return seen[0]

    assert side_before_the_stages("small") == side_before_the_stages("auto") == 64
    assert side_before_the_stages("large") == 16


def test_initial_weights_depend_on_the_generator_alone():
    def weights(seed):
        net = build_net("tiny", "auto", 3, 32, 4, generator(seed, "weights"))
        return torch.cat([p.flatten() for p in net.parameters()])

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_orthogonalised_matrices_keep_their_singular_vectors_and_have_singular_values_near_one():
    for rows, columns in ((5, 11), (11, 5), (7, 7)):
        matrices = torch.randn(3, rows, columns, dtype=torch.float64, generator=generator(rows, "m"))
        got = orthogonalised(matrices)
        assert got.shape == matrices.shape
        assert torch.linalg.svdvals(got).min() > 0.2
        assert torch.linalg.svdvals(got).max() < 1.3
        u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
        aligned = u.mT @ got @ vh.mT  # diagonal where the singular vectors are the same
        torch.testing.assert_close(aligned, torch.diag_embed(aligned.diagonal(dim1=1, dim2=2)))
        torch.testing.assert_close(orthogonalised(matrices * 1000), got)  # no matter how large the gradient


def muon_by_hand(w, grads, lr, decay):
    """Of one matrix, written from the definition with an exact orthogonalisation's stand-in."""
    buffer = torch.zeros_like(w)
    for grad in grads:
        buffer = 0.95 * buffer + 0.05 * grad
        nesterov = 0.05 * grad + 0.95 * buffer
        step = orthogonalised(nesterov.flatten(1)[None])[0].view_as(w)
        w = w * (1 - lr * decay) - lr * max(1, w.shape[0] / w[0].numel()) ** 0.5 * step
    return w


def test_a_muon_step_is_orthogonalised_nesterov_momentum_for_matrices_and_adam_for_vectors():
    shapes = [(7, 5), (7, 5), (11, 2), (3, 2, 3, 3), (5,)]
    start = [torch.randn(shape, dtype=torch.float64, generator=generator(i, "w")) for i, shape in enumerate(shapes)]
    grads = [
        [torch.randn(shape, dtype=torch.float64, generator=generator(i, "g", step)) for step in range(3)]
        for i, shape in enumerate(shapes)
    ]
    weights = [nn.Parameter(w.clone()) for w in start]
    weights[3].data = weights[3].data.contiguous(memory_format=torch.channels_last)
    optimizer = Muon(weights, lr=0.1, weight_decay=0.5)
    vector, mean, square = start[4].clone(), torch.zeros(5).double(), torch.zeros(5).double()
    for step in range(3):
        for w, of in zip(weights, grads, strict=True):
            w.grad = of[step].clone()
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * grads[4][step], 0.99 * square + 0.01 * grads[4][step] ** 2
        vector = vector - 0.06 * 0.1 * mean / (square.sqrt() + 1e-8)
    for i in range(4):
        torch.testing.assert_close(weights[i].detach(), muon_by_hand(start[i], grads[i], 0.1, 0.5))
    torch.testing.assert_close(weights[4].detach(), vector)
