"""Decoding: every kind of file a folder of photos may hold, and every kind of damage."""

import io
import random
import struct
import warnings
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from elsa.data.images import BrokenImageError, Decoding, decode, is_grey, quiet_pillow
from elsa.errors import UserError

COLOUR = Decoding(size=32, channels=3)
GREY = Decoding(size=32, channels=1)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def quarters(width=62, height=38, mode="RGB"):
    """Red, green, blue and white quarters: every flip and turn of them differs."""
    image = Image.new("RGB", (width, height), "red")
    image.paste((0, 255, 0), (width // 2, 0, width, height // 2))
    image.paste((0, 0, 255), (0, height // 2, width // 2, height))
    image.paste((255, 255, 255), (width // 2, height // 2, width, height))
    return image.convert(mode)


def corners(pixels):
    """Colours of the middles of the four quarters: top left, top right, bottom left, bottom right."""
    return [tuple(int(value) for value in pixels[:, y, x]) for y in (8, 24) for x in (8, 24)]


RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "JPEG2000"])
def test_lossless_formats_come_out_upright_in_rgb(kind):
    pixels = decode(encoded(quarters(), kind, **({"lossless": True} if kind == "WEBP" else {})), COLOUR)
    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert corners(pixels) == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("kind", ["JPEG", "GIF"])
def test_lossy_formats_come_close(kind):
    pixels = decode(encoded(quarters(), kind), COLOUR)
    np.testing.assert_allclose(corners(pixels), [RED, GREEN, BLUE, WHITE], atol=16)


def test_a_file_is_decoded_like_its_content(tmp_path):
    (tmp_path / "misnamed.txt").write_bytes(encoded(quarters()))
    np.testing.assert_array_equal(decode(tmp_path / "misnamed.txt", COLOUR), decode(encoded(quarters()), COLOUR))


def test_pixels_of_the_right_size_pass_unchanged_and_others_are_resized():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    np.testing.assert_array_equal(decode(pixels, COLOUR), pixels.transpose(2, 0, 1))
    np.testing.assert_array_equal(decode(pixels[..., 0], GREY), pixels[None, ..., 0])
    assert decode(pixels[:17, :29], COLOUR).shape == (3, 32, 32)
    assert corners(decode(np.asarray(quarters()), COLOUR)) == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize(("orientation", "expected"), [
    (1, [RED, GREEN, BLUE, WHITE]),
    (2, [GREEN, RED, WHITE, BLUE]),
    (3, [WHITE, BLUE, GREEN, RED]),
    (4, [BLUE, WHITE, RED, GREEN]),
    (5, [RED, BLUE, GREEN, WHITE]),
    (6, [BLUE, RED, WHITE, GREEN]),
    (7, [WHITE, GREEN, BLUE, RED]),
    (8, [GREEN, WHITE, RED, BLUE]),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_exif_orientation_is_applied_once(kind, orientation, expected):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(encoded(quarters(), kind, exif=exif), COLOUR)
    np.testing.assert_allclose(corners(pixels), expected, atol=16 if kind == "JPEG" else 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_scale_by_the_range_not_by_the_image(kind):
    values = np.array([[0, 257 * 7], [257 * 100, 65535]], np.uint16).repeat(16, 0).repeat(16, 1)
    pixels = decode(encoded(Image.fromarray(values), kind), GREY)
    assert [pixels[0, y, x] for y in (8, 24) for x in (8, 24)] == [0, 7, 100, 255]
    dark = decode(encoded(Image.fromarray(values // 16), kind), GREY)
    assert dark.max() == 15  # not stretched to 255: brightness means the same in every image


def test_floating_point_pixels_are_refused():
    with pytest.raises(BrokenImageError, match="no agreed range"):
        decode(encoded(Image.new("F", (32, 32), 0.5), "TIFF"), GREY)


def test_cmyk_palette_and_bilevel():
    cmyk = encoded(quarters(mode="CMYK"), "TIFF")
    np.testing.assert_allclose(corners(decode(cmyk, COLOUR)), [RED, GREEN, BLUE, WHITE], atol=2)
    assert corners(decode(encoded(quarters(mode="P")), COLOUR)) == [RED, GREEN, BLUE, WHITE]
    assert set(np.unique(decode(encoded(Image.new("1", (40, 40), 1)), GREY))) == {255}


def test_grey_uses_luma_also_where_jpeg_decodes_it_directly():
    luma = [76, 150, 29, 255]  # ITU-R 601
    for kind, tolerance in (("PNG", 0), ("JPEG", 2)):
        pixels = decode(encoded(quarters(), kind), GREY)
        np.testing.assert_allclose([value for (value,) in corners(pixels)], luma, atol=tolerance)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_shows_white(mode):
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0)).convert(mode)
    assert decode(encoded(image), COLOUR).min() == 255
    half = Image.new("RGBA", (32, 32), (0, 0, 0, 128)).convert(mode)
    np.testing.assert_allclose(decode(encoded(half), COLOUR), 127, atol=1)


def test_colour_under_full_transparency_does_not_bleed():
    image = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 33, 64))  # the edge falls inside a pixel of the small image
    pixels = decode(encoded(image), COLOUR).astype(int)
    assert (pixels[0] <= pixels[1] + 1).all()  # red nowhere above green: only blue and white are mixed


def test_transparent_palette_and_colour_keys():
    palette = Image.new("P", (32, 32), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert decode(encoded(palette, transparency=0), COLOUR).min() == 255
    assert decode(encoded(Image.new("RGB", (32, 32), (1, 2, 3)), transparency=(1, 2, 3)), COLOUR).min() == 255


def test_only_the_first_frame_of_an_animation_counts():
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    pixels = decode(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), COLOUR)
    assert corners(pixels) == [RED] * 4


def test_resize_modes_keep_lose_or_frame():
    wide = Image.new("RGB", (96, 32), "red")
    wide.paste((0, 255, 0), (32, 0, 64, 32))
    stretched = decode(encoded(wide), COLOUR)
    assert tuple(stretched[:, 16, 2]) == tuple(stretched[:, 16, 30]) == RED
    assert tuple(stretched[:, 16, 16]) == GREEN
    cropped = decode(encoded(wide), Decoding(32, 3, "crop"))
    assert {tuple(pixel) for pixel in cropped.reshape(3, -1).T.tolist()} == {GREEN}
    padded = decode(encoded(wide), Decoding(32, 3, "pad"))
    assert padded[:, :10].max() == padded[:, 22:].max() == 0
    assert tuple(padded[:, 16, 2]) == RED
    tall = decode(encoded(wide.transpose(Image.Transpose.ROTATE_90)), Decoding(32, 3, "pad"))
    assert tall[:, :, :10].max() == tall[:, :, 22:].max() == 0
    line = decode(encoded(Image.new("RGB", (500, 1), "red")), Decoding(32, 3, "pad"))
    assert line[0].max() == 255


def test_fine_patterns_are_averaged_not_sampled():
    stripes = np.zeros((256, 256), np.uint8)
    stripes[:, ::2] = 255
    pixels = decode(encoded(Image.fromarray(stripes)), GREY)[0, 2:-2, 2:-2]
    assert pixels.min() >= 110
    assert pixels.max() <= 145


def test_reduced_jpeg_decoding_stays_close_to_the_full_one():
    rng = np.random.default_rng(0)
    photo = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((640, 480), Image.Resampling.BICUBIC)
    content = encoded(photo, "JPEG", quality=90)
    full = np.asarray(Image.open(io.BytesIO(content)).resize((64, 64), Image.Resampling.BILINEAR), int)
    ours = decode(content, Decoding(64, 3)).transpose(1, 2, 0).astype(int)
    assert np.abs(ours - full).mean() < 1
    assert np.abs(ours - full).max() < 12


@pytest.mark.parametrize(("content", "kind", "reason"), [
    (b"", "empty", "0 bytes"),
    (None, "empty", "holds no image"),
    (b"this is no image at all", "unreadable", "not an image in a known format"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable", "not an image in a known format"),
    (encoded(quarters())[:60], "truncated", "truncated"),
    (encoded(quarters(), "JPEG")[:-300], "truncated", "truncated"),
])  # fmt: skip
def test_damage_is_named(content, kind, reason):
    with pytest.raises(BrokenImageError, match=reason) as caught:
        decode(content, COLOUR)
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_broken_image(tmp_path):
    with pytest.raises(BrokenImageError, match="No such file"):
        decode(tmp_path / "gone.png", COLOUR)


def bomb(width, height):
    """A PNG of a hundred bytes that claims width x height pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


def test_a_bomb_is_refused_before_it_is_unpacked():
    with pytest.raises(BrokenImageError, match=r"50000 x 50000 pixels are more than the pixel limit of 200,000,000"):
        decode(bomb(50_000, 50_000), COLOUR)
    with pytest.raises(BrokenImageError, match="pixel limit of 1,000"):
        decode(encoded(quarters()), Decoding(32, 3, pixel_limit=1000))
    decode(encoded(Image.new("RGB", (40, 25))), Decoding(32, 3, pixel_limit=1000))  # the limit itself is allowed


def test_pillows_own_pixel_limit_neither_warns_nor_refuses(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(encoded(quarters()), COLOUR).shape == (3, 32, 32)
        assert decode(encoded(quarters(), "GIF"), COLOUR).shape == (3, 32, 32)


def test_quiet_pillow_hides_pillows_warnings_and_no_others():
    palette = quarters(mode="P")
    content = encoded(palette, transparency=bytes(256))  # Pillow warns about transparency in bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet_pillow():
            decode(content, COLOUR)
        with quiet_pillow(), pytest.raises(UserWarning, match="ours"):
            warnings.warn("ours", UserWarning, stacklevel=1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000"])
def test_any_damage_is_a_broken_image_and_nothing_worse(kind):
    rng = random.Random(0)
    sound = encoded(quarters(), kind)
    for _ in range(150):
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with quiet_pillow(), suppress(BrokenImageError):
            assert decode(bytes(damaged), Decoding(32, 3, pixel_limit=10**6)).shape == (3, 32, 32)


def test_grey_detection_sees_through_file_formats_and_finds_a_stain():
    grey = Image.linear_gradient("L")
    assert is_grey(encoded(grey))
    assert is_grey(encoded(grey.convert("RGB")))
    assert is_grey(encoded(grey.convert("RGB"), "JPEG"))
    assert is_grey(encoded(grey.convert("RGBA")))
    assert is_grey(np.zeros((5, 7), np.uint8))
    stained = grey.convert("RGB").resize((640, 480))
    stained.paste((200, 100, 100), (300, 200, 312, 212))
    assert not is_grey(encoded(stained))
    assert not is_grey(encoded(stained, "JPEG"))
    assert not is_grey(np.asarray(stained))
    assert not is_grey(encoded(Image.new("RGB", (9, 9), (50, 50, 60))))  # blue alone


@pytest.mark.parametrize(("settings", "complaint"), [
    ({"size": 31}, "size=31"), ({"size": 513}, "size=513"), ({"channels": 2}, "channels=2"),
    ({"resize": "squash"}, "stretch, crop, pad"), ({"pixel_limit": 0}, "pixel_limit=0"),
])  # fmt: skip
def test_impossible_settings_are_refused(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        Decoding(**{"size": 32, "channels": 3, **settings})
