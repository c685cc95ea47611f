"""Image sets larger than memory: raw uint8 pixels in shard files beside a JSON manifest, decoded once.

A shard counts as finished when its .json stands beside its .u8; both appear by rename, so that a kill at any moment
costs at most the shards under way. The manifest is written last.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa.data.images import Decoding
from elsa.errors import UserError

SHARD_BYTES = 64 << 20
OUR_FILES = re.compile(r"(manifest|\d{5})\.(u8|json)(\.partial)?")

# What a decoder makes of a record: its pixels, or the reason why there are none.
Decoded = NDArray[np.uint8] | str


class Shards:
    """Images uint8 [N, C, H, W] on disk; `shards[positions]` and `shards[a:b]` read just those into a tensor."""

    def __init__(self, folder: Path, counts: list[int], image_shape: tuple[int, int, int]) -> None:
        self.folder = folder
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.shape = torch.Size((int(self.first[-1]), *image_shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: Tensor | slice) -> Tensor:
        """The chosen images, as a new uint8 tensor; positions are a slice, integers or a mask."""
        positions = np.asarray(torch.arange(len(self))[chosen]).reshape(-1)
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        images = torch.empty((len(positions), *self.shape[1:]), dtype=torch.uint8)
        # Read in ascending order, neighbours in one go; files are opened per call (10 us each): no state to share
        # between threads or to lose in a fork, and no limit on the number of shards.
        pixels = images.numpy()
        buffer = pixels if np.array_equal(order, np.arange(len(order))) else np.empty_like(pixels)
        shard = np.searchsorted(self.first, ascending, side="right") - 1
        for number in np.unique(shard):
            begin, end = np.searchsorted(shard, [number, number + 1])
            self._read_runs(int(number), ascending[begin:end] - self.first[number], buffer[begin:end])
        if buffer is not pixels:
            pixels[order] = buffer
        return images

    def _read_runs(self, number: int, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        bytes_per_image = int(np.prod(self.shape[1:]))
        starts = np.concatenate([[0], np.flatnonzero(np.diff(rows) != 1) + 1, [len(rows)]]).tolist()
        flat = out.reshape(-1).data  # a view, for `out` is a contiguous slice
        with open(_shard_file(self.folder, number), "rb", buffering=0) as file:
            for begin, end in itertools.pairwise(starts):
                file.seek(int(rows[begin]) * bytes_per_image)
                _read_fully(file, flat[begin * bytes_per_image : end * bytes_per_image])


@dataclass(frozen=True)
class Stored:
    """A finished cache: the images that decoded, and which records did not."""

    shards: Shards
    broken: list[tuple[int, str]]
    """(record, reason), ascending"""


def cache_folder(cache: Path, source: Path) -> Path:
    """The folder for one source in a cache that may serve several."""
    where = os.path.realpath(source)
    return cache / f"{Path(where).name or 'root'}-{hashlib.sha256(os.fsencode(where)).hexdigest()[:8]}"


def read_manifest(folder: Path, fingerprint: str) -> dict[str, Any] | None:
    """What was noted when the cache was begun; None if there is no cache, or one of other files or settings."""
    try:
        about = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and about.get("fingerprint") == fingerprint else None


def build_shards(
    folder: Path,
    fingerprint: str,
    names: list[str],
    how: Decoding,
    decoded: Callable[[Iterable[int]], Iterator[Decoded]],
    progress: Callable[[int], None],
) -> Stored:
    """Decode what a former run has not, and open the whole; `decoded(records)` yields one result per record."""
    image_shape = (how.channels, how.size, how.size)
    bytes_per_image = how.channels * how.size * how.size
    per_shard = max(1, SHARD_BYTES // bytes_per_image)
    ranges = [range(first, min(first + per_shard, len(names))) for first in range(0, len(names), per_shard)]
    try:
        if read_manifest(folder, fingerprint) is None:
            _clear(folder)
            folder.mkdir(parents=True, exist_ok=True)
            about = {"fingerprint": fingerprint, "decoding": asdict(how), "image_shape": image_shape, "names": names}
            _write(folder / "manifest.json", json.dumps(about).encode())
        finished = [_read_sidecar(folder, number, bytes_per_image) for number in range(len(ranges))]
        missing = [number for number, sidecar in enumerate(finished) if sidecar is None]
        _check_room(folder, sum(len(ranges[number]) for number in missing) * bytes_per_image)
        done = len(names) - sum(len(ranges[number]) for number in missing)
        progress(done)
        results = decoded(record for number in missing for record in ranges[number])
        for number in missing:
            pixels = np.empty((len(ranges[number]), *image_shape), np.uint8)
            broken: list[tuple[int, str]] = []
            for record in ranges[number]:
                result = next(results)
                if isinstance(result, str):
                    broken.append((record, result))
                else:
                    pixels[record - ranges[number].start - len(broken)] = result
                done += 1
                progress(done)
            count = len(pixels) - len(broken)
            _write(_shard_file(folder, number), pixels[:count].data)
            finished[number] = {"count": count, "broken": broken}
            _write(_shard_file(folder, number).with_suffix(".json"), json.dumps(finished[number]).encode())
    except OSError as error:
        raise UserError(
            f"cache {folder} cannot be written: {error.strerror or error}; free some space or choose another one"
        ) from error
    sidecars = [sidecar for sidecar in finished if sidecar is not None]
    return Stored(
        shards=Shards(folder, [sidecar["count"] for sidecar in sidecars], image_shape),
        broken=[(record, reason) for sidecar in sidecars for record, reason in sidecar["broken"]],
    )


def _shard_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.u8"


def _read_sidecar(folder: Path, number: int, bytes_per_image: int) -> dict[str, Any] | None:
    path = _shard_file(folder, number)
    try:
        sidecar = json.loads(path.with_suffix(".json").read_text())
        whole = path.stat().st_size == sidecar["count"] * bytes_per_image
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or damaged: decoded again
    return sidecar if whole else None


def _clear(folder: Path) -> None:
    """Remove a cache of other files or settings, and nothing that is not ours."""
    if folder.is_dir():
        for path in folder.iterdir():
            if OUR_FILES.fullmatch(path.name):
                path.unlink()


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"cache {folder} needs {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free; free some space, "
            f"choose another cache folder or a smaller size"
        )


def _write(path: Path, content: bytes | memoryview) -> None:
    """Write under another name, then rename. The other name is fixed, so that killed runs leave no litter behind."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _read_fully(file: Any, view: memoryview) -> None:
    while view:
        got = file.readinto(view)
        if not got:
            raise UserError(
                f"cache file {file.name} is shorter than its manifest says; delete its folder and run again"
            )
        view = view[got:]
