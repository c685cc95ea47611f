"""The demo's task: one garment is normal, others hide among it; and the embedded images to pose it with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa.data.benchmarks import FASHION_MNIST_CLASSES
from elsa.errors import UserError

DEMO_FILE = Path(__file__).parent / "fashion_mnist" / "demo.npz"
BAG = FASHION_MNIST_CLASSES.index("bag")


@dataclass(frozen=True)
class DemoSplit:
    """A training set with hidden anomalies and a disjoint test set, as positions in the whole set."""

    train_index: NDArray[np.int64]
    labels: list[str]
    """'normal', '' or 'anomaly' for each training image."""
    hidden: NDArray[np.bool_]
    """True where an unlabelled training image is an anomaly: truth for the report, never shown to a detector."""
    test_index: NDArray[np.int64]
    test_anomaly: NDArray[np.bool_]


@dataclass(frozen=True)
class Demo:
    """The images of a demo split; train uint8 [N, 1, 28, 28], test uint8 [M, 1, 28, 28]."""

    images: Tensor
    labels: list[str]
    hidden: Tensor
    garments: list[str]
    """The garment each training image shows."""
    test_images: Tensor
    test_anomaly: Tensor
    test_garments: list[str]


def demo_split(
    class_ids: Sequence[int] | NDArray[np.integer],
    normal: int,
    seed: int,
    *,
    normals: int = 1350,
    hidden: int = 150,
    labelled_normals: int = 30,
    labelled_anomalies: int = 30,
    test: int = 1000,
) -> DemoSplit:
    """Draw the demo's task; anomalies of every group are spread evenly over all other classes.

    The labelled normals are among the `normals`; half of the `test` images are anomalies.
    """
    classes = np.asarray(class_ids)
    rng = np.random.default_rng([seed, normal])
    good = rng.permutation(np.flatnonzero(classes == normal))
    bad = _interleaved_classes(classes, normal, rng)
    for kind, pool, needed in (
        ("normal", good, normals + (test - test // 2)),
        ("other", bad, hidden + labelled_anomalies + test // 2),
    ):
        if len(pool) < needed:
            raise UserError(f"the split needs {needed} {kind} images, the set has {len(pool)}; ask for fewer")
    hidden_index, known, test_bad = np.split(bad, [hidden, hidden + labelled_anomalies])
    test_bad = test_bad[: test // 2]
    test_good = good[normals:][: test - test // 2]
    return DemoSplit(
        train_index=np.concatenate([good[:normals], hidden_index, known]),
        labels=["normal"] * labelled_normals
        + [""] * (normals - labelled_normals + hidden)
        + ["anomaly"] * labelled_anomalies,
        hidden=np.repeat([False, True, False], [normals, hidden, labelled_anomalies]),
        test_index=np.concatenate([test_good, test_bad]),
        test_anomaly=np.repeat([False, True], [len(test_good), len(test_bad)]),
    )


def _interleaved_classes(classes: NDArray, normal: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """All other images, so ordered that each run of K holds every one of the K other classes while they last."""
    bad = rng.permutation(np.flatnonzero(classes != normal))
    turn = np.empty(len(bad), np.int64)
    for kind in np.unique(classes[bad]):
        mine = np.flatnonzero(classes[bad] == kind)
        turn[mine] = np.arange(len(mine))
    return bad[np.argsort(turn, kind="stable")]


def load_demo(seed: int) -> Demo:
    """The embedded task: bags are normal, 10% other garments hide among them, 30 + 30 labels, a disjoint test set."""
    with np.load(DEMO_FILE, allow_pickle=False) as stored:
        images, garments = torch.from_numpy(stored["images"])[:, None], stored["garment"].tolist()
    split = demo_split([FASHION_MNIST_CLASSES.index(name) for name in garments], BAG, seed)
    return Demo(
        images=images[split.train_index],
        labels=split.labels,
        hidden=torch.from_numpy(split.hidden),
        garments=[garments[i] for i in split.train_index],
        test_images=images[split.test_index],
        test_anomaly=torch.from_numpy(split.test_anomaly),
        test_garments=[garments[i] for i in split.test_index],
    )
