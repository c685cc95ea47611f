import math

import pytest
import torch
import torch.nn.functional as F

from elsa.detectors import goad
from elsa.detectors.goad import (
    NUM_TRANSFORMATIONS,
    GOADConfig,
    GOADDetector,
    WideBlock,
    WideResNet,
    centre_triplet_loss,
    embed_views,
    goad_score,
    shifted,
    squared_distances,
    step_loss,
    transformations,
)
from elsa.detectors.inputs import hold_out
from elsa.errors import UserError

B, T, D = 5, 7, 3


def embeddings(number=B, seed=0):
    return torch.randn(number, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(number, seed=0, side=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number, 3, side, side), dtype=torch.uint8, generator=generator)


def distance(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def test_distances_are_of_each_view_to_each_centre():
    z, centre = embeddings(), embeddings(1, 1)[0]
    by_hand = [[[distance(view, c) for c in centre.tolist()] for view in image] for image in z.tolist()]
    torch.testing.assert_close(squared_distances(z, centre), torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.parametrize("margin", [0.0, 1.0, 20.0])
def test_the_triplet_loss_is_its_definition(margin):
    z = embeddings().tolist()
    centres = [[sum(image[t][d] for image in z) / B for d in range(D)] for t in range(T)]
    total = 0.0
    for image in z:
        for t, view in enumerate(image):
            nearest = min(distance(view, centre) for other, centre in enumerate(centres) if other != t)
            total += max(0.0, distance(view, centres[t]) + margin - nearest)
    assert centre_triplet_loss(embeddings(), margin).item() == pytest.approx(total / (B * T))


def test_views_at_their_own_far_centres_cost_nothing_and_views_all_alike_the_margin():
    apart = (10 * torch.arange(T, dtype=torch.float64))[:, None].expand(T, D).expand(B, T, D)
    assert centre_triplet_loss(apart, 1.0) == 0
    assert centre_triplet_loss(torch.ones(B, T, D), 1.7).item() == pytest.approx(1.7)


def test_the_gradient_of_the_triplet_loss_is_right():
    z = embeddings().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: centre_triplet_loss(z, 1.0), z)


def test_the_score_is_minus_the_summed_log_probability_of_the_right_transformation():
    z, centre = embeddings(), embeddings(1, 1)[0]
    for image, score in zip(z.tolist(), goad_score(z, centre).tolist(), strict=True):
        total = 0.0
        for t, view in enumerate(image):
            shares = [math.exp(-distance(view, c)) for c in centre.tolist()]
            total -= math.log(shares[t] / sum(shares))
        assert score == pytest.approx(total)


def test_an_image_that_says_nothing_scores_t_log_t():
    assert goad_score(torch.zeros(2, T, D), torch.zeros(T, D)).tolist() == pytest.approx([T * math.log(T)] * 2)


def test_distances_far_beyond_exp_still_score():
    scores = goad_score(1e3 * embeddings().float(), 1e3 * embeddings(1, 1)[0].float())
    assert scores.isfinite().all()
    assert (scores > 0).all()


def test_a_shift_mirrors_what_it_leaves_empty():
    x = torch.arange(1.0, 5.0).view(1, 1, 1, 4)
    assert shifted(x, 0, 1).flatten().tolist() == [1, 1, 2, 3]
    assert shifted(x, 0, -2).flatten().tolist() == [3, 4, 4, 3]
    assert shifted(x.transpose(2, 3), 2, 0).flatten().tolist() == [2, 1, 1, 2]
    assert torch.equal(shifted(x, 0, 0), x)


def test_there_are_72_different_transformations_and_the_first_is_none():
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    views = transformations(x)
    assert views.shape == (2, 72, 3, 32, 32)
    assert NUM_TRANSFORMATIONS == 72
    assert len({tuple(view.flatten().tolist()) for view in views[0]}) == 72
    unshifted = 4 * (1 * 3 + 1)  # the middle of the nine shifts
    assert torch.equal(views[:, unshifted], x)
    assert torch.equal(views[:, unshifted + 1], torch.rot90(x, 1, (2, 3)))
    assert torch.equal(views[:, 36 + unshifted], x.flip(3))
    assert torch.equal(views[:, 0, :, :24, :24], x[:, :, 8:, 8:])  # up and left by a quarter
    assert torch.equal(views[:, 4 * (2 * 3 + 1), :, 8:], x[:, :, :24])  # down


def test_the_net_is_wide_resnet_10_4():
    net = WideResNet(3, GOADConfig().blocks, GOADConfig().width)
    convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    # 10 layers: a stem, six 3x3 convolutions, three shortcuts that do not count, and the linear one
    assert [tuple(c.weight.shape[:2]) for c in convolutions if c.kernel_size == (3, 3)] == [
        (16, 3), (64, 16), (64, 64), (128, 64), (128, 128), (256, 128), (256, 256),
    ]  # fmt: skip
    assert sum(c.kernel_size == (1, 1) for c in convolutions) == 3
    z, logits = net(torch.rand(2, 3, 32, 32))
    assert z.shape == (2, 256)
    assert logits.shape == (2, 72)


def test_the_published_block_has_nothing_between_its_convolutions():
    published, wide = WideBlock(5, 7, 2, inner_norm=False).eval(), WideBlock(5, 7, 2, inner_norm=True).eval()
    x = torch.randn(3, 5, 8, 8, generator=torch.Generator().manual_seed(0))
    y = F.relu(F.batch_norm(x, torch.zeros(5), torch.ones(5)))
    for block in (published, wide):
        inner = block.conv1(y)
        if block is wide:
            inner = F.relu(F.batch_norm(inner, torch.zeros(7), torch.ones(7)))
        torch.testing.assert_close(block(x), block.shortcut(y) + block.conv2(inner))


def test_batch_norm_keeps_the_statistics_of_the_first_epoch_as_published():
    def statistics(**settings):
        detector = GOADDetector(width=1, batch=8, seed=2, **settings).fit(images(30), [""] * 30)
        return detector.net_.backbone[1].norm1.running_mean

    first = statistics(epochs=1)
    assert torch.equal(statistics(epochs=3), first)
    assert not torch.equal(statistics(epochs=3, norms_fixed_from=3), first)


def test_the_loss_of_a_step_adds_its_three_parts():
    net = WideResNet(3, 1, 1).eval()
    z = embed_views(net, images(3))
    logits = net.linear(z).flatten(0, 1)
    right = torch.arange(72).repeat(3)
    expected = F.cross_entropy(logits, right) + 0.3 * centre_triplet_loss(z, 2.0) + 7 * z.square().mean()
    torch.testing.assert_close(step_loss(net, images(3), 2.0, 0.3, 7.0), expected)


def test_each_image_keeps_its_own_72_embeddings():
    net = WideResNet(3, 1, 1).eval()
    torch.testing.assert_close(embed_views(net, images(3))[1], embed_views(net, images(3)[1:2])[0])


def test_centres_are_the_means_of_training_images_and_labelled_anomalies_do_not_count(monkeypatch):
    monkeypatch.setattr(goad, "AT_ONCE", 7)
    labels = ["anomaly" if n % 5 == 0 else "" for n in range(30)]
    detector = GOADDetector(epochs=0, width=1, seed=2).fit(images(30), labels)
    train = hold_out(torch.tensor([n for n in range(30) if n % 5]), 2)[0]
    with torch.no_grad():
        torch.testing.assert_close(detector.centre_TD_, embed_views(detector.net_, images(30)[train]).mean(dim=0))
    changed = images(30)
    changed[::5] = 255 - changed[::5]
    again = GOADDetector(epochs=1, batch=8, width=1, seed=2).fit(changed, labels)
    before = GOADDetector(epochs=1, batch=8, width=1, seed=2).fit(images(30), labels)
    assert torch.equal(again.anomaly_score(images(3, 1)), before.anomaly_score(images(3, 1)))


def test_it_learns_to_recognise_transformations():
    """An image with an up and a down, a left and a right; noise of the same colours has none of them."""
    generator = torch.Generator().manual_seed(0)
    ramp = torch.arange(8).view(1, 1, 8, 1) * 18 + torch.arange(8).view(1, 1, 1, 8) * 9
    with_sides = (ramp + torch.randint(0, 20, (48, 3, 8, 8), generator=generator)).to(torch.uint8)
    detector = GOADDetector(epochs=6, width=1, lr=1e-2, norm_weight=0.0).fit(with_sides[:40], [""] * 40)
    normal = detector.anomaly_score(with_sides[40:])
    shuffled = with_sides[40:].flatten(2)[:, :, torch.randperm(64, generator=generator)].unflatten(2, (8, 8))
    assert normal.max() < detector.anomaly_score(shuffled).min()
    assert normal.median() < 0.8 * 72 * math.log(72)


@pytest.mark.parametrize("setting", [{"width": 0}, {"margin": -1.0}, {"lr": 0.0}, {"epoch": 3}, {"inner_norm": 2}])
def test_settings_that_mean_nothing_are_refused(setting):
    with pytest.raises(UserError, match=next(iter(setting))):
        GOADDetector(**setting)


def test_oblong_images_are_refused():
    with pytest.raises(UserError, match="12x8 px given; goad turns images by 90 degrees"):
        GOADDetector().fit(torch.zeros(40, 3, 8, 12, dtype=torch.uint8), [""] * 40)
