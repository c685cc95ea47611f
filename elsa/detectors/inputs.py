"""What the detectors of this folder share: checked input, images as rows of numbers, images held out to calibrate."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from elsa.errors import UserError
from elsa.labels import ANOMALY, encode_labels

HELD_OUT_SHARE, LEAST_HELD_OUT = 0.1, 30
BATCH = 1024  # images made float at a time: 12 MB for 3,072 numbers each
MOST_BYTES = 8 * 2**30


class Images(Protocol):
    """uint8 images [N, C, H, W] (a tensor or elsa.data.shards.Shards) or float vectors [N, D]."""

    @property
    def shape(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Tensor: ...


def checked(images: Images, labels: Sequence[str | None]) -> Tensor:
    """The label codes of a training set; refuses what no detector here can learn from."""
    codes = encode_labels(labels)
    kind_of(images)
    if len(images) != len(codes):
        raise UserError(
            f"{len(images):,} images and {len(codes):,} labels: give one label ('' if unknown) for each image"
        )
    return codes


def kind_of(images: Images) -> str:
    """`images` or `vectors`."""
    first = images[0:1]
    if isinstance(first, Tensor) and first.ndim == 4 and first.dtype == torch.uint8:
        return "images"
    if isinstance(first, Tensor) and first.ndim == 2 and first.is_floating_point():
        return "vectors"
    given = f"{first.dtype} of {first.ndim} dimensions" if isinstance(first, Tensor) else type(images).__name__
    raise UserError(
        f"images are {given}: use a uint8 tensor [N, C, H, W] of images or a float tensor [N, D] of vectors"
    )


def as_rows(images: Images, index: Tensor) -> Tensor:
    """The chosen images as float32 rows: pixels in [0, 1], vectors as they are."""
    numbers = int(torch.tensor(images.shape[1:]).prod())
    needed = 4 * numbers * len(index)
    if needed > MOST_BYTES:
        raise UserError(
            f"{len(index):,} images of {numbers:,} numbers each take {needed / 2**30:.0f} GB as rows: "
            f"use at most {MOST_BYTES // 2**30} GB, smaller images, fewer images or embeddings (--encoder)"
        )
    return torch.cat([_rows(images[batch]) for batch in index.split(BATCH)])


def scored(images: Images, num_features: int, score: Callable[[Tensor], Tensor]) -> Tensor:
    """The scores of all images, computed a batch at a time; refuses images of another size than the fitted ones."""
    kind_of(images)
    numbers = int(torch.tensor(images.shape[1:]).prod())
    if numbers != num_features:
        raise UserError(
            f"images of {numbers:,} numbers each (shape {tuple(images.shape[1:])}), the detector was fitted on "
            f"{num_features:,}: give images of the size it was fitted on"
        )
    return torch.cat([torch.empty(0, dtype=torch.float64), *(score(rows).double().cpu() for rows in _batches(images))])


def hold_out(candidates: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Candidates to train on and candidates held out for calibration: a tenth, at least 30, at most half."""
    if len(candidates) < 2:
        raise UserError(
            f"{len(candidates)} normal or unlabelled images: at least 2 are needed, one to learn from and one to "
            f"calibrate with; add images, or check that the labels do not call them all 'anomaly'"
        )
    shuffled = candidates[torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))]
    held_out = min(max(LEAST_HELD_OUT, round(HELD_OUT_SHARE * len(candidates))), len(candidates) // 2)
    return shuffled[held_out:].sort().values, shuffled[:held_out].sort().values


def not_anomalies(codes: Tensor) -> Tensor:
    """Positions of everything but labelled anomalies."""
    return (codes != ANOMALY).nonzero().flatten()


def subsample(index: Tensor, most: int, seed: int) -> Tensor:
    """At most so many of the positions, drawn at random, in order."""
    if len(index) <= most:
        return index
    return index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))[:most]].sort().values


def _batches(images: Images) -> Iterator[Tensor]:
    return (_rows(images[start : start + BATCH]) for start in range(0, len(images), BATCH))


def _rows(images: Tensor) -> Tensor:
    rows = images.flatten(1).cpu().float()
    if images.dtype == torch.uint8:
        return rows / 255
    if not rows.isfinite().all():
        raise UserError("vectors hold NaN or infinite numbers: only finite ones are allowed; embed these images again")
    return rows
