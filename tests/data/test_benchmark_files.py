"""Loaders of public sets, on files of the right layout made here, and on the real ones where they lie."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from elsa.data import benchmarks
from elsa.data.benchmarks import CIFAR10_CLASSES, load_cifar10, load_fashion_mnist
from elsa.errors import UserError

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """Six files of 20 images each, class k in a pattern that tells channel, row and column apart."""
    monkeypatch.setattr(benchmarks, "CIFAR10_IMAGES_PER_FILE", 20)
    monkeypatch.setattr(benchmarks, "CIFAR10_CHECKSUMS", {})
    image = (np.arange(3)[:, None, None] * 64 + np.arange(32)[:, None] + np.arange(32) % 2 * 32).astype(np.uint8)
    for number, name in enumerate([*benchmarks.CIFAR10_FILES["train"], *benchmarks.CIFAR10_FILES["test"]]):
        records = [bytes([k % 10]) + (image + number).tobytes() for k in range(20)]
        (tmp_path / name).write_bytes(b"".join(records))
    return tmp_path, image


def test_cifar10_layout(small_cifar10):
    folder, image = small_cifar10
    train, train_classes, test, test_classes = load_cifar10(folder)
    assert train.shape == (100, 3, 32, 32)
    assert test.shape == (20, 3, 32, 32)
    assert train_classes.tolist() == [k % 10 for k in range(20)] * 5
    assert test_classes.dtype == torch.int64
    np.testing.assert_array_equal(train[0].numpy(), image)
    np.testing.assert_array_equal(train[99].numpy(), image + 4)
    np.testing.assert_array_equal(test[19].numpy(), image + 5)


def test_cifar10_classes_have_the_names_of_the_paper():
    assert CIFAR10_CLASSES == ["Plane", "Car", "Bird", "Cat", "Deer", "Dog", "Frog", "Horse", "Ship", "Truck"]


def test_cifar10_of_wrong_size_or_class_counts_is_refused(small_cifar10):
    folder, _ = small_cifar10
    path = folder / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(bytes([9]) + content[1:])
    with pytest.raises(UserError, match="images per class"):
        load_cifar10(folder)
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"data_batch_3.bin has 61459 bytes"):
        load_cifar10(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"data_batch_3.bin: No such file"):
        load_cifar10(folder)


def test_fashion_mnist_of_another_shape_is_refused(tmp_path):
    with pytest.raises(UserError, match="dataset-fashion-mnist"):
        load_fashion_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb") as file:
        file.write(bytes([0, 0, 8, 3]) + (2).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2 + bytes(2 * 28 * 28))
    with pytest.raises(UserError, match="is not the Fashion-MNIST file"):
        load_fashion_mnist(tmp_path)
    path.write_bytes(b"not gzip")
    with pytest.raises(UserError, match="Fashion-MNIST's four"):
        load_fashion_mnist(tmp_path)


@pytest.mark.skipif(not DEBIAN_FOLDER.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_fashion_mnist_of_debian():
    train, train_classes, test, test_classes = load_fashion_mnist(DEBIAN_FOLDER)
    assert train.shape == (60000, 1, 28, 28)
    assert test.shape == (10000, 1, 28, 28)
    assert train_classes.bincount().tolist() == [6000] * 10
    assert test_classes.bincount().tolist() == [1000] * 10
    with np.load(Path(benchmarks.__file__).parent / "fashion_mnist" / "demo.npz") as demo:
        index = demo["fashion_mnist_index"]
        np.testing.assert_array_equal(demo["images"], train[index, 0].numpy())
        assert demo["garment"].tolist() == [benchmarks.FASHION_MNIST_CLASSES[k] for k in train_classes[index]]


@pytest.mark.skipif("ELSA_CIFAR10" not in os.environ, reason="needs CIFAR-10: set ELSA_CIFAR10 to its folder")
def test_real_cifar10():
    train, train_classes, test, _ = load_cifar10(Path(os.environ["ELSA_CIFAR10"]))
    assert train.shape == (50000, 3, 32, 32)
    assert test.shape == (10000, 3, 32, 32)
    assert train_classes[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile: as published
