"""Images packed in one file: Parquet with Hugging Face's image structs, CIFAR-10's binary files, .npz."""

import json
import lzma
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa.data.benchmarks import CIFAR10_CLASSES, CIFAR10_FILES, CIFAR10_IMAGES_PER_FILE, read_cifar10_file
from elsa.data.tables import PARQUET_ERRORS, open_parquet
from elsa.errors import UserError

# What numpy and zipfile raise on an .npz that is damaged or made to do damage; SyntaxError and the rest come from the
# header of an array, which is a Python literal.
NPZ_ERRORS = (
    OSError, ValueError, TypeError, KeyError, EOFError, NotImplementedError, RuntimeError, SyntaxError, MemoryError,
    OverflowError, tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip

PARQUET_ROWS = 32  # photos of 10 MB: 320 MB at a time


def parquet_columns(path: Path, image_column: str) -> tuple[list[str], dict[str, list[Any]]]:
    """A name for each row, and all columns but the images."""
    file = open_parquet(path)
    try:
        others = [name for name in file.schema_arrow.names if name != image_column]
        extra = file.read(columns=others).to_pydict() if others else {}
        paths = file.read(columns=[f"{image_column}.path"]).column(0).combine_chunks().field("path").to_pylist()
    except PARQUET_ERRORS as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if any(len(values) != len(paths) for values in extra.values()):
        raise UserError(f"{path} is damaged: its columns differ in length; write it again")
    if all(isinstance(name, str) and name for name in paths) and len(set(paths)) == len(paths):
        return [name.replace("\\", "/") for name in paths], extra
    return _numbered("row", len(paths)), extra


def class_words(path: Path, labels: list[Any]) -> list[Any]:
    """Labels with Hugging Face's class numbers replaced by the names the file itself declares for them."""
    about = (open_parquet(path).schema_arrow.metadata or {}).get(b"huggingface")
    try:
        names = json.loads(about)["info"]["features"]["label"]["names"] if about else None
    except (ValueError, LookupError, TypeError, RecursionError):  # declared for another column, or by other software
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return labels
    return [names[label] if isinstance(label, int) and 0 <= label < len(names) else None for label in labels]


def parquet_images(path: Path, column: str, records: Sequence[int]) -> Iterator[bytes | None]:
    """The encoded images of the given rows, which ascend; row groups without any of them are not read."""
    file = open_parquet(path)
    wanted = iter(records)
    record = next(wanted, None)
    first = 0
    try:
        for group in range(file.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows
            if record is not None and record < last:
                for batch in file.iter_batches(PARQUET_ROWS, row_groups=[group], columns=[f"{column}.bytes"]):
                    content = batch.column(0).field("bytes")
                    while record is not None and record < first + len(content):
                        yield content[record - first].as_py()
                        record = next(wanted, None)
                    first += len(content)
            first = last
    except PARQUET_ERRORS as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from error


def cifar10_columns(folder: Path) -> tuple[list[str], dict[str, list[Any]]]:
    """Names like train/00042, and the class and split of each."""
    names: list[str] = []
    extra: dict[str, list[Any]] = {"class": [], "split": []}
    for split, files in CIFAR10_FILES.items():
        classes = [k for name in files for k in read_cifar10_file(folder / name)[:, 0].tolist()]
        if max(classes) >= len(CIFAR10_CLASSES):
            raise UserError(
                f"{folder}: the {split} files name class {max(classes)}, CIFAR-10 has 0 to 9; fetch them again"
            )
        names += [f"{split}/{i:05d}" for i in range(len(classes))]
        extra["class"] += [CIFAR10_CLASSES[k] for k in classes]
        extra["split"] += [split] * len(classes)
    return names, extra


def cifar10_images(folder: Path, records: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Pixels [32, 32, 3] of the given records."""
    files = [name for part in CIFAR10_FILES.values() for name in part]
    opened: tuple[int, NDArray[np.uint8]] | None = None
    for record in records:
        number, row = divmod(record, CIFAR10_IMAGES_PER_FILE)
        if opened is None or opened[0] != number:
            opened = number, read_cifar10_file(folder / files[number])
        yield opened[1][row, 1:].reshape(3, 32, 32).transpose(1, 2, 0)


def npz_columns(path: Path) -> tuple[list[str], list[Any], dict[str, list[Any]]]:
    """Names, labels and all further arrays of the same length as columns."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if "images" not in stored.files:
                raise UserError(f"{path} has no array `images`; its arrays are {', '.join(stored.files) or 'none'}")
            with _npz_member(path) as (_, shape):
                count = shape[0]
            columns = {name: stored[name] for name in stored.files if name != "images"}
    except UserError:
        raise
    except NPZ_ERRORS as error:
        raise UserError(f"{path} is not an .npz of plain arrays, or is damaged: {error}") from error
    labels = columns.pop("labels", None)
    if labels is not None and labels.shape != (count,):
        raise UserError(
            f"{path}: `labels` has shape {list(labels.shape)}; give one word for each of the {count} images"
        )
    extra = {name: values.tolist() for name, values in columns.items() if values.shape[:1] == (count,)}
    return _numbered("image", count), [None] * count if labels is None else labels.tolist(), extra


def npz_images(path: Path, records: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Pixels [H, W] or [H, W, C] of the given records, unpacked one by one, so that the array may exceed memory."""
    try:
        with _npz_member(path) as (file, shape):
            size = int(np.prod(shape[1:]))
            row = 0
            for record in records:
                if record > row:
                    file.seek((record - row) * size, 1)
                content = file.read(size)
                if len(content) != size:
                    raise UserError(f"{path} ends in the middle of image {record}; it is incomplete")
                yield _channels_last(np.frombuffer(content, np.uint8).reshape(shape[1:]))
                row = record + 1
    except UserError:
        raise
    except NPZ_ERRORS as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from error


@contextmanager
def _npz_member(path: Path) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The open member images.npy, standing at its first pixel, and the shape its header declares."""
    with zipfile.ZipFile(path) as archive, archive.open("images.npy") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read_header(file)
        what = f"{path}: `images` is {dtype} {list(shape)}"
        if dtype != np.uint8:
            raise UserError(f"{what}; save it as uint8, 0 to 255")
        if fortran_order and len(shape) > 1:
            raise UserError(f"{what} in column order; save np.ascontiguousarray(images)")
        first = len(shape) == 4 and shape[1] in (1, 3)
        last = len(shape) == 4 and shape[3] in (1, 3, 4)
        if not (len(shape) == 3 or first or last) or 0 in shape:
            raise UserError(f"{what}; use [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels")
        if first and last:
            raise UserError(
                f"{what}, where the channels could be the second or the last axis; save [N, H, W] or resize"
            )
        yield file, shape


def _channels_last(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    return pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels


def _numbered(word: str, count: int) -> list[str]:
    return [f"{word}-{i:0{max(5, len(str(count)))}d}" for i in range(count)]
