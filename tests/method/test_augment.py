import colorsys

import pytest
import torch
from PIL import Image

from elsa.augment import (
    AREA,
    BRIGHTNESS,
    CONTRAST,
    FLIP,
    GREY,
    HUE,
    JITTER,
    LEFT,
    NUM_DRAWS,
    ORDER,
    RATIO,
    SATURATION,
    TOP,
    draw,
    plain,
    rotations,
    two_views,
    weak,
)

B, C, S = 5, 3, 13


def images(count=B, channels=C, size=S, seed=0):
    return torch.randint(
        0, 256, (count, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def no_change(count=B):
    """Draws under which nothing happens: full area, no flip, no jitter, no grey."""
    draws = torch.full((count, NUM_DRAWS), 0.5)
    draws[:, [JITTER, GREY, FLIP]] = 0.999
    return draws


def whole(x, draws):
    return weak(x, draws, 1.0, 1.0)


def test_no_change_gives_the_image_in_zero_to_one():
    torch.testing.assert_close(whole(images(), no_change()), images().float() / 255)


def test_flip_mirrors_columns_and_only_where_drawn():
    draws = no_change()
    draws[[0, 3], FLIP] = 0.1
    expected = plain(images())
    expected[[0, 3]] = expected[[0, 3]].flip(3)
    torch.testing.assert_close(whole(images(), draws), expected)


def test_crop_matches_pillow_bilinear_on_the_same_box():
    x, draws = images(size=32), no_change()
    draws[:, LEFT], draws[:, TOP], draws[:, RATIO] = 0.3, 0.8, 0.9
    area, ratio = 0.54, (4 / 3) ** 0.8
    width, height = 32 * (area * ratio) ** 0.5, 32 * (area / ratio) ** 0.5
    left, top = 0.3 * (32 - width), 0.8 * (32 - height)
    ours = weak(x, draws, area, area)
    for image, mine in zip(x, ours, strict=True):
        pillow = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(
            (32, 32), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height)
        )
        theirs = torch.frombuffer(bytearray(pillow.tobytes()), dtype=torch.uint8).view(32, 32, 3).permute(2, 0, 1)
        inner = (slice(None), slice(1, -1), slice(1, -1))  # Pillow does not look beyond the box at its border
        assert (mine * 255 - theirs.float())[inner].abs().max() < 1.01


def test_area_is_drawn_between_its_bounds():
    ramp = torch.arange(64, dtype=torch.uint8).mul(4).expand(2, 1, 64, 64).contiguous()
    draws = no_change(2)
    draws[:, AREA] = torch.tensor([0.0, 1.0])
    spans = [(x.max() - x.min()).item() for x in weak(ramp, draws, 0.25, 1.0)]
    assert spans[0] == pytest.approx(0.5 * spans[1], rel=0.05)  # a quarter of the area is half of the width


def test_hue_saturation_and_brightness_match_colorsys():
    draws = no_change()
    draws[:, JITTER] = 0.0
    draws[:, HUE], draws[:, SATURATION], draws[:, BRIGHTNESS] = 0.8, 0.2, 0.1
    x, ours = plain(images()), whole(images(), draws)
    for b, row, column in ((0, 0, 0), (1, 5, 7), (4, 12, 3)):
        h, s, v = colorsys.rgb_to_hsv(*x[b, :, row, column].tolist())
        expected = colorsys.hsv_to_rgb((h + 0.06) % 1, min(1, s * 0.76), min(1, v * 0.68))
        assert ours[b, :, row, column].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("order", [0.1, 0.9])
def test_contrast_scales_around_the_mean_grey_before_or_after_the_colours(order):
    draws = no_change()
    draws[:, JITTER], draws[:, ORDER], draws[:, CONTRAST], draws[:, BRIGHTNESS] = 0.0, order, 0.25, 0.25
    x = plain(images())
    weights = torch.tensor([0.299, 0.587, 0.114])[None, :, None, None]

    def contrast(x):
        mean = (x * weights).sum(dim=1, keepdim=True).mean(dim=(2, 3), keepdim=True)
        return mean + 0.8 * (x - mean)

    expected = 0.8 * contrast(x) if order < 0.5 else contrast(0.8 * x)
    torch.testing.assert_close(whole(images(), draws), expected, atol=1e-5, rtol=1e-5)


def test_grey_has_equal_channels_with_pillow_weights():
    draws = no_change()
    draws[2, GREY] = 0.1
    out, x = whole(images(), draws), plain(images())
    assert torch.equal(out[2, 0], out[2, 1])
    torch.testing.assert_close(out[2, 0], 0.299 * x[2, 0] + 0.587 * x[2, 1] + 0.114 * x[2, 2])
    torch.testing.assert_close(out[3], x[3])


def test_each_image_has_its_own_randomness():
    same = images(1).expand(64, -1, -1, -1)
    out = weak(same, draw(64, torch.Generator().manual_seed(0)), 0.54, 0.54)
    assert len(out.flatten(1).unique(dim=0)) == 64


def test_how_often_jitter_and_grey_happen():
    draws = draw(4001, torch.Generator().manual_seed(0))
    out = whole(images(1, size=5).expand(4001, -1, -1, -1), draws)
    is_grey = (out[:, 0] - out[:, 1]).abs().amax(dim=(1, 2)) < 1e-6
    assert is_grey.float().mean() == pytest.approx(0.2, abs=0.02)
    untouched = no_change(4001)
    untouched[:, JITTER] = draws[:, JITTER]
    untouched[:, BRIGHTNESS] = 0.0
    changed = (whole(images(1, size=5).expand(4001, -1, -1, -1), untouched) - plain(images(1, size=5))).abs()
    assert (changed.amax(dim=(1, 2, 3)) > 1e-3).float().mean() == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_any_number_of_channels_stays_in_range(channels):
    out = weak(images(17, channels), draw(17, torch.Generator().manual_seed(0)), 0.08, 1.0)
    assert out.shape == (17, channels, S, S)
    assert out.min() >= 0
    assert out.max() <= 1
    assert out.isfinite().all()


def test_input_is_not_modified():
    x = images()
    weak(x, draw(B, torch.Generator().manual_seed(0)), 0.54, 0.54)
    assert torch.equal(x, images())


def test_an_image_does_not_depend_on_the_rest_of_its_batch():
    draws = draw(B, torch.Generator().manual_seed(0))
    together = weak(images(), draws, 0.54, 0.54)
    alone = torch.cat([weak(images()[b : b + 1], draws[b : b + 1], 0.54, 0.54) for b in range(B)])
    torch.testing.assert_close(together, alone)


def test_rotations_are_ordered_by_turn_and_turn_counter_clockwise():
    x = plain(images(2))
    turned = rotations(x, 4)
    assert torch.equal(turned[:2], x)
    assert torch.equal(turned[2:4], x.transpose(2, 3).flip(2))
    assert torch.equal(turned[4:6], x.flip(2, 3))
    assert torch.equal(turned[6:], x.transpose(2, 3).flip(3))
    assert torch.equal(rotations(x, 1), x)


def test_two_views_are_ordered_by_view_rotation_image():
    x = images(2)
    out = two_views(x, no_change(16), 4, 1.0, 1.0)
    torch.testing.assert_close(out, rotations(plain(x), 4).repeat(2, 1, 1, 1))


def test_the_flip_comes_before_the_turn():
    # mirrored after a quarter turn, an image would look turned the other way: its rotation label would be wrong
    draws = no_change(8)
    draws[:, FLIP] = 0.1
    out = two_views(images(1), draws, 4, 1.0, 1.0)
    torch.testing.assert_close(out, rotations(plain(images(1)).flip(3), 4).repeat(2, 1, 1, 1))


def test_many_images_are_augmented_as_few_are(monkeypatch):
    x, draws = images(count=23), torch.rand(23, NUM_DRAWS, generator=torch.Generator().manual_seed(1))
    at_once = weak(x, draws, 0.3, 1.0)
    monkeypatch.setattr("elsa.augment.CACHED", 7)
    torch.testing.assert_close(weak(x, draws, 0.3, 1.0), at_once)
