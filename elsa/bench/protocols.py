"""What a cell is trained on and tested on: one class against the others, or all of CIFAR-10 against other sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from elsa.bench.plans import Cell
from elsa.data.benchmark_sets import AUXILIARY, OUTLIERS, find_set, load_set
from elsa.data.benchmarks import CIFAR10_CLASSES, IMAGENETTE_CLASSES
from elsa.data.splits import one_class_split
from elsa.errors import UserError
from elsa.trust.metrics import auroc

Cifar10 = tuple[Tensor, Tensor, Tensor, Tensor]


class Benchmark(Protocol):
    """A data set under a protocol; the images it hands out are uint8 [N, C, S, S]."""

    @property
    def test_images(self) -> Tensor:
        """All of them, normal and anomalous."""
        ...

    @property
    def sets(self) -> dict[str, str]:
        """What the sets of the protocol really are, by the names the paper gives them; empty if that needs no word."""
        ...

    def training_set(self, cell: Cell) -> tuple[Tensor, list[str], np.ndarray]:
        """Images, their label words, and where an unlabelled image is a hidden anomaly."""
        ...

    def pretraining_set(self, cell: Cell) -> tuple[Tensor, list[str]]:
        """What the encoder sees: the same for every cell that shares it."""
        ...

    def is_anomaly(self, cell: Cell) -> np.ndarray:
        """Which of the test images are anomalies."""
        ...

    def auroc_per_class(self, scores: np.ndarray, cell: Cell) -> dict[str, float]:
        """Percent, normal test images against each kind of anomaly."""
        ...


@dataclass(frozen=True)
class OneClass:
    """One class is normal, the others are anomalies: Scenarios 1 and 2."""

    train_images: Tensor
    train_classes: np.ndarray
    test_images: Tensor
    test_classes: np.ndarray
    names: Sequence[str]
    sets: dict[str, str]

    def training_set(self, cell: Cell) -> tuple[Tensor, list[str], np.ndarray]:
        """X_n, X_u with its hidden anomalies, X_a."""
        labelled = None if cell.labelled is None else self.names.index(cell.labelled)
        return self._split(cell, labelled, cell.gamma_l)

    def pretraining_set(self, cell: Cell) -> tuple[Tensor, list[str]]:
        """The gamma_l 0 set, so that every gamma_l and labelled class can share the encoder."""
        images, labels, _ = self._split(cell, None, 0.0)
        return images, labels

    def is_anomaly(self, cell: Cell) -> np.ndarray:
        """All test images of the other classes."""
        return self.test_classes != self.names.index(cell.normal)

    def auroc_per_class(self, scores: np.ndarray, cell: Cell) -> dict[str, float]:
        """Percent, the normal class against each other one."""
        return auroc_per_class(scores, self.test_classes, self.names.index(cell.normal), self.names)

    def _split(self, cell: Cell, labelled: int | None, gamma_l: float) -> tuple[Tensor, list[str], np.ndarray]:
        normal = self.names.index(cell.normal)
        split = one_class_split(self.train_classes, normal, labelled, gamma_l, cell.gamma_p, cell.seed)
        return self.train_images[torch.from_numpy(split.index)], split.labels, split.hidden


@dataclass(frozen=True)
class AllAgainstOutliers:
    """All training images are unlabelled, an auxiliary set is labelled anomalous: Scenario 3."""

    train_images: Tensor
    auxiliary: Tensor
    normal_test_images: Tensor
    outliers: dict[str, Tensor]
    sets: dict[str, str]

    @property
    def test_images(self) -> Tensor:
        """The normal ones, then each set of outliers."""
        return torch.cat([self.normal_test_images, *self.outliers.values()])

    def training_set(self, cell: Cell) -> tuple[Tensor, list[str], np.ndarray]:
        """X_u, and the auxiliary images as X_a where the cell is given them."""
        known = self.auxiliary if cell.labelled is not None else self.auxiliary[:0]
        labels = [""] * len(self.train_images) + ["anomaly"] * len(known)
        return torch.cat([self.train_images, known]), labels, np.zeros(len(labels), bool)

    def pretraining_set(self, cell: Cell) -> tuple[Tensor, list[str]]:
        """X_u."""
        return self.train_images, [""] * len(self.train_images)

    def is_anomaly(self, cell: Cell) -> np.ndarray:
        """All but the first images."""
        return np.arange(len(self.test_images)) >= len(self.normal_test_images)

    def auroc_per_class(self, scores: np.ndarray, cell: Cell) -> dict[str, float]:
        """Percent, the normal images against each set."""
        found, start = {}, len(self.normal_test_images)
        normal = scores[:start]
        for name, images in self.outliers.items():
            both = np.concatenate([normal, scores[start : start + len(images)]])
            found[name] = round(100 * auroc(both, np.arange(len(both)) >= len(normal)), 3)
            start += len(images)
        return found


def auroc_per_class(
    scores: np.ndarray, classes: np.ndarray, normal: int, names: Sequence[str] = CIFAR10_CLASSES
) -> dict[str, float]:
    """Percent, normal test images against each other class."""
    return {
        name: round(100 * auroc(scores[chosen], classes[chosen] != normal), 3)
        for number, name in enumerate(names)
        if number != normal
        for chosen in [(classes == number) | (classes == normal)]
    }


def load_benchmark(dataset: str, cifar10: Cifar10 | None, data: Path | None, device: str) -> Benchmark:
    """The data set of a cell; its training images lie on the device, its test images in host memory."""
    if dataset.startswith("cifar10") and cifar10 is None:
        raise UserError(f"--cifar10 is needed for cells on {dataset}: name the folder cifar-10-batches-bin")
    if dataset == "cifar10":
        assert cifar10 is not None
        images, classes, test_images, test_classes = cifar10
        return OneClass(images.to(device), classes.numpy(), test_images, test_classes.numpy(), CIFAR10_CLASSES, {})
    if data is None:
        raise UserError(f"--data is needed for cells on {dataset}: name the folder that `elsa bench pack` filled")
    if dataset == "cifar10-all":
        assert cifar10 is not None
        return _all_against_outliers(cifar10, data, device)
    assert dataset == "imagenette64", dataset
    train, test = (load_set(data, (f"imagenette64-{part}",)) for part in ("train", "val"))
    number = {name: number for number, name in enumerate(IMAGENETTE_CLASSES)}
    trained, tested = (np.array([number[word] for word in part.classes]) for part in (train, test))
    sets = {"ImageNet-10": "imagenette64"}
    return OneClass(train.images.to(device), trained, test.images, tested, IMAGENETTE_CLASSES, sets)


def _all_against_outliers(cifar10: Cifar10, data: Path, device: str) -> AllAgainstOutliers:
    auxiliary = load_set(data, AUXILIARY)
    found = {name: find_set(data, names) for name, names in OUTLIERS.items()}
    outliers = {name: one.images for name, one in found.items() if one is not None}
    if not outliers:
        raise UserError(f"--data {data}: none of Table 3's sets is there; `elsa bench pack` makes some of them")
    sets = {name: one.name for name, one in found.items() if one is not None} | {"auxiliary": auxiliary.name}
    return AllAgainstOutliers(cifar10[0].to(device), auxiliary.images.to(device), cifar10[2], outliers, sets)
