"""From a source to one uint8 tensor, or to shards on disk when the set is larger than memory allows."""

import hashlib
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elsa.data.images import (
    MIN_SIZE,
    PIXEL_LIMIT,
    BrokenImageError,
    Decoding,
    Payload,
    decode,
    is_grey,
    open_image,
    quiet_pillow,
)
from elsa.data.parallel import ordered_map
from elsa.data.shards import Decoded, Shards, build_shards, cache_folder, read_manifest
from elsa.data.sources import Source
from elsa.errors import UserError
from elsa.progress import Progress, silent

MEMORY_LIMIT = 1 << 30
# What ImageNet encoders were trained at; beyond it cost grows with the square. Larger sizes are for those who ask.
LARGEST_CHOSEN_SIZE = 224
SIZE_SAMPLE = 256


@dataclass(frozen=True)
class ImageSet:
    """The images of a source that could be decoded; row i of everything belongs to names[i]."""

    images: Tensor | Shards
    """uint8 [N, C, H, W], or float32 [N, D] of a source of vectors"""
    labels: list[str]
    names: list[str]
    extra: dict[str, list[Any]]
    broken: list[tuple[str, str]]
    """(name, reason) of the images left out."""
    decoding: Decoding | None
    """None for vectors. How the images were prepared; new images for the same model must be prepared alike."""

    def __len__(self) -> int:
        return len(self.names)


def load_images(
    source: Source,
    *,
    size: int | None = None,
    channels: int | None = None,
    resize: str = "stretch",
    pixel_limit: int = PIXEL_LIMIT,
    cache: Path | None = None,
    memory_limit: int = MEMORY_LIMIT,
    workers: int | None = None,
    progress: Progress = silent,
) -> ImageSet:
    """Decode all images of a source; broken ones are listed, not fatal, unless none is left.

    Size and channels are chosen from the data unless given. A set of more than memory_limit bytes goes to shards below
    the folder `cache`, where a killed run is continued and a later one finds them.
    """
    if source.kind == "vectors":
        return _load_vectors(source, size or channels)
    asked = {"size": size, "channels": channels, "resize": resize, "pixel_limit": pixel_limit}
    fingerprint = hashlib.sha256((source.fingerprint() + json.dumps(asked)).encode()).hexdigest()
    folder = None if cache is None else cache_folder(Path(cache), source.path)
    noted = None if folder is None else read_manifest(folder, fingerprint)
    with quiet_pillow():
        if noted is not None:
            how = Decoding(**noted["decoding"])
        else:
            how = _choose_decoding(source, size, channels, resize, pixel_limit, workers)
        needed = len(source) * how.channels * how.size * how.size

        def decoded(records: Iterable[int]) -> Iterator[Decoded]:
            return ordered_map(lambda payload: _decode_or_reason(payload, how), source.payloads(list(records)), workers)

        def report(done: int) -> None:
            if done % 64 == 0 or done == len(source):
                progress("read images", done, len(source), {})

        images: Tensor | Shards
        if needed <= memory_limit:
            images, broken = _decode_to_memory(len(source), how, decoded, report)
        elif folder is None:
            raise UserError(
                f"{len(source)} images at {how.size} px need {needed / 1e9:.1f} GB, more than the memory limit of "
                f"{memory_limit / 1e9:.1f} GB; name a cache folder, choose a smaller size or raise the limit"
            )
        else:
            stored = build_shards(folder, fingerprint, source.names, how, decoded, report)
            images, broken = stored.shards, stored.broken
    if len(broken) == len(source):
        name, reason = source.names[broken[0][0]], broken[0][1]
        raise UserError(f"SOURCE {source.path}: none of its {len(source)} images can be decoded; {name}: {reason}")
    reasons = dict(broken)
    kept = [i for i in range(len(source)) if i not in reasons]
    return ImageSet(
        images=images,
        labels=[source.labels[i] for i in kept],
        names=[source.names[i] for i in kept],
        extra={column: [values[i] for i in kept] for column, values in source.extra.items()},
        broken=[(source.names[i], reason) for i, reason in broken],
        decoding=how,
    )


def _load_vectors(source: Source, asked: int | None) -> ImageSet:
    """Vectors as they are; a size or channels to be decoded to are those of images."""
    if asked is not None:
        raise UserError(f"SOURCE {source.path} holds vectors, not images: leave out --size, or give images")
    vectors = torch.from_numpy(np.stack([np.asarray(row) for row in source.payloads(range(len(source)))]))
    return ImageSet(vectors, source.labels, source.names, source.extra, broken=[], decoding=None)


def _decode_or_reason(payload: Payload, how: Decoding) -> Decoded:
    try:
        return decode(payload, how)
    except BrokenImageError as error:
        return str(error)


def _decode_to_memory(count: int, how: Decoding, decoded: Any, report: Any) -> tuple[Tensor, list[tuple[int, str]]]:
    images = torch.empty((count, how.channels, how.size, how.size), dtype=torch.uint8)
    pixels = images.numpy()
    broken: list[tuple[int, str]] = []
    for record, result in enumerate(decoded(range(count))):
        if isinstance(result, str):
            broken.append((record, result))
        else:
            pixels[record - len(broken)] = result
        report(record + 1)
    return images[: count - len(broken)], broken


def _choose_decoding(
    source: Source, size: int | None, channels: int | None, resize: str, pixel_limit: int, workers: int | None
) -> Decoding:
    # The settings given are checked before the source is read through for those that are not.
    Decoding(size or MIN_SIZE, channels or 1, resize, pixel_limit)
    return Decoding(
        size=size or choose_size(source, pixel_limit),
        channels=channels or (1 if all_grey(source, pixel_limit, workers) else 3),
        resize=resize,
        pixel_limit=pixel_limit,
    )


def choose_size(source: Source, pixel_limit: int = PIXEL_LIMIT) -> int:
    """The median of the images' shorter sides, rounded to a multiple of 32, from 32 to 224."""
    sample = np.unique(np.linspace(0, len(source) - 1, SIZE_SAMPLE).round().astype(int)).tolist()
    sides = []
    for payload in source.payloads(sample):
        try:
            if isinstance(payload, np.ndarray):
                sides.append(min(payload.shape[:2]))
            else:
                with open_image(payload, pixel_limit) as image:
                    sides.append(min(image.size))
        except BrokenImageError:
            continue
    side = statistics.median(sides) if sides else MIN_SIZE
    return min(max(32 * round(side / 32), MIN_SIZE), LARGEST_CHOSEN_SIZE)


def all_grey(source: Source, pixel_limit: int = PIXEL_LIMIT, workers: int | None = None) -> bool:
    """Whether no image shows any colour; every image is asked, for the one with a coloured stain is the anomaly."""

    def grey_or_broken(payload: Payload) -> bool:
        try:
            return is_grey(payload, pixel_limit)
        except BrokenImageError:
            return True

    return all(ordered_map(grey_or_broken, source.payloads(range(len(source))), workers))
