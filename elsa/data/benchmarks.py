"""Public benchmark sets in the layouts their publishers chose; the files stay where the user has them."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from elsa.errors import UserError

CIFAR10_CLASSES = ["Plane", "Car", "Bird", "Cat", "Deer", "Dog", "Frog", "Horse", "Ship", "Truck"]
CIFAR10_FILES = {
    "train": [f"data_batch_{k}.bin" for k in range(1, 6)],
    "test": ["test_batch.bin"],
}
CIFAR10_RECORD = 1 + 3 * 32 * 32
CIFAR10_IMAGES_PER_FILE = 10_000
# Sum of the CRC-32 of all records: the same whatever their order, so that any complete copy passes.
CIFAR10_CHECKSUMS = {"train": 107599159257505, "test": 21341954354611}
IMAGENETTE_CLASSES = [
    "tench", "English springer", "cassette player", "chain saw", "church", "French horn", "garbage truck", "gas pump",
    "golf ball", "parachute",
]  # fmt: skip
FASHION_MNIST_CLASSES = [
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
]  # fmt: skip


def load_cifar10(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images uint8 [50000, 3, 32, 32], their classes int64, test images [10000, 3, 32, 32], their classes."""
    folder = Path(folder)
    train = [read_cifar10_file(folder / name) for name in CIFAR10_FILES["train"]]
    test = [read_cifar10_file(folder / name) for name in CIFAR10_FILES["test"]]
    return *_join_cifar10(folder, "train", train), *_join_cifar10(folder, "test", test)


def read_cifar10_file(path: Path) -> np.ndarray:
    """Records [10000, 3073] of one batch file: the class, then the red, green and blue plane."""
    expected = CIFAR10_RECORD * CIFAR10_IMAGES_PER_FILE
    try:
        records = np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; expected CIFAR-10's binary version, a folder with data_batch_1.bin to "
            f"data_batch_5.bin and test_batch.bin"
        ) from error
    if records.size != expected:
        raise UserError(f"{path} has {records.size} bytes, a CIFAR-10 batch has {expected}; fetch the file again")
    return records.reshape(CIFAR10_IMAGES_PER_FILE, CIFAR10_RECORD)


def _join_cifar10(folder: Path, part: str, files: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    records = np.concatenate(files)
    counts = np.bincount(records[:, 0], minlength=10)
    if len(counts) != 10 or len(set(counts)) != 1:
        raise UserError(
            f"{folder}: the {part} files hold {counts.tolist()} images per class, CIFAR-10 has ten equal ones"
        )
    if CIFAR10_CHECKSUMS.get(part, checksum(records)) != checksum(records):
        raise UserError(f"{folder}: the {part} files do not hold CIFAR-10's images and classes; fetch them again")
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64))


def checksum(records: np.ndarray) -> int:
    """Sum of the CRC-32 of each row: changes with any byte, not with the order of the rows."""
    return sum(zlib.crc32(record) for record in np.ascontiguousarray(records))


def load_fashion_mnist(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images uint8 [60000, 1, 28, 28], their classes int64, test images [10000, 1, 28, 28], their classes."""
    folder = Path(folder)
    parts: list[Tensor] = []
    for prefix, count in (("train", 60_000), ("t10k", 10_000)):
        images = _read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", (count, 28, 28))
        classes = _read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", (count,))
        parts += [images[:, None], classes.long()]
    return parts[0], parts[1], parts[2], parts[3]


def _read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise UserError(
            f"{path}: {error}; expected Fashion-MNIST's four .gz files (Debian: package dataset-fashion-mnist)"
        ) from error
    # idx header: two zero bytes, 8 for unsigned bytes, the number of axes, then each length as big-endian 32 bits
    header = bytes([0, 0, 8, len(shape)]) + b"".join(length.to_bytes(4, "big") for length in shape)
    if not content.startswith(header) or len(content) != len(header) + int(np.prod(shape)):
        raise UserError(f"{path} is not the Fashion-MNIST file of that name; fetch it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=len(header)).reshape(shape)
