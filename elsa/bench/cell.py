"""One cell: its training set, its detector, its AUROC, and the encoder it leaves for the next cells."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elsa.bench.as_published import score_as_published
from elsa.bench.encoders import EncoderStore
from elsa.bench.plans import AS_PUBLISHED, OF_DATASET, PRETRAINED_AS, VARIANTS, WATCHED, Cell
from elsa.bench.protocols import Benchmark
from elsa.bench.steered import SteeredElsa
from elsa.bench.watch import FinetuningWatch, Lookout, PretrainingWatch, embeddings, looked_at
from elsa.config import ElsaConfig
from elsa.detectors import build
from elsa.elsa import Elsa
from elsa.nets import Net, build_net, channels_last
from elsa.progress import Progress
from elsa.seeds import generator

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Told:
    """What all cells of a run are told: settings of Elsa and what stands on its pre-training, and of others by name."""

    device: str
    settings: dict[str, Any]
    own_settings: dict[str, dict[str, Any]]
    progress: Progress

    def how(self, cell: Cell) -> dict[str, Any]:
        """What every detector is told."""
        return {"seed": cell.seed, "device": self.device, "progress": self.progress}

    def encoder(self, cell: Cell) -> dict[str, Any]:
        """Settings of the encoder of a cell, which no variant changes."""
        return {**OF_DATASET.get(cell.dataset, {}), **self.settings, **self.how(cell)}

    def of(self, cell: Cell) -> dict[str, Any]:
        """Settings of the detector of a cell."""
        if cell.detector not in PRETRAINED_AS:
            return {**self.own_settings.get(cell.detector, {}), **self.how(cell)}
        return {**self.encoder(cell), **VARIANTS.get(cell.variant, {})}


@dataclass
class Ran:
    """What running a detector gave: scores of the test images, its settings, and what else its line says."""

    scores: np.ndarray
    settings: dict[str, Any]
    seconds: dict[str, float]
    more: dict[str, Any] = field(default_factory=dict)


class Stopwatch:
    """Seconds since the last look."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self.at = self.at, time.monotonic()
        return self.at - before


def run_cell(
    cell: Cell, benchmark: Benchmark, weights: Weights | None, told: Told, store: EncoderStore
) -> tuple[dict[str, Any], Weights | None]:
    """One cell's line, and the encoder for the next cells of its group."""
    seconds: dict[str, float] = {}
    more: dict[str, Any] = {"sets": benchmark.sets} if benchmark.sets else {}
    if cell.detector in PRETRAINED_AS:
        watch = Stopwatch()
        if weights is None:
            weights, seen = _encoder(cell, benchmark, told, store)
            more |= seen
        seconds["pretrain"] = watch.lap()
    if cell.variant == AS_PUBLISHED:
        ran = _as_published(cell, benchmark, told)
    elif cell.detector == "knn":
        assert weights is not None
        ran = _neighbours(cell, benchmark, weights, told)
    else:
        ran = _fitted(cell, benchmark, weights, told)
    per_class = benchmark.auroc_per_class(ran.scores, cell)
    line = {
        **cell.fields(),
        "auroc": round(float(np.mean(list(per_class.values()))), 3),
        "auroc_per_class": per_class,
        "seconds": {stage: round(spent, 2) for stage, spent in {**seconds, **ran.seconds}.items()},
        "settings": ran.settings,
        **more,
        **ran.more,
    }
    return line, weights


def _encoder(cell: Cell, benchmark: Benchmark, told: Told, store: EncoderStore) -> tuple[Weights, dict[str, Any]]:
    """Weights after pre-training, kept ones if there are any; looked at where the cell is about that."""
    images, labels = benchmark.pretraining_set(cell)
    encoder = SteeredElsa(method=PRETRAINED_AS[cell.detector], **told.encoder(cell))
    if not cell.watches_pretraining:
        return store.weights(cell, encoder, images, labels), {}
    _, _, hidden = benchmark.training_set(cell)
    watch = PretrainingWatch(encoder.config, images, hidden, benchmark.test_images, benchmark.is_anomaly(cell))
    encoder.steered_by = Lookout(watch)
    return encoder.pretrain(images, labels), {"watched": {"pretraining": watch.found}}


