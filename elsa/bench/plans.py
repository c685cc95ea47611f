"""The cells of the paper's tables: which detector on which split, in the order in which they should be filled."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elsa.data.benchmarks import CIFAR10_CLASSES as CLASSES
from elsa.data.benchmarks import IMAGENETTE_CLASSES

# Which method's pre-training a detector stands on; the others learn everything themselves.
PRETRAINED_AS = {"elsa+": "elsa+", "csi": "elsa+", "knn": "elsa+", "elsa": "elsa", "simclr": "elsa"}
POLLUTIONS = (0.0, 0.05, 0.1)
SEEDS = (0, 1, 2)

# A variant changes settings of its detector. The others say how a cell is run: WATCHED looks at the network after every
# epoch, AS_PUBLISHED selects with labels of a tenth of the test set, as the shallow rows of the paper did.
WATCHED, AS_PUBLISHED = "watched", "as published"
ABLATED = {
    "cosine score": {"score": "cosine"},
    "contrastive score": {"score": "contrastive"},
    "naive loss": {"loss": "naive"},
    "deep-sad loss": {"loss": "deep-sad"},
}
PROTOTYPE_COUNTS = (1, 50, 100, 200, 500)
VARIANTS: dict[str, dict[str, Any]] = {
    **ABLATED,
    **{f"K={count}": {"num_prototypes": count} for count in PROTOTYPE_COUNTS if count > 1},
    "K=1": {"num_prototypes": 1, "loss": "clamped"},
    WATCHED: {},
    AS_PUBLISHED: {},
}
# What a data set changes in the settings of Elsa and of what stands on its pre-training.
OF_DATASET: dict[str, dict[str, Any]] = {
    "imagenette64": {"num_prototypes": 20, "finetune_batch": 32, "finetune_lr": 5e-5},
}


@dataclass(frozen=True)
class Cell:
    """One experiment of a table; its line in results/ carries the same fields."""

    detector: str
    dataset: str
    normal: str
    labelled: str | None
    gamma_l: float
    gamma_p: float
    seed: int
    variant: str = ""

    @property
    def watches_pretraining(self) -> bool:
        """Whether the cell makes an encoder of its own, to look at it while it learns."""
        return self.variant == WATCHED and self.detector == "csi"

    @property
    def encoder(self) -> tuple[Any, ...] | None:
        """Cells with the same value share one pre-training; None where there is none to share."""
        if self.detector not in PRETRAINED_AS or self.watches_pretraining:
            return None
        return PRETRAINED_AS[self.detector], self.dataset, self.normal, self.gamma_p, self.seed

    @property
    def group(self) -> tuple[Any, ...]:
        """Cells with the same value are done by one process: those of an encoder, or a cell alone."""
        return self.encoder or tuple(asdict(self).values())

    def fields(self) -> dict[str, Any]:
        """As they stand in a results line."""
        return asdict(self)


def next_classes(normal: str, count: int, classes: Sequence[str] = CLASSES) -> list[str]:
    """The classes that follow in cyclic order, the labelled ones of the priority cells."""
    start = classes.index(normal)
    return [classes[(start + step) % len(classes)] for step in range(1, count + 1)]


def unsupervised(detectors: Iterable[str], pollutions: Iterable[float], variant: str = "") -> list[Cell]:
    """Detectors without labels, ten classes, three seeds; a pollution is complete before the next one starts."""
    return [
        Cell(detector, "cifar10", normal, None, 0.0, gamma_p, seed, variant)
        for gamma_p in pollutions
        for detector in detectors
        for seed in SEEDS
        for normal in CLASSES
    ]


def semi_supervised(detectors: Iterable[str], shares: Iterable[tuple[float, float]], variant: str = "") -> list[Cell]:
    """Detectors with labels at pairs of gamma_l and gamma_p, ten classes with the next one labelled, three seeds."""
    return [
        Cell(detector, "cifar10", normal, next_classes(normal, 1)[0], gamma_l, gamma_p, seed, variant)
        for gamma_l, gamma_p in shares
        for detector in detectors
        for seed in SEEDS
        for normal in CLASSES
    ]


def on_each_encoder(
    detector: str, unlabelled: str, gamma_l: float, count: int, seeds: Iterable[int], pollutions: Iterable[float]
) -> list[Cell]:
    """Per encoder the detector with each of the next `count` classes labelled, then the method without labels."""
    return [
        cell
        for seed in seeds
        for normal in CLASSES
        for gamma_p in pollutions
        for cell in (
            *(Cell(detector, "cifar10", normal, word, gamma_l, gamma_p, seed) for word in next_classes(normal, count)),
            Cell(unlabelled, "cifar10", normal, None, 0.0, gamma_p, seed),
        )
    ]


def pilot() -> list[Cell]:
    """Two cells in which the paper reaches 95.0 and 99.2."""
    return [
        Cell("elsa+", "cifar10", normal, labelled, 0.05, 0.0, 0)
        for normal, labelled in (("Plane", "Car"), ("Car", "Truck"))
    ]


def scenario2() -> list[Cell]:
    """Table 2: elsa+ at gamma_l .05 and three pollutions, the next three classes labelled, and csi on each encoder."""
    return on_each_encoder("elsa+", "csi", 0.05, 3, (0,), POLLUTIONS)


def scenario2_elsa() -> list[Cell]:
    """The same for elsa, and simclr on each encoder."""
    return on_each_encoder("elsa", "simclr", 0.05, 3, (0,), POLLUTIONS)


def scenario2_seeds() -> list[Cell]:
    """csi with the two other seeds, and elsa+ with the next class labelled while the encoder is there."""
    return on_each_encoder("elsa+", "csi", 0.05, 1, SEEDS[1:], POLLUTIONS)


def scenario2_shallow() -> list[Cell]:
    """Table 2's rows that need no GPU and no labels."""
    return unsupervised(("isolation-forest", "oc-svm", "kde"), POLLUTIONS)


