"""Heat maps show where the score comes from, whatever made it; and what a score is held against is found."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from elsa.detectors import build
from elsa.elsa import Elsa
from elsa.encoders import Encoder
from elsa.head import ElsaHead
from elsa.inference import fold_norms
from elsa.mobilenet import FEATURES, MobileNetV2
from elsa.trust import explain as module
from elsa.trust.explain import (
    Known,
    blurred,
    both,
    central,
    explain,
    falls_without,
    heat_map,
    know,
    last_map,
    most_telling,
    occlusion,
    places_left_out,
    plain_score,
    space_of,
    weights_without,
    windows,
)

B, C, H, W = 2, 5, 3, 7


def photos(count, side=32, seed=0):
    """Grey noise with a soft disc; the images of one kind."""
    noise = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    disc = 90 * ((y - side / 2) ** 2 + (x - side / 2) ** 2 < (side / 4) ** 2)
    pixels = 60 + disc + torch.randint(0, 25, (count, 1, side, side), generator=noise)
    return pixels.expand(-1, 3, -1, -1).to(torch.uint8).contiguous()


def stained(images, top=4, left=20, side=8):
    """The same images with a bright red square."""
    images = images.clone()
    images[:, :, top : top + side, left : left + side] = torch.tensor([250, 20, 20], dtype=torch.uint8)[:, None, None]
    return images


def redness(images):
    """A score of known origin: how much red there is."""
    return (images[:, 0].double() - images[:, 2].double()).clamp(min=0).mean(dim=(1, 2))


@pytest.fixture(scope="module")
def head():
    """A head on a MobileNetV2 whose random weights let an image make a difference."""
    net, weights = MobileNetV2().eval().requires_grad_(False), torch.Generator().manual_seed(0)
    for value in net.state_dict().values():
        if value.ndim == 4:
            value.normal_(0, (2 / value[0].numel()) ** 0.5, generator=weights)
    encoder = Encoder("mobilenet_v2", net, "random.pth", "0" * 64)
    images = torch.cat([photos(40), stained(photos(8, seed=1))])
    return ElsaHead(encoder=encoder, size=64, num_prototypes=13).fit(images, [""] * 40 + ["anomaly"] * 8)


@pytest.fixture(scope="module")
def scratch():
    settings = {"pretrain_epochs": 1, "finetune_epochs": 1, "num_prototypes": 11, "views": 2}
    return build("elsa+", encoder="tiny", preset="cpu", **settings).fit(photos(24), [""] * 24)


def test_weights_without_a_place_sum_to_one_and_leave_it_out():
    kept = weights_without(H, W, 0.7)
    torch.testing.assert_close(kept.sum(dim=1), torch.ones(H * W).double())
    assert kept.diagonal().abs().max() == 0
    assert (kept >= 0).all()
    corner = kept[0].view(H, W)
    assert corner[0, 1] < corner[1, 1] < corner[2, 6]  # the farther, the more of it stays


def test_falls_without_is_what_leaving_each_place_out_by_hand_gives():
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(B, C, H, W, generator=generator, dtype=torch.float64)
    direction = torch.randn(C, generator=generator, dtype=torch.float64)

    def score(z):
        return (z @ direction).square()

    found = falls_without(made, made.mean(dim=(2, 3)), score, spread=0.01)  # so narrow that a place goes alone
    for b in range(B):
        for y in range(H):
            for x in range(W):
                rest = [made[b, :, i, j] for i in range(H) for j in range(W) if (i, j) != (y, x)]
                without = torch.stack(rest).mean(dim=0)
                by_hand = score(made[b].mean(dim=(1, 2))[None]) - score(without[None])
                torch.testing.assert_close(found[b, y, x], by_hand[0])


def test_a_place_is_left_out_with_its_neighbours_and_the_rest_weighs_one():
    made = torch.randn(1, C, H, W, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = weights_without(H, W, 1.3)
    found = falls_without(made, made.mean(dim=(2, 3)), lambda z: z[:, 0], spread=1.3)
    for p in range(H * W):
        without = sum(float(kept[p, q]) * float(made[0, 0].flatten()[q]) for q in range(H * W))
        assert float(found.flatten()[p]) == pytest.approx(float(made[0, 0].mean()) - without)


def test_the_place_that_makes_the_score_is_the_hottest():
    made = torch.zeros(B, C, H, W)
    made[0, 2, 1, 4], made[1, 2, 2, 0] = 9.0, 9.0
    found = falls_without(made, made.mean(dim=(2, 3)), lambda z: z[:, 2])
    assert found[0].argmax() == 1 * W + 4
    assert found[1].argmax() == 2 * W + 0


class EndsInAMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, C, 3, padding=1)

    def forward(self, x):
        return self.body(x).mean(dim=(2, 3))


class EndsInALayer(EndsInAMean):
    def __init__(self):
        super().__init__()
        self.top = nn.Linear(C, C)

    def forward(self, x):
        return self.top(super().forward(x))


@torch.no_grad()
def test_a_feature_map_is_found_where_the_output_is_its_mean_and_nowhere_else():
    x = torch.randn(B, 3, H, W, generator=torch.Generator().manual_seed(0))
    net = EndsInAMean()
    made, vectors = last_map(net, x)
    torch.testing.assert_close(made, net.body(x))
    torch.testing.assert_close(vectors, net(x))
    assert last_map(EndsInALayer(), x)[0] is None
    assert last_map(nn.Flatten(), x)[0] is None
    assert not net.body._forward_hooks  # nothing is left hanging on the network


@torch.no_grad()
def test_the_feature_map_of_a_mobilenet_is_its_last(head):
    x = torch.randn(B, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    for net in (head.encoder.net, head.encoder.inference_net):
        made, _ = last_map(net, x)
        assert made.shape == (B, FEATURES, 2, 3)


def test_windows_cover_every_pixel_evenly():
    for side in (7, 28, 31, 224):
        found = windows(side, 7, 0.3)
        covered = np.zeros(side, int)
        for one in found:
            covered[one] += 1
        assert covered.min() >= 1
        assert len({one.stop - one.start for one in found}) == 1
        assert (found[0].start, found[-1].stop) == (0, side)


def test_occlusion_points_at_what_the_score_is_made_of_and_batches_agree():
    images = stained(photos(3))
    found = occlusion(redness, images)
    assert found.shape == (3, 32, 32)
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[4:12, 20:28] = True
    assert (found[:, inside].mean(dim=1) > 3 * found[:, ~inside].mean(dim=1)).all()
    assert inside.flatten()[found.flatten(1).argmax(dim=1)].all()
    torch.testing.assert_close(occlusion(redness, images[1:2])[0], found[1])
    assert torch.equal(images, stained(photos(3)))  # the images themselves are untouched


def test_occlusion_is_signed_a_place_that_speaks_for_normal_is_below_zero():
    found = occlusion(lambda images: -redness(images), stained(photos(1)))
    assert found[0, 8, 24] < 0


def test_blurring_keeps_the_large_and_takes_the_small():
    images = stained(photos(1), side=2)
    assert (blurred(images).float().mean() - images.float().mean()).abs() < 2
    assert blurred(images)[0, 0].max() < 200


@pytest.mark.parametrize("name", ["head", "scratch"])
def test_a_heat_map_has_the_shape_of_the_images_and_does_not_depend_on_the_batch(name, request):
    detector = request.getfixturevalue(name)
    images = stained(photos(module.AT_ONCE + 3))
    found = heat_map(detector, images)
    assert found.shape == (len(images), 32, 32)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    alone, unit = heat_map(detector, images[-1:])[0], found[-1].std()
    torch.testing.assert_close(alone / unit, found[-1] / unit, rtol=0.1, atol=0.1)
    assert heat_map(detector, images[:0]).shape == (0, 32, 32)


def test_a_head_that_looks_at_the_flip_too_flips_its_map_back(head):
    image = stained(photos(1))
    found, mirrored = heat_map(head, image)[0], heat_map(head, image.flip(3))[0]
    unit = found.std()
    torch.testing.assert_close(mirrored / unit, found.flip(1) / unit, rtol=0.02, atol=0.02)


def test_the_falls_of_a_head_are_those_of_its_own_score(head):
    """Against the definition, with one image and one place left out by hand."""
    image = stained(photos(1))
    seen = {}

    def read(map_BCHW, vectors_BD, score):
        seen["vectors"], seen["score"] = vectors_BD, score(vectors_BD)
        return falls_without(map_BCHW, vectors_BD, score)

    original, module.falls_without = module.falls_without, read
    try:
        heat_map(head, image)
    finally:
        module.falls_without = original
    torch.testing.assert_close(seen["score"], head.anomaly_score(image), rtol=1e-4, atol=1e-3)


def test_a_head_with_an_encoder_that_cannot_be_asked_is_asked_by_occlusion(head, monkeypatch):
    monkeypatch.setattr(module, "last_map", lambda net, x: (None, net(x)))
    monkeypatch.setattr(module, "CELLS", 2)
    image = stained(photos(1))
    torch.testing.assert_close(heat_map(head, image), occlusion(head.anomaly_score, image).float())


def test_elsas_plain_score_is_its_score_but_for_the_augmentation(scratch):
    images = photos(9, seed=5)
    plain, ensembled = plain_score(scratch)(images), scratch.anomaly_score(images)
    assert np.corrcoef(plain, ensembled)[0, 1] > 0.5
    torch.testing.assert_close(plain_score(scratch)(images[3:4]), plain[3:4], rtol=1e-4, atol=1e-4)
    # the sum over rotations does not care which way up the image is
    torch.testing.assert_close(plain_score(scratch)(images.rot90(1, (2, 3))), plain, rtol=1e-4, atol=1e-3)


def test_any_other_detector_is_explained_by_its_scores_alone():
    images = stained(photos(1))

    class Redness:
        def anomaly_score(self, images):
            return redness(images)

    torch.testing.assert_close(heat_map(Redness(), images), occlusion(redness, images).float())
    assert space_of(Redness()) is None
    found = explain(Redness(), images[0])
    assert (found.prototype, found.around, found.nearest) == (None, (), ())


@pytest.mark.parametrize("name", ["head", "scratch"])
def test_the_space_has_unit_vectors_and_prototypes_that_exist(name, request):
    detector = request.getfixturevalue(name)
    space, images = space_of(detector), photos(7, seed=3)
    vectors = space.vectors(images)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(7))
    number = len(detector.prototypes_ if isinstance(detector, Elsa) else detector.prototypes_KD_)
    assert ((space.prototype_of(vectors) >= 0) & (space.prototype_of(vectors) < number)).all()
    assert space.vectors(images[:0]).shape == (0, vectors.shape[1])


def test_elsas_prototype_is_the_one_with_the_highest_cosine(scratch):
    space = space_of(scratch)
    assert space.prototype_of(scratch.prototypes_).tolist() == list(range(11))


def known():
    """Five training images around two prototypes, one of them a labelled anomaly."""
    vectors = normalize(torch.tensor([[1.0, 0], [0.9, 0.1], [0.8, 0.3], [0, 1], [0.7, 0.6]]), dim=1)
    labels = ["normal", "", "", "", "anomaly"]
    return Known(list("abcde"), labels, photos(5, side=8), vectors, torch.tensor([0, 0, 0, 1, 0]))


def test_the_centre_of_a_group_is_its_mean_and_the_nearest_come_first():
    one = known()
    found = central(one, torch.tensor([True, True, True, False, False]))
    assert [neighbour.name for neighbour in found] == ["b", "a", "c"]
    assert torch.equal(found[0].image, one.images[1])
    assert central(one, torch.zeros(5, dtype=torch.bool)) == ()


def test_an_explanation_names_the_nearest_and_keeps_anomalies_apart(head):
    images = torch.cat([photos(12), stained(photos(5, seed=2))])
    labels = ["normal"] * 3 + [""] * 9 + ["anomaly"] * 5
    training = know(space_of(head), [f"{i}.png" for i in range(17)], labels, images)
    image = stained(photos(1, seed=9))[0]
    found = explain(head, image, training)
    assert found.score == pytest.approx(head.anomaly_score(image[None]).item())
    assert found.prototype == int(head.prototype_of(space_of(head).vectors(image[None])))
    assert {one.label for one in found.anomalies} == {"anomaly"}
    assert not {one.name for one in found.nearest} & {f"{i}.png" for i in range(12, 17)}
    similarities = [one.similarity for one in found.anomalies]
    assert similarities == sorted(similarities, reverse=True)
    assert len(found.anomalies) == 5
    assert 0 <= found.share <= 1


def test_an_image_of_the_training_set_is_no_explanation_of_itself(head):
    images = photos(6)
    training = know(space_of(head), list("abcdef"), [""] * 6, images)
    found = explain(head, images[2], training)
    assert sorted(one.name for one in found.nearest) == list("abdef")


def test_the_labelled_images_are_compared_with_first():
    labels = [""] * 50 + ["anomaly"] * 5 + [""] * 45
    chosen = most_telling(labels, most=15)
    assert len(chosen) == 15
    assert chosen == sorted(chosen)
    assert set(range(50, 55)) <= set(chosen)
    assert min(chosen) < 10  # the others from everywhere
    assert max(chosen) > 85
    assert most_telling(labels, most=1000) == list(range(100))


def test_two_maps_count_alike_whatever_their_units():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(B, H, W, generator=generator, dtype=torch.float64) for _ in range(2))
    found = both(first, second)
    torch.testing.assert_close(both(first, 1000 * second), found)
    torch.testing.assert_close(both(3 * first, second), 3 * found)
    torch.testing.assert_close(both(first, first), first)
    assert both(first, torch.zeros(B, H, W)).isfinite().all()


def test_places_left_out_of_elsa_are_turned_back(scratch):
    """The energy is summed over all rotations: the map of a turned image is the turned map."""
    net = fold_norms(scratch.net_, scratch.config)
    image = stained(photos(1))
    found = places_left_out(scratch, net, image)
    turned = places_left_out(scratch, net, image.rot90(1, (2, 3)))
    unit = found.std()  # an untrained network's map is small, a tolerance must not swallow it
    torch.testing.assert_close(turned / unit, found.rot90(1, (1, 2)) / unit, rtol=0.02, atol=0.02)
    assert not torch.allclose(found.rot90(2, (1, 2)) / unit, found / unit, atol=0.5)


def test_occlusion_is_the_mean_fall_over_the_windows_that_cover_a_pixel():
    image = torch.randint(0, 256, (1, 1, 11, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(11, 13, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def score(images):
        return (images[:, 0].double() * weights).sum(dim=(1, 2))

    found, hidden = occlusion(score, image, cells=3, window=0.5)[0], blurred(image)
    falls = [[[] for _ in range(13)] for _ in range(11)]
    for rows in windows(11, 3, 0.5):
        for columns in windows(13, 3, 0.5):
            changed = image.clone()
            changed[..., rows, columns] = hidden[..., rows, columns]
            for y in range(rows.start, rows.stop):
                for x in range(columns.start, columns.stop):
                    falls[y][x].append(float(score(image) - score(changed)))
    by_hand = torch.tensor([[sum(cell) / len(cell) for cell in row] for row in falls], dtype=torch.float64)
    torch.testing.assert_close(found, by_hand)
