"""Elsa and Elsa+: fit() is the paper's algorithm in order, anomaly_score() its ensembled energy."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from elsa.augment import draw, one_view
from elsa.checkpoint import Checkpoint
from elsa.config import ElsaConfig, method_config
from elsa.distributed import check_together, synchronise_norms
from elsa.energy import ENSEMBLES
from elsa.errors import UserError
from elsa.finetune import finetune
from elsa.inference import PROJECTION_BATCH, filled_up, fold_norms, project
from elsa.labels import ANOMALY, UNLABELLED, encode_labels
from elsa.nets import Net, build_net, channels_last
from elsa.pretrain import pretrain
from elsa.progress import Progress, silent
from elsa.seeds import fold, generator
from elsa.training import fetch, reside, tuned

FEWEST_IMAGES = 16  # below this there is nothing to contrast, to cluster or to hold back


class Elsa:
    """Learns what is normal from mostly normal images and a few labels; scores are higher for anomalies."""

    def __init__(
        self,
        *,
        method: str = "elsa+",
        preset: str = "paper",
        seed: int = 0,
        device: str = "cpu",
        progress: Progress = silent,
        checkpoint: Path | None = None,
        **settings: Any,
    ):
        self.method = method
        self.config: ElsaConfig = method_config(method, preset, **settings)
        self.seed = seed
        self.device = torch.device(device)
        self.progress = progress
        self.checkpoint_path = checkpoint

    def fit(self, images: Any, labels: Sequence[str | None], pretrained: dict[str, Tensor] | None = None) -> Self:
        """Train on uint8 images [N, C, H, W] and their label words; `pretrained` weights replace pre-training."""
        label_N = self._checked(images, labels).to(self.device)
        images = reside(images, self.device)
        fingerprint = self._fingerprint(images, label_N)
        check_together("the images, labels, settings or seed", fingerprint)
        checkpoint = Checkpoint(self.checkpoint_path, fingerprint)
        net = synchronise_norms(self._new_net(images.shape))

        # 1. contrastive pre-training on everything but the labelled anomalies
        if pretrained is not None:
            net.load_state_dict(pretrained)
        elif not checkpoint.passed("pretrain"):
            normal_side = (label_N != ANOMALY).nonzero().flatten()
            pretrain(net, images, normal_side, self.config, self.seed, checkpoint, self.progress)

        # 2. to 4. prototypes, energy-based fine-tuning, the epoch with the best early-stop score
        held_back = self._held_back(label_N)
        self.prototypes_, self.history_ = finetune(
            net, images, label_N, held_back, self.config, self.seed, checkpoint, self.progress
        )
        self.net_ = net.eval()

        # 5. the energies of the held-back images are what a normal image's energy is compared with
        self.calibration_ = self.anomaly_score(fetch(images, held_back, self.device))
        return self

    def pretrain(self, images: Any, labels: Sequence[str | None]) -> dict[str, Tensor]:
        """Weights after contrastive pre-training alone, for several fits to share by fit(..., pretrained=weights)."""
        label_N = self._checked(images, labels).to(self.device)
        images = reside(images, self.device)
        fingerprint = self._fingerprint(images, label_N)
        check_together("the images, labels, settings or seed", fingerprint)
        checkpoint = Checkpoint(self.checkpoint_path, fingerprint)
        net = synchronise_norms(self._new_net(images.shape))
        normal_side = (label_N != ANOMALY).nonzero().flatten()
        pretrain(net, images, normal_side, self.config, self.seed, checkpoint, self.progress)
        return net.state_dict()

    @torch.no_grad()
    def anomaly_score(self, images: Any) -> Tensor:
        """Energy of each image over `views` weak augmentations times the rotations; higher is more anomalous.

        All images meet the same augmentations, so a score depends on the image and the seed alone.
        """
        self._check_images(images)
        if tuple(images.shape[1:]) != self.shape_:
            raise UserError(
                f"images of shape {list(images.shape[1:])} given, the model was fitted on {list(self.shape_)}"
            )
        config, views = self.config, draw(self.config.views, generator(self.seed, "score")).to(self.device)
        ensemble, net = ENSEMBLES[config.ensemble], fold_norms(self.net_, config)
        make_view = tuned(one_view, self.device)
        area, at_once, scores = (config.crop_area_min, config.crop_area_max), PROJECTION_BATCH // config.shifts, []
        for start in range(0, len(images), at_once):
            stop = min(len(images), start + at_once)
            batch = filled_up(fetch(images, torch.arange(start, stop), self.device), at_once)
            raw = [project(net, make_view(batch, view, config.shifts, *area), config) for view in views]
            raw_VRBD = torch.stack(raw).unflatten(1, (config.shifts, len(batch)))[:, :, : stop - start]
            scores.append(ensemble(raw_VRBD, self.prototypes_, config.score_tau).cpu())
            self.progress("score", stop, len(images), {})
        return torch.cat(scores) if scores else torch.empty(0)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that anomaly_score needs, as tensors and as what JSON can hold."""
        tensors = {f"net/{name}": tensor for name, tensor in self.net_.state_dict().items()}
        tensors |= {"prototypes": self.prototypes_, "calibration": self.calibration_}
        about = {
            "method": self.method,
            "settings": dataclasses.asdict(self.config),
            "seed": self.seed,
            "shape": list(self.shape_),
            "history": self.history_,
        }
        return tensors, about

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], about: dict[str, Any], *, device: str = "cpu", progress: Progress = silent
    ) -> Self:
        """The fitted detector that state() described."""
        model = cls(method=about["method"], seed=about["seed"], device=device, progress=progress, **about["settings"])
        net = model._new_net((0, *about["shape"]))
        weights = {k.removeprefix("net/"): t.to(model.device) for k, t in tensors.items() if k.startswith("net/")}
        net.load_state_dict(weights)
        model.net_ = net.eval()
        model.prototypes_ = tensors["prototypes"].to(model.device)
        model.calibration_ = tensors["calibration"]
        model.history_ = about["history"]
        return model

    def _new_net(self, shape: Sequence[int]) -> Net:
        _, channels, height, width = shape
        self.shape_ = (channels, height, width)
        config = self.config
        net = build_net(
            config.encoder, config.stem, channels, height, config.shifts, generator(self.seed, "initial weights")
        )
        return channels_last(net, self.device)

    def _held_back(self, label_N: Tensor) -> Tensor:
        """Places of the unlabelled images that only the early-stop score sees."""
        unlabelled = (label_N == UNLABELLED).nonzero().flatten()
        if not len(unlabelled):  # with labels for everything, hold back labelled normals
            unlabelled = (label_N != ANOMALY).nonzero().flatten()
        count = max(1, round(self.config.early_stop_share * len(unlabelled)))
        order = torch.randperm(len(unlabelled), generator=generator(self.seed, "held back"))
        return unlabelled[order[:count].to(unlabelled.device)].sort().values

    def _checked(self, images: Any, labels: Sequence[str | None]) -> Tensor:
        self._check_images(images)
        label_N = encode_labels(labels)
        if len(label_N) != len(images):
            raise UserError(
                f"{len(images)} images but {len(label_N)} labels; give one label for each image, '' if unknown"
            )
        height, width = images.shape[2:]
        if height != width or not 8 <= height <= 1024:
            raise UserError(
                f"images of {width}x{height} px given; Elsa turns images by 90 degrees and needs squares of 8 to 1024 "
                f"px (--size N makes them)"
            )
        normal_side = int((label_N != ANOMALY).sum())
        if normal_side < FEWEST_IMAGES:
            raise UserError(
                f"{normal_side} unlabelled or normal images given; Elsa learns what is normal from at least "
                f"{FEWEST_IMAGES}"
            )
        embeddings = normal_side * self.config.shifts
        if embeddings < self.config.num_prototypes:
            raise UserError(
                f"num_prototypes={self.config.num_prototypes} exceeds the {embeddings} embeddings of {normal_side} "
                f"unlabelled and normal images; use fewer prototypes (--set num_prototypes=N) or more images"
            )
        return label_N

    def _check_images(self, images: Any) -> None:
        if len(images.shape) != 4 or (isinstance(images, Tensor) and images.dtype != torch.uint8):
            raise UserError(
                f"images must be uint8 of shape [N, C, H, W], got {getattr(images, 'dtype', type(images).__name__)} "
                f"of shape {list(images.shape)}"
            )

    def _fingerprint(self, images: Any, label_N: Tensor) -> str:
        """Identifies the fit: images (64 of them), labels, settings and seed."""
        some = torch.linspace(0, len(images) - 1, 64).long()
        digest = hashlib.sha256(repr((self.config, self.seed, tuple(images.shape))).encode())
        digest.update(fetch(images, some, torch.device("cpu")).numpy().tobytes())
        digest.update(label_N.cpu().numpy().tobytes())
        return f"{digest.hexdigest()[:32]}-{fold(self.seed):x}"
