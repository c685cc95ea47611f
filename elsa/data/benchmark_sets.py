"""The sets the benchmark reads beside CIFAR-10, by name: packed for the journey, or in their publishers' layouts."""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from elsa.errors import UserError

# Stands in for the set whose own name it does not bear; docs/benchmark.md says how each was made.
PACKED = (
    "cifar100-test",
    "svhn-test-cropped-10k",
    "tinyimagenet-test-32",
    "tinyimagenet-aux20k-32",
    "imagenette64-train",
    "imagenette64-val",
)
# Table 3's sets, each with the names under which it may be had, the original first.
OUTLIERS = {
    "SVHN": ("svhn", "svhn-test-cropped-10k"),
    "LSUN": ("lsun",),
    "LSUN (FIX)": ("lsun-fix",),
    "ImageNet (FIX)": ("imagenet-fix", "tinyimagenet-test-32"),
    "CIFAR-100": ("cifar100", "cifar100-test"),
}
AUXILIARY = ("imagenet-auxiliary", "tinyimagenet-aux20k-32")
SVHN_TEST_MD5 = "eb5a983be6a315427106f1b164d9cef3"
CIFAR100_TEST_IMAGES = 10_000
CIFAR100_RECORD = 2 + 3 * 32 * 32
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SIDE = 32


@dataclass(frozen=True)
class NamedSet:
    """Images uint8 [N, 3, S, S] and the class name of each."""

    name: str
    images: Tensor
    classes: np.ndarray


def find_set(folder: Path, names: tuple[str, ...]) -> NamedSet | None:
    """The first of these sets that lies in the folder; None if none does."""
    for name in names:
        if name in PUBLISHED:
            where, reader = PUBLISHED[name]
            if (Path(folder) / where).exists():
                return reader(name, Path(folder) / where)
        else:
            packed = sorted(Path(folder).rglob(f"{name}.npz"))
            if packed:
                return read_packed(packed[0])
    return None


def load_set(folder: Path, names: tuple[str, ...]) -> NamedSet:
    """The first of these sets that lies in the folder."""
    found = find_set(folder, names)
    if found is None:
        wanted = " or ".join(str(PUBLISHED[name][0]) if name in PUBLISHED else f"{name}.npz" for name in names)
        raise UserError(f"--data {folder}: {wanted} is not there; `elsa bench pack` makes the .npz files")
    return found


def write_packed(path: Path, encoded: list[bytes], classes: list[str]) -> None:
    """Image files as they are and their class names, in one .npz that numpy and Pillow alone can read."""
    ends = np.cumsum([len(content) for content in encoded])
    names, kinds = np.unique(np.array(classes), return_inverse=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = np.frombuffer(b"".join(encoded), np.uint8)
    np.savez(path, content=content, ends=ends, classes=kinds.astype(np.int64), names=names)


def read_packed(path: Path) -> NamedSet:
    """What write_packed wrote, decoded."""
    try:
        with np.load(path, allow_pickle=False) as file:
            content, ends, kinds, names = (file[key] for key in ("content", "ends", "classes", "names"))
        starts = np.concatenate([[0], ends[:-1]])
        pixels = [_pixels(io.BytesIO(content[a:b].tobytes())) for a, b in zip(starts, ends, strict=True)]
        return NamedSet(path.stem, _stacked(pixels), names[kinds])
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: {error}; make it again with `elsa bench pack`") from error


def read_cifar100(name: str, path: Path) -> NamedSet:
    """CIFAR-100's test.bin of the binary version: coarse class, fine class, then the three planes."""
    records = np.fromfile(path, np.uint8)
    if records.size != CIFAR100_RECORD * CIFAR100_TEST_IMAGES:
        expected = CIFAR100_RECORD * CIFAR100_TEST_IMAGES
        raise UserError(f"{path} has {records.size} bytes, CIFAR-100's test.bin has {expected}; fetch the file again")
    records = records.reshape(-1, CIFAR100_RECORD)
    if len(set(np.bincount(records[:, 1], minlength=100))) != 1:
        raise UserError(f"{path} does not hold 100 classes of one size; fetch CIFAR-100's binary version again")
    images = np.ascontiguousarray(records[:, 2:]).reshape(-1, 3, SIDE, SIDE)
    return NamedSet(name, torch.from_numpy(images), records[:, 1].astype(str))


def read_svhn(name: str, path: Path) -> NamedSet:
    """SVHN's test_32x32.mat: X [32, 32, 3, N] and y with 10 for the digit 0."""
    from scipy.io import loadmat

    content = path.read_bytes()
    if hashlib.md5(content).hexdigest() != SVHN_TEST_MD5:
        raise UserError(f"{path} is not SVHN's test_32x32.mat (md5 {SVHN_TEST_MD5}); fetch the file again")
    file = loadmat(io.BytesIO(content))
    images = np.ascontiguousarray(file["X"].transpose(3, 2, 0, 1))
    return NamedSet(name, torch.from_numpy(images), (file["y"].ravel() % 10).astype(str))


def read_folder(name: str, folder: Path) -> NamedSet:
    """All image files below the folder in the order of their paths, at 32 px; a class is the folder an image is in."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS)
    if not paths:
        raise UserError(f"{folder} holds no image file ({', '.join(IMAGE_ENDINGS)})")
    return NamedSet(name, _stacked([_pixels(path, SIDE) for path in paths]), np.array([p.parent.name for p in paths]))


def _pixels(source: Path | io.BytesIO, side: int | None = None) -> np.ndarray:
    try:
        with Image.open(source) as file:
            image = file.convert("RGB")
            if side is not None and image.size != (side, side):
                # Pillow's filter is as wide as the reduction: free of the artefacts that the FIX sets were made against
                image = image.resize((side, side), Image.Resampling.BILINEAR)
            return np.array(image)
    except (OSError, UnidentifiedImageError) as error:
        given = source if isinstance(source, Path) else "an image"
        raise UserError(f"{given} cannot be read: {error}; remove it or fetch the set again") from error


def _stacked(pixels: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(pixels).transpose(0, 3, 1, 2).copy())


# Where each published set lies below --data, under the name its archive unpacks to, and what reads it.
PUBLISHED: dict[str, tuple[Path, Callable[[str, Path], NamedSet]]] = {
    "cifar100": (Path("cifar-100-binary/test.bin"), read_cifar100),
    "svhn": (Path("test_32x32.mat"), read_svhn),
    "lsun": (Path("LSUN_resize"), read_folder),
    "lsun-fix": (Path("LSUN_fix"), read_folder),
    "imagenet-fix": (Path("Imagenet_fix"), read_folder),
    "imagenet-auxiliary": (Path("imagenet_auxiliary"), read_folder),
}