def scenario2_baselines() -> list[Cell]:
    """Table 2's other rows, one pollution after the other."""
    return [
        cell
        for gamma_p in POLLUTIONS
        for cell in (
            *semi_supervised(("deep-sad", "ssad", "ss-dgm"), [(0.05, gamma_p)]),
            *unsupervised(("deep-svdd", "goad"), [gamma_p]),
        )
    ]


def scenario1_baselines() -> list[Cell]:
    """What Table 1 has beyond Table 2's clean column: the rows with labels at gamma_l .01 and .10."""
    return semi_supervised(("deep-sad", "ssad", "ss-dgm"), [(0.01, 0.0), (0.1, 0.0)])


def scenario1_elsa() -> list[Cell]:
    """Table 1's elsa at gamma_l .01 and .10."""
    return [
        Cell("elsa", "cifar10", normal, labelled, gamma_l, 0.0, 0)
        for normal in CLASSES
        for gamma_l in (0.01, 0.1)
        for labelled in next_classes(normal, 3)
    ]


def scenario1() -> list[Cell]:
    """Table 1 and the matrices: elsa+ at gamma_l .01 and .10 and every pollution, all nine classes labelled."""
    return [
        Cell("elsa+", "cifar10", normal, labelled, gamma_l, gamma_p, 0)
        for normal in CLASSES
        for gamma_p in POLLUTIONS
        for gamma_l in (0.01, 0.1)
        for labelled in next_classes(normal, 9)
    ]


def scenario2_rest() -> list[Cell]:
    """The six labelled classes that scenario2 leaves out, so that its matrices are complete."""
    return [
        Cell("elsa+", "cifar10", normal, labelled, 0.05, gamma_p, 0)
        for normal in CLASSES
        for gamma_p in POLLUTIONS
        for labelled in next_classes(normal, 9)[3:]
    ]


