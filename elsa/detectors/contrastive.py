"""CSI and SimCLR scores: how near the nearest training embedding is, on the network that Elsa's pre-training leaves.

Shape suffixes: R rotations, N training images, B images, D numbers in a projection.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elsa.augment import draw, one_view
from elsa.config import ElsaConfig
from elsa.detectors.inputs import Images, hold_out, not_anomalies
from elsa.detectors.networks import checked_pixels, each_batch, packed, score_batches, unpack
from elsa.elsa import Elsa
from elsa.inference import PROJECTION_BATCH, fold_norms, project
from elsa.nets import EMBEDDING, Net, build_net
from elsa.progress import Progress, silent
from elsa.seeds import generator
from elsa.training import fetch, reside, tuned


def nearest_cosine(z_BD: Tensor, bank_ND: Tensor) -> Tensor:
    """Cosine to the nearest of the unit vectors `bank_ND`, in [-1, 1]."""
    return (F.normalize(z_BD, dim=1) @ bank_ND.T).amax(dim=1)


def csi_score(z_RBD: Tensor, logit_RB: Tensor, bank_RND: Tensor, norm_R: Tensor, mean_logit_R: Tensor) -> Tensor:
    """Minus the sum over rotations of cosine times norm and of the rotation's logit, each over its training mean."""
    near_RB = torch.stack([nearest_cosine(z_BD, bank_ND) for z_BD, bank_ND in zip(z_RBD, bank_RND, strict=True)])
    likeness_RB = near_RB * z_RBD.norm(dim=2) / norm_R[:, None]
    return -(likeness_RB + logit_RB / mean_logit_R[:, None]).sum(dim=0)


class _Outputs(nn.Module):
    """Projections and rotation logits side by side, so that project() serves both."""

    def __init__(self, net: Net):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.cat(self.net(x), dim=1),)


class CSIDetector:
    """Contrastive pre-training with rotations as shifts, then CSI's score; labelled anomalies are left out."""

    pretraining = "elsa+"
    settings_class = ElsaConfig

    def __init__(
        self,
        *,
        preset: str = "paper",
        seed: int = 0,
        device: str = "cpu",
        progress: Progress = silent,
        checkpoint: Path | None = None,
        **settings: Any,
    ):
        common: dict[str, Any] = {"seed": seed, "device": device, "progress": progress}
        self.encoder = Elsa(method=self.pretraining, preset=preset, checkpoint=checkpoint, **common, **settings)
        self.config = self.encoder.config
        self.seed, self.device, self.progress = seed, torch.device(device), progress

    def fit(self, images: Images, labels: Sequence[str | None], pretrained: dict[str, Tensor] | None = None) -> Self:
        """Pre-train on uint8 images [N, C, H, H], or take `pretrained` weights of Elsa.pretrain; remember embeddings.

        The images that calibrate are kept out of the memory, where each would find itself; pre-training sees them, as
        Elsa's does.
        """
        codes = checked_pixels("contrastive learning", images, labels)
        resident = reside(images, self.device)
        weights = self.encoder.pretrain(resident, labels) if pretrained is None else pretrained
        self.shape_ = tuple(images.shape[1:])
        self.net_ = self._new_net()
        self.net_.load_state_dict(weights)
        self.folded_ = fold_norms(self.net_.eval(), self.config)
        train, held_out = hold_out(not_anomalies(codes), self.seed)
        self._remember(*self._outputs(resident, train.to(self.device)))
        self.calibration_ = self.anomaly_score(fetch(resident, held_out, self.device))
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """CSI's score over ten weak augmentations in four rotations; higher is more anomalous."""
        return score_batches(images, self.shape_, self._at_once, self.device, self._score_batch, self.progress)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that anomaly_score needs, as tensors and as what JSON can hold."""
        about = {"settings": dataclasses.asdict(self.config), "seed": self.seed, "shape": list(self.shape_)}
        memory = {"bank": self.bank_RND_, "norm": self.norm_R_, "logit": self.mean_logit_R_}
        return packed(self.net_, calibration=self.calibration_, **memory), about

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], about: dict[str, Any], *, device: str = "cpu", progress: Progress = silent
    ) -> Self:
        """The fitted detector that state() described."""
        model = cls(seed=about["seed"], device=device, progress=progress, **about["settings"])
        model.shape_ = tuple(about["shape"])
        model.net_ = model._new_net()
        unpack(model.net_, tensors)
        model.folded_ = fold_norms(model.net_, model.config)
        model.bank_RND_ = tensors["bank"].to(model.device)
        model.norm_R_, model.mean_logit_R_ = tensors["norm"].to(model.device), tensors["logit"].to(model.device)
        model.calibration_ = tensors["calibration"]
        return model

    @property
    def _at_once(self) -> int:
        return PROJECTION_BATCH // self.config.shifts

    def _remember(self, z_RND: Tensor, logit_RN: Tensor) -> None:
        self.bank_RND_ = F.normalize(z_RND, dim=2)
        self.norm_R_, self.mean_logit_R_ = z_RND.norm(dim=2).mean(dim=1), logit_RN.mean(dim=1)

    def _score(self, z_RBD: Tensor, logit_RB: Tensor) -> Tensor:
        return csi_score(z_RBD, logit_RB, self.bank_RND_, self.norm_R_, self.mean_logit_R_)

    def _score_batch(self, images: Tensor) -> Tensor:
        return self._score(*self._split(self._mean_outputs(images)))

    def _outputs(self, images: Images, index_N: Tensor) -> tuple[Tensor, Tensor]:
        """Mean projections [R, N, D] of all rotations and the logit [R, N] of the rotation that was applied."""
        return self._split(each_batch(images, index_N, self._at_once, self.device, self._mean_outputs))

    def _split(self, outputs_BRO: Tensor) -> tuple[Tensor, Tensor]:
        z_RBD = outputs_BRO[:, :, :EMBEDDING].transpose(0, 1)
        return z_RBD, outputs_BRO[:, :, EMBEDDING:].diagonal(dim1=1, dim2=2).T

    def _mean_outputs(self, images: Tensor) -> Tensor:
        """Projections and logits of each rotation, averaged over the augmentations all images share: [B, R, D + R]."""
        config, module = self.config, _Outputs(self.folded_)
        views = draw(config.views, generator(self.seed, "score")).to(self.device)
        total, make_view = torch.zeros((), device=self.device), tuned(one_view, self.device)
        for view in views:
            x = make_view(images, view, config.shifts, config.crop_area_min, config.crop_area_max)
            total = total + project(module, x, config)
        return (total / len(views)).unflatten(0, (config.shifts, len(images))).transpose(0, 1)

    def _new_net(self) -> Net:
        channels, side, _ = self.shape_
        config = self.config
        weights_of = generator(self.seed, "initial weights")
        net = build_net(config.encoder, config.stem, channels, side, config.shifts, weights_of)
        return net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]


class SimCLRDetector(CSIDetector):
    """Contrastive pre-training without shifts, then one minus the cosine to the nearest training embedding."""

    pretraining = "elsa"

    def _score(self, z_RBD: Tensor, logit_RB: Tensor) -> Tensor:
        return 1 - nearest_cosine(z_RBD[0], self.bank_RND_[0])
