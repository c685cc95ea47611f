"""One image file, whatever it is, to one uint8 array [C, size, size]."""

import io
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from elsa.errors import UserError

# What a source hands over for one image: a file, its content, or pixels [H, W] or [H, W, C]. None: the record is empty.
Payload = Path | bytes | NDArray[np.uint8] | None

# Opened by content, never by name. EPS, WMF and the like stay out: their readers start other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
RESIZES = ("stretch", "crop", "pad")
MIN_SIZE, MAX_SIZE = 32, 512
PIXEL_LIMIT = 200_000_000

# What Pillow's plugins raise on damaged files: each reader meets the damage in its own way.
DECODER_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError, EOFError,
    MemoryError, NotImplementedError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip

# 16 threads of 25 megapixels in RGBA are 1.6 GB; larger images are decoded one at a time.
LARGE = 25_000_000
_one_large_image = threading.Lock()

ORIENTATION_TAG = 0x0112
TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BrokenImageError(UserError):
    """This image cannot be used; `kind` is one word for the audit, the message one line for the user."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Decoding:
    """How images become arrays; kept with a model, so that new images are prepared the same way."""

    size: int
    """Height and width in pixels, 32 to 512."""
    channels: int
    """1 for grey, 3 for colour."""
    resize: str = "stretch"
    """stretch: the whole photo, squeezed to a square; crop: its central square; pad: the whole between black bars."""
    pixel_limit: int = PIXEL_LIMIT
    """Images that claim more pixels are refused unread: a file of a few kB can unpack to gigabytes."""

    def __post_init__(self) -> None:
        if not MIN_SIZE <= self.size <= MAX_SIZE:
            raise UserError(
                f"size={self.size}: images are resized to {MIN_SIZE} to {MAX_SIZE} pixels; give such a size"
            )
        if self.channels not in (1, 3):
            raise UserError(f"channels={self.channels}: use 1 (grey) or 3 (colour)")
        if self.resize not in RESIZES:
            raise UserError(f"resize={self.resize!r}: use one of {', '.join(RESIZES)}")
        if self.pixel_limit < 1:
            raise UserError(f"pixel_limit={self.pixel_limit}: give a number of pixels, e.g. {PIXEL_LIMIT}")


def decode(payload: Payload, how: Decoding) -> NDArray[np.uint8]:
    """The image as uint8 [channels, size, size]; raises BrokenImageError with the reason if that is impossible.

    Work on several images is wrapped in `quiet_pillow`, for Pillow comments on odd files through warnings.
    """
    if isinstance(payload, np.ndarray):
        if payload.shape[:2] == (how.size, how.size) and payload[0, 0].size == how.channels:
            return np.ascontiguousarray(payload.reshape(how.size, how.size, how.channels).transpose(2, 0, 1))
        return _to_array(_prepared(Image.fromarray(payload), how), how)
    with open_image(payload, how.pixel_limit) as image:
        return _to_array(_decoded(image, how), how)


def miniature(image: Image.Image) -> Image.Image:
    """What `decode` would make of an open image, as a grey 64 x 64 image, cheaply."""
    return _decoded(image, Decoding(size=64, channels=1))


@contextmanager
def open_image(payload: Path | bytes | None, pixel_limit: int) -> Iterator[Image.Image]:
    """The image with its header read and its size allowed; whatever goes wrong inside becomes BrokenImageError."""
    with _open_file(payload) as file:
        try:
            image = _identify(file)
            if image is None:
                raise BrokenImageError("unreadable", f"not an image in a known format ({', '.join(FORMATS)})")
            if image.width * image.height > pixel_limit:
                raise BrokenImageError(
                    "bomb",
                    f"{image.width} x {image.height} pixels are more than the pixel limit of {pixel_limit:,}; "
                    f"shrink the image if it is genuine",
                )
            yield image
        except BrokenImageError:
            raise
        except DECODER_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            kind = "truncated" if "truncated" in reason.lower() else "unreadable"
            if isinstance(error, Image.DecompressionBombError):  # a part of it, a tile say, claims more than the whole
                kind = "bomb"
            raise BrokenImageError(kind, f"damaged: {reason}") from error


def _open_file(payload: Path | bytes | None) -> IO[bytes]:
    if payload is None:
        raise BrokenImageError("empty", "the record holds no image")
    try:
        if isinstance(payload, Path) and not stat.S_ISREG(payload.stat().st_mode):
            raise BrokenImageError("unreadable", "a pipe, a socket or a device, not a file")  # to open a pipe may wait
        file: IO[bytes] = io.BytesIO(payload) if isinstance(payload, bytes) else payload.open("rb")
    except OSError as error:
        raise BrokenImageError("unreadable", f"cannot be read: {error.strerror}") from error
    if not file.read(1):
        file.close()
        raise BrokenImageError("empty", "the file is empty (0 bytes)")
    return file


def _identify(file: IO[bytes]) -> Image.Image | None:
    """What Image.open does, less its pixel check, whose limit is global and which warns even below it."""
    Image.init()
    file.seek(0)
    prefix = file.read(16)
    for name in FORMATS:
        factory, accept = Image.OPEN.get(name, (None, None))
        if factory is None or accept is None or accept(prefix) is not True:
            continue  # not this format, or (a string from `accept`) Pillow was built without it
        file.seek(0)
        return factory(file, "")
    return None


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; damaged EXIF data counts as 1 because the pixels may be sound."""
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except DECODER_ERRORS:
        return 1