def scenario2_knn() -> list[Cell]:
    """Nearest neighbours on the embeddings of every encoder that elsa+ has in Table 2."""
    return [
        Cell("knn", "cifar10", normal, None, 0.0, gamma_p, seed)
        for seed in SEEDS
        for normal in CLASSES
        for gamma_p in POLLUTIONS
    ]


def as_published() -> list[Cell]:
    """The shallow rows once more, as their source ran them: explains a difference, and is no fair row. Needs no GPU."""
    detectors = ("isolation-forest", "oc-svm", "kde")
    return [cell for gamma_p in POLLUTIONS for cell in unsupervised(detectors, [gamma_p], AS_PUBLISHED)]


def as_published_ssad() -> list[Cell]:
    """The same for ssad, whose ten kernels take minutes a cell without a GPU."""
    shares = [*((0.05, gamma_p) for gamma_p in POLLUTIONS), (0.01, 0.0), (0.1, 0.0)]
    return semi_supervised(("ssad",), shares, AS_PUBLISHED)


def scenario3() -> list[Cell]:
    """Table 3: all of CIFAR-10 is normal; elsa+ has auxiliary images as labelled anomalies, csi and goad have none."""
    labelled = {"elsa+": "auxiliary", "csi": None, "goad": None}
    return [Cell(detector, "cifar10-all", "all", word, 0.0, 0.0, 0) for detector, word in labelled.items()]


def imagenet10() -> list[Cell]:
    """ImageNet-10 on its stand-in: gamma_l .10, clean and contaminated, the next three classes labelled; csi beside."""
    return [
        cell
        for normal in IMAGENETTE_CLASSES
        for gamma_p in (0.0, 0.1)
        for cell in (
            *(
                Cell("elsa+", "imagenette64", normal, word, 0.1, gamma_p, 0)
                for word in next_classes(normal, 3, IMAGENETTE_CLASSES)
            ),
            Cell("csi", "imagenette64", normal, None, 0.0, gamma_p, 0),
        )
    ]


def ablations() -> list[Cell]:
    """Table 4 and the early-stop correlation: Plane, gamma_l and gamma_p .05, nine labelled classes, three seeds."""
    return [
        Cell("elsa+", "cifar10", "Plane", labelled, 0.05, 0.05, seed, variant)
        for seed in SEEDS
        for labelled in next_classes("Plane", 9)
        for variant in (WATCHED, *ABLATED)
    ]


def prototype_counts() -> list[Cell]:
    """AUROC by prototype count: Plane, three pollutions, the next three classes labelled. 100 is scenario2's own."""
    return [
        Cell("elsa+", "cifar10", "Plane", labelled, 0.05, gamma_p, 0, f"K={count}")
        for gamma_p in POLLUTIONS
        for labelled in next_classes("Plane", 3)
        for count in PROTOTYPE_COUNTS
        if count != 100
    ]


def theory() -> list[Cell]:
    """Uniformity and energy of the training set while contrastive pre-training goes on, with pollution."""
    return [Cell("csi", "cifar10", "Plane", None, 0.0, 0.1, 0, WATCHED)]


PLANS: dict[str, Callable[[], list[Cell]]] = {
    "pilot": pilot,
    "scenario2": scenario2,
    "scenario2-shallow": scenario2_shallow,
    "scenario2-baselines": scenario2_baselines,
    "scenario1-baselines": scenario1_baselines,
    "scenario2-elsa": scenario2_elsa,
    "scenario2-seeds": scenario2_seeds,
    "scenario1-elsa": scenario1_elsa,
    "scenario2-rest": scenario2_rest,
    "scenario1": scenario1,
    "scenario2-knn": scenario2_knn,
    "as-published": as_published,
    "as-published-ssad": as_published_ssad,
    "scenario3": scenario3,
    "imagenet10": imagenet10,
    "ablations": ablations,
    "prototype-counts": prototype_counts,
    "theory": theory,
}
