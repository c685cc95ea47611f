"""A fitted detector as one graph: images and a threshold in, score, p-value and verdict out.

The graph is traced from the detector's own scoring functions, so that it follows them.
Shape suffixes: B images, N calibration scores, V views, R rotations, D features.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from elsa.augment import draw, one_view
from elsa.elsa import Elsa
from elsa.encoders import prepared
from elsa.energy import ENSEMBLES
from elsa.errors import UserError
from elsa.graph_encoder import OnnxNet
from elsa.head import ElsaHead
from elsa.inference import fold_norms
from elsa.seeds import generator

OUTPUTS = ("score", "p_value", "verdict")


class Graph(nn.Module):
    """What is exported: higher scores are more anomalous, and an image is an anomaly where score > threshold."""

    calibration: Tensor

    def __init__(self, score: nn.Module, calibration: Tensor, size: int | None):
        super().__init__()
        self.score, self.size = score, size
        self.register_buffer("calibration", calibration.detach().cpu().double())

    def forward(self, images: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.size is not None:  # at the model's own size this changes nothing; at others it is Pillow's filter
            images = interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)
        score_B = self.score(images).double()
        as_high_B = (self.calibration >= score_B[:, None]).sum(dim=1)
        return score_B, (1 + as_high_B).double() / (len(self.calibration) + 1), score_B > threshold


class HeadOnVectors(nn.Module):
    """ElsaHead on embeddings."""

    def __init__(self, head: ElsaHead):
        super().__init__()
        self.head = head

    def forward(self, vectors_BD: Tensor) -> Tensor:
        return self.head._combined(self.head._energies(normalize(vectors_BD, dim=1)))


class HeadOnImages(HeadOnVectors):
    """ElsaHead on images, all views of which go through the network together."""

    def __init__(self, head: ElsaHead, dtype: torch.dtype):
        super().__init__(head)
        assert head.encoder is not None
        if isinstance(head.encoder.net, OnnxNet):
            raise UserError(
                f"MODEL's encoder is itself an ONNX file, {head.encoder.file}: only networks of torch can be exported; "
                f"ship that file, and export a head fitted on its vectors"
            )
        self.net, self.dtype = _of_type(head.encoder.inference_net, dtype), dtype

    def forward(self, images: Tensor) -> Tensor:
        pixels = prepared(images, self.head.size_)
        if self.head.config.views == "image and its flip":
            pixels = torch.cat([pixels, pixels.flip(3)])
        vectors = self.net(pixels.to(self.dtype)).float().unflatten(0, (-1, images.shape[0]))
        return super().forward(vectors.mean(dim=0))


class ElsaOnImages(nn.Module):
    """Elsa and Elsa+ from scratch; the augmentations all images meet are constants of the graph."""

    views: Tensor

    def __init__(self, model: Elsa, dtype: torch.dtype):
        super().__init__()
        self.config, self.dtype = model.config, dtype
        self.net = _of_type(fold_norms(model.net_, model.config), dtype)
        self.prototypes_KD = model.prototypes_
        self.register_buffer("views", draw(model.config.views, generator(model.seed, "score")))

    def forward(self, images: Tensor) -> Tensor:
        config = self.config
        views = [
            one_view(images, view, config.shifts, config.crop_area_min, config.crop_area_max) for view in self.views
        ]
        raw = self.net(torch.cat(views).to(self.dtype))[0].float()
        raw_VRBD = raw.unflatten(0, (len(views), config.shifts, -1))
        return ENSEMBLES[config.ensemble](raw_VRBD, self.prototypes_KD, config.score_tau)


def scoring_module(detector: Any, dtype: torch.dtype) -> nn.Module:
    """The detector's score as a module without its batches and checks; a detector that has none is refused."""
    if isinstance(detector, ElsaHead):
        return HeadOnVectors(detector) if detector.encoder is None else HeadOnImages(detector, dtype)
    if isinstance(detector, Elsa):
        return ElsaOnImages(detector, dtype)
    raise UserError(
        f"MODEL holds a {type(detector).__name__}: only elsa-head, elsa+ and elsa can be exported; "
        f"fit with one of these --method"
    )


def _of_type(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    return net if dtype == torch.float32 else copy.deepcopy(net).to(dtype)