def is_grey(payload: Payload, pixel_limit: int = PIXEL_LIMIT) -> bool:
    """Whether the image shows no colour: a grey file, or three channels that agree to 4 of 255 (JPEG rounding)."""
    if isinstance(payload, np.ndarray):
        pixels = payload
    else:
        with open_image(payload, pixel_limit) as image:
            if is_16_bit(image) or image.mode in ("1", "L", "LA", "La"):
                return True
            pixels = np.asarray(_decoded(image, Decoding(size=128, channels=3)))
    if pixels.ndim == 2 or pixels.shape[2] < 3:
        return True
    red, green, blue = (pixels[..., k].astype(np.int16) for k in range(3))
    return max(np.abs(red - green).max(), np.abs(green - blue).max()) <= 4


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Silence Pillow's warnings in the work inside, threads included; entered once, by the thread that waits for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        yield


def _to_array(image: Image.Image, how: Decoding) -> NDArray[np.uint8]:
    pixels = np.asarray(image).reshape(how.size, how.size, how.channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _decoded(image: Image.Image, how: Decoding) -> Image.Image:
    """An opened image, read and prepared; large ones wait for one another, so that memory holds one of them."""
    with _one_large_image if image.width * image.height > LARGE else nullcontext():
        # JPEG can decode straight to 1/2, 1/4 or 1/8: never below the size asked for, and much faster.
        image.draft("L" if how.channels == 1 else "RGB", (how.size, how.size))
        image.load()
        upright = TRANSPOSE.get(orientation(image))
        image = _prepared(image, how)
        return image if upright is None else image.transpose(upright)


def _prepared(image: Image.Image, how: Decoding) -> Image.Image:
    """The image as a square of the size asked for, in L or RGB."""
    image = _resized(plain_mode(image), how)
    if image.mode == "RGBA":
        # White: pictures with alpha are mostly product shots, drawings and cut-outs made for white pages.
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if how.channels == 1 else "RGB")
    if image.size != (how.size, how.size):
        bars = Image.new(image.mode, (how.size, how.size))
        bars.paste(image, ((how.size - image.width) // 2, (how.size - image.height) // 2))
        image = bars
    return image


def plain_mode(image: Image.Image) -> Image.Image:
    """The image as L, RGB or RGBA."""
    if is_16_bit(image):
        # The high byte: 65535 becomes 255 whatever the image's own maximum is, so brightness stays comparable.
        return Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise BrokenImageError("unreadable", "floating-point pixels have no agreed range; convert to 8 or 16 bits")
    if "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBa", "RGBA"):
        return image.convert("RGBA")
    if image.mode in ("1", "L"):
        return image.convert("L")
    return image.convert("RGB")


def is_16_bit(image: Image.Image) -> bool:
    """Whether the image holds more than 8 bits per pixel."""
    return image.mode == "I" or image.mode.startswith("I;16")


def _resized(image: Image.Image, how: Decoding) -> Image.Image:
    width, height = image.size
    box = None
    target = (how.size, how.size)
    if how.resize == "crop":
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
    elif how.resize == "pad":
        scale = how.size / max(width, height)
        target = (max(1, round(width * scale)), max(1, round(height * scale)))
    # Antialiased, also with RGBA, where Pillow weights colours by their alpha.
    return image.resize(target, Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