def _fitted(cell: Cell, benchmark: Benchmark, weights: Weights | None, told: Told) -> Ran:
    """A detector behind its two methods; a watched one is looked at on the way."""
    training, test_images, watch = benchmark.training_set(cell), benchmark.test_images, Stopwatch()
    images, labels, _ = training
    looks: FinetuningWatch | None = None
    if cell.variant == WATCHED and not cell.watches_pretraining:
        model: Any = SteeredElsa(method=cell.detector, **told.of(cell))
        looks = FinetuningWatch(model.config, test_images, benchmark.is_anomaly(cell), model.device)
        model.steered_by = Lookout(looks)
    else:
        model = build(cell.detector, **told.of(cell))
    given = (images, labels, weights) if cell.detector in PRETRAINED_AS else (images, labels)
    model.fit(*given)
    is_elsa = isinstance(model, Elsa)
    seconds = {"finetune" if is_elsa else "fit": watch.lap()}
    scores = model.anomaly_score(test_images).numpy()
    ran = Ran(scores, _settings(model), {**seconds, "score": watch.lap()})
    if is_elsa:
        ran.more["early_stop"] = [round(entry["early_stop"], 4) for entry in model.history_]
    if looks is not None:
        assert weights is not None
        before = _net(weights, images, model.config, told.device)
        ran.more["watched"] = looked_at(model, before, looks, training, test_images, benchmark.is_anomaly(cell))
    return ran


def _as_published(cell: Cell, benchmark: Benchmark, told: Told) -> Ran:
    watch = Stopwatch()
    images, labels, _ = benchmark.training_set(cell)
    test_images, is_anomaly = benchmark.test_images, benchmark.is_anomaly(cell)
    scores, chosen = score_as_published(cell.detector, images, labels, test_images, is_anomaly, cell.seed, told.device)
    return Ran(scores, chosen, {"fit": watch.lap()})


def _neighbours(cell: Cell, benchmark: Benchmark, weights: Weights, told: Told) -> Ran:
    """Nearest neighbours among the embeddings of the pre-trained network."""
    watch, device = Stopwatch(), torch.device(told.device)
    images, labels, _ = benchmark.training_set(cell)
    config = Elsa(method=PRETRAINED_AS["knn"], **told.encoder(cell)).config
    net = _net(weights, images, config, told.device)
    model = build("knn", **told.how(cell), **told.own_settings.get("knn", {}))
    model.fit(embeddings(net, images, config, device).cpu(), labels)
    seconds = {"fit": watch.lap()}
    scores = model.anomaly_score(embeddings(net, benchmark.test_images, config, device).cpu()).numpy()
    return Ran(scores, {**dataclasses.asdict(config), **_settings(model)}, {**seconds, "score": watch.lap()})


def _net(weights: Weights, images: Tensor, config: ElsaConfig, device: str) -> Net:
    """The network with these weights, for scoring."""
    _, channels, side, _ = images.shape
    net = build_net(config.encoder, config.stem, channels, side, config.shifts, generator(0, "replaced at once"))
    net = channels_last(net, torch.device(device))
    net.load_state_dict(weights)
    return net.eval()


def _settings(model: Any) -> dict[str, Any]:
    """What the detector was told and what it chose: its frozen settings, and the plain numbers it holds."""
    facts = vars(model)
    config = dataclasses.asdict(facts["config"]) if "config" in facts else {}
    chosen = {name: fact for name, fact in facts.items() if isinstance(fact, int | float | str)}
    return {**config, **{name: fact for name, fact in chosen.items() if name not in ("seed", "device", "method")}}
