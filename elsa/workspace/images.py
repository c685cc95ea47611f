"""What the page shows of an image: the pixels the detector sees, and the photo itself, both encoded anew.

No file of the source is ever sent as it is: what a browser gets was decoded here, so that a file's name, kind, metadata
or script reaches nobody.
"""

import io
import os
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from elsa.data.images import PIXEL_LIMIT, TRANSPOSE, open_image, orientation, plain_mode, quiet_pillow
from elsa.data.shards import Shards
from elsa.data.sources import Source
from elsa.errors import UserError

LARGEST_SHOWN = 2048  # pixels of the longer side; more than any screen the page is used on
SMALL = 64  # up to this side PNG is smaller than JPEG and shows every pixel as it is
# A photo of 200 megapixels takes 0.8 GB while it is decoded, and forty requests may come at once.
_one_photo = threading.Semaphore(1)


def thumbnail(shards: Shards, row: int) -> tuple[bytes, str]:
    """The image as the detector sees it, and its media type."""
    pixels_CHW = shards[row : row + 1].numpy()[0]
    return _encoded(_from_pixels(pixels_CHW.transpose(1, 2, 0)))


def photo(source: Source, record: int) -> tuple[bytes, str]:
    """The image in its own proportions, upright, and its media type."""
    with _one_photo:
        payload = source.payload(record)
        if isinstance(payload, np.ndarray):
            return _encoded(_from_pixels(payload))
        if isinstance(payload, Path):
            _refuse_to_leave(source, payload)
        with quiet_pillow(), open_image(payload, PIXEL_LIMIT) as image:
            image.draft("RGB", (LARGEST_SHOWN, LARGEST_SHOWN))  # JPEG alone heeds it, and saves most of the work
            image.load()
            upright = TRANSPOSE.get(orientation(image))
            image = plain_mode(image)
            image.thumbnail((LARGEST_SHOWN, LARGEST_SHOWN))
            return _encoded(image if upright is None else image.transpose(upright))


def _refuse_to_leave(source: Source, path: Path) -> None:
    """A link may have been put where a photo was when the source was opened."""
    root = source.path if source.path.is_dir() else source.path.parent
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise UserError(f"{path} leaves the source {root}; copy the file into it")


def _from_pixels(pixels_HWC: NDArray[np.uint8]) -> Image.Image:
    grey = pixels_HWC.ndim == 3 and pixels_HWC.shape[2] == 1
    return Image.fromarray(np.ascontiguousarray(pixels_HWC[..., 0] if grey else pixels_HWC))


def _encoded(image: Image.Image) -> tuple[bytes, str]:
    file = io.BytesIO()
    if max(image.size) <= SMALL or image.mode == "RGBA":
        image.save(file, "PNG")
        return file.getvalue(), "image/png"
    image.save(file, "JPEG", quality=88)
    return file.getvalue(), "image/jpeg"
