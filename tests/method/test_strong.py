import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from elsa.strong import CUTOUT_GREY, LEVELS, OPERATIONS, _cutout, strong

LEVEL_FACTOR = {v: 0.01 + 0.99 * v / 10 for v in LEVELS}


def photos(count=3, channels=3, size=32, seed=0):
    """Smooth images that do not span the full range, as photographs; noise would hide mistakes of the neighbours."""
    noise = torch.rand(count, channels, 6, 6, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(noise, (size, size), mode="bicubic")
    return (smooth * 150 + 40).clamp(0, 255).to(torch.uint8)


def to_pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def from_pillow(image):
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)


def affine(*matrix):
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix)


def oracles(v, sign, size=32):
    factor, shift = LEVEL_FACTOR[v], sign * (0.3 - 0.03 * v)
    return {
        "autocontrast": ImageOps.autocontrast,
        "equalize": ImageOps.equalize,
        "identity": lambda image: image,
        "brightness": lambda image: ImageEnhance.Brightness(image).enhance(factor),
        "colour": lambda image: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda image: ImageEnhance.Contrast(image).enhance(factor),
        "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(factor),
        "posterize": lambda image: ImageOps.posterize(image, {1: 7, 2: 7, 3: 6, 4: 5}[v]),
        "solarize": lambda image: ImageOps.solarize(image, 256 - int(25.6 * v)),
        "shear_x": affine(1, shift, 0, 0, 1, 0),
        "shear_y": affine(1, 0, 0, shift, 1, 0),
        "translate_x": affine(1, 0, shift * size, 0, 1, 0),
        "translate_y": affine(1, 0, 0, 0, 1, shift * size),
    }


def apply(name, images, v, sign):
    count = len(images)
    return OPERATIONS[name](images, torch.full((count,), v), torch.full((count,), sign))


def test_the_pool_is_the_papers():
    assert list(OPERATIONS) == list(oracles(1, 1))


@pytest.mark.parametrize("v", LEVELS)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_equals_pillow(name, v, sign):
    x = photos()
    expected = torch.stack([from_pillow(oracles(v, sign)[name](to_pillow(image))) for image in x])
    difference = (apply(name, x, v, sign).int() - expected.int()).abs()
    if name.startswith(("shear", "translate")):
        # a position that falls on a pixel border may round either way
        assert (difference > 0).float().mean() < 0.02
    else:
        assert difference.max() == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_levels_belong_to_their_own_image(name):
    x, levels, signs = photos(2), torch.tensor([1, 4]), torch.tensor([1, -1])
    together = OPERATIONS[name](x, levels, signs)
    for b in range(2):
        assert torch.equal(together[b : b + 1], OPERATIONS[name](x[b : b + 1], levels[b : b + 1], signs[b : b + 1]))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("flat", [0, 128, 255])
def test_flat_and_grey_images_survive(name, flat):
    x = torch.full((2, 1, 17, 17), flat, dtype=torch.uint8)
    out = apply(name, x, 3, 1)
    assert out.dtype == torch.uint8
    assert out.shape == x.shape


def test_each_image_draws_its_own_distortions_and_a_seed_repeats_them():
    x = photos(1).expand(32, -1, -1, -1)
    first = strong(x, torch.Generator().manual_seed(0))
    assert len(first.flatten(1).unique(dim=0)) == 32
    assert torch.equal(first, strong(x, torch.Generator().manual_seed(0)))
    assert not torch.equal(first, strong(x, torch.Generator().manual_seed(1)))


def test_distortion_is_hard():
    # factors below .41 toward black and grey: a milder version makes a poor early-stop signal
    x = photos(256)
    out = strong(x, torch.Generator().manual_seed(0))
    assert (out.float() - x.float()).abs().mean() > 40
    assert out.float().mean() < 0.6 * x.float().mean()


def test_each_operation_is_used_with_the_probability_of_the_pool(monkeypatch):
    used = dict.fromkeys(OPERATIONS, 0)

    def counting(name):
        def operation(images, level, sign):
            used[name] += len(images)
            assert set(level.tolist()) <= set(LEVELS)
            assert set(sign.tolist()) <= {-1, 1}
            return images

        return operation

    for name in OPERATIONS:
        monkeypatch.setitem(OPERATIONS, name, counting(name))
    strong(photos(2000, size=8), torch.Generator().manual_seed(0))
    for count in used.values():
        assert count / 2000 == pytest.approx(0.8 * 12 / 13, abs=0.03)  # 12 of 13, each with probability .8


def test_cutout_covers_a_half_sized_square_of_a_fifth_of_the_images():
    x = torch.zeros(2000, 1, 32, 32, dtype=torch.uint8)
    covered = (_cutout(x, torch.Generator().manual_seed(0)) == CUTOUT_GREY).flatten(1).sum(dim=1)
    assert (covered > 0).float().mean() == pytest.approx(0.2, abs=0.03)
    assert covered.max() == 16 * 16
    assert covered[covered > 0].min() >= 8 * 8  # at a corner a quarter of the square remains


def test_input_is_not_modified():
    x = photos()
    strong(x, torch.Generator().manual_seed(0))
    assert torch.equal(x, photos())
