"""Looks at Elsa while it learns: what the paper's analyses need beyond one AUROC. No test label selects anything."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from elsa.ablations import contrastive_energy, uniformity
from elsa.augment import plain
from elsa.checkpoint import Checkpoint
from elsa.config import ElsaConfig
from elsa.early_stop import rotation_summed_energy
from elsa.elsa import Elsa
from elsa.inference import PROJECTION_BATCH, fold_norms, project
from elsa.nets import Net
from elsa.training import fetch
from elsa.trust.metrics import auroc

Look = Callable[[int, Net, Tensor], None]
HISTOGRAMS_OF = (1, 2, 5, 10, 30, 50)  # epochs; the paper shows 1 and 2 and tells of 30
BINS = 40
UNIFORMITY_OF = (1, 2, 5, 10, 20, 40, 60, 80, 100, 120, 140, 160, 180, 250, 350, 500, 750, 1000)
POINTS_OF_EACH_KIND = 150


class Lookout(Checkpoint):
    """Stands where a checkpoint stands: handed the network after every epoch, it looks and writes nothing."""

    def __init__(self, look: Look):
        super().__init__(None, "")
        self.look = look

    def save(
        self, stage: str, epoch: int, parts: dict[str, Any], facts: dict[str, Any], loose: dict[str, Tensor], last: bool
    ) -> None:
        """Called by both loops at the end of an epoch."""
        net = parts["net"]
        was_training = net.training
        self.look(epoch, net.eval(), loose.get("current prototypes", torch.empty(0)))
        net.train(was_training)


class FinetuningWatch:
    """After every epoch: the AUROC on the test images; after some, histograms of their energies."""

    def __init__(self, config: ElsaConfig, test_images: Tensor, is_anomaly: np.ndarray, device: torch.device):
        self.config, self.images, self.is_anomaly, self.device = config, test_images, is_anomaly, device
        self.auroc: list[float] = []
        self.histograms: dict[str, dict[str, list[float]]] = {}

    def __call__(self, epoch: int, net: Net, prototypes_KD: Tensor) -> None:
        energies = self._energies(net, prototypes_KD)
        self.auroc.append(round(100 * auroc(energies, self.is_anomaly), 3))
        if epoch in HISTOGRAMS_OF:
            edges = np.linspace(energies.min(), energies.max(), BINS + 1)
            kinds = {"normal": energies[~self.is_anomaly], "anomalous": energies[self.is_anomaly]}
            counts = {kind: np.histogram(part, edges)[0].tolist() for kind, part in kinds.items()}
            self.histograms[str(epoch)] = {"edges": [round(edge, 4) for edge in edges.tolist()], **counts}

    def _energies(self, net: Net, prototypes_KD: Tensor) -> np.ndarray:
        """Summed over the rotations of each image as it is: a fortieth of the price of a full score."""
        batches = torch.arange(len(self.images)).split(PROJECTION_BATCH // self.config.shifts)
        folded, parts = fold_norms(net, self.config), (plain(fetch(self.images, b, self.device)) for b in batches)
        return torch.cat([rotation_summed_energy(folded, prototypes_KD, x, self.config).cpu() for x in parts]).numpy()


class PretrainingWatch:
    """After some epochs: uniformity and energy of the training images, and whether that energy knows anomalies."""

    def __init__(self, config: ElsaConfig, images: Tensor, hidden: np.ndarray, test: Tensor, is_anomaly: np.ndarray):
        self.config, self.images, self.hidden = config, images, torch.from_numpy(hidden)
        self.test, self.is_anomaly = test, is_anomaly
        self.found: list[dict[str, float]] = []

    def __call__(self, epoch: int, net: Net, prototypes_KD: Tensor) -> None:
        if epoch not in UNIFORMITY_OF and epoch != self.config.pretrain_epochs:
            return
        device, tau = next(net.parameters()).device, self.config.pretrain_tau
        z = embeddings(net, self.images, self.config, device)
        energy = contrastive_energy(z, z, tau, within=True).cpu()
        tested = embeddings(net, self.test, self.config, device)
        of_test = torch.cat([contrastive_energy(part, z, tau) for part in tested.split(PROJECTION_BATCH)]).cpu().numpy()
        figures = {
            "uniformity": float(uniformity(z)),
            "energy of normal training images": float(energy[~self.hidden].mean()),
            "energy of hidden anomalies": float(energy[self.hidden].mean()) if self.hidden.any() else float("nan"),
            "energy of normal test images": float(of_test[~self.is_anomaly].mean()),
            "energy of anomalous test images": float(of_test[self.is_anomaly].mean()),
            "auroc": 100 * auroc(of_test, self.is_anomaly),
        }
        kept = {name: round(value, 4) for name, value in figures.items() if value == value}
        self.found.append({"epoch": epoch, **kept})


def embeddings(net: Net, images: Tensor, config: ElsaConfig, device: torch.device) -> Tensor:
    """Unit projections of the images as they are, upright: [N, D]."""
    folded, batches = fold_norms(net, config), torch.arange(len(images)).split(PROJECTION_BATCH)
    raw = torch.cat([project(folded, plain(fetch(images, batch, device)), config) for batch in batches])
    return F.normalize(raw, dim=1)


def looked_at(
    model: Elsa,
    before: Net,
    watch: FinetuningWatch,
    training: tuple[Tensor, list[str], np.ndarray],
    test_images: Tensor,
    is_anomaly: np.ndarray,
) -> dict[str, Any]:
    """What the line of a watched cell carries: every figure of the analyses, as numbers that need no images."""
    return {
        "test_auroc": watch.auroc,
        "histograms": watch.histograms,
        "prototypes": images_per_prototype(model, training),
        "embedding": embedding_points({"csi": before, "elsa+": model.net_}, model, training, test_images, is_anomaly),
        "ensembles": both_ensembles(model, test_images, is_anomaly),
    }


def images_per_prototype(model: Elsa, training: tuple[Tensor, list[str], np.ndarray]) -> dict[str, list[int]]:
    """How many unlabelled and normal training images are nearest to each prototype, and how many of them are hidden."""
    images, labels, hidden = training
    normal_side = np.array([word != "anomaly" for word in labels])
    z = embeddings(model.net_, images, model.config, model.device)
    nearest = (z @ model.prototypes_.T).argmax(dim=1).cpu().numpy()
    count = len(model.prototypes_)
    return {
        "images": np.bincount(nearest[normal_side], minlength=count).tolist(),
        "hidden": np.bincount(nearest[hidden], minlength=count).tolist(),
    }


def embedding_points(
    nets: dict[str, Net],
    model: Elsa,
    training: tuple[Tensor, list[str], np.ndarray],
    test_images: Tensor,
    is_anomaly: np.ndarray,
) -> dict[str, Any]:
    """Some test embeddings of each network in the two directions in which they vary most, and its uniformity."""
    chosen = np.concatenate([np.flatnonzero(is_anomaly == kind)[:POINTS_OF_EACH_KIND] for kind in (False, True)])
    normal_side = torch.tensor([word != "anomaly" for word in training[1]])
    found: dict[str, Any] = {"is_anomaly": is_anomaly[chosen].astype(int).tolist()}
    for name, net in nets.items():
        z = embeddings(net, test_images[torch.from_numpy(chosen)], model.config, model.device).double()
        train = embeddings(net, training[0][normal_side.to(training[0].device)], model.config, model.device)
        flat = principal_coordinates(z).cpu().numpy().round(3).tolist()
        found[name] = {"points": flat, "uniformity": round(float(uniformity(train)), 4)}
    return found


def principal_coordinates(z_ND: Tensor) -> Tensor:
    """Coordinates [N, 2] along the two directions of largest variance; each points to its largest component."""
    centred = z_ND - z_ND.mean(dim=0)
    directions_2D = torch.linalg.svd(centred, full_matrices=False).Vh[:2]
    largest = directions_2D.gather(1, directions_2D.abs().argmax(dim=1, keepdim=True))
    return centred @ (directions_2D * largest.sign()).T


def both_ensembles(model: Elsa, test_images: Tensor, is_anomaly: np.ndarray) -> dict[str, float]:
    """AUROC of the mean projection's energy and of the mean energy, of one network with the same views."""
    found, own = {}, model.config
    for ensemble in ("projections", "scores"):
        model.config = dataclasses.replace(own, ensemble=ensemble)
        found[ensemble] = round(100 * auroc(model.anomaly_score(test_images).numpy(), is_anomaly), 3)
    model.config = own
    return found
