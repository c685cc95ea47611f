"""Frozen pretrained encoders: an image becomes the vector a network trained on ImageNet sees in it.

The vectors are neither centred nor whitened: among images of one kind the direction they share is what an anomaly
lacks (5-neighbour AUROC on CIFAR-10 falls from 94.8 to 78.2 when the mean is subtracted).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from elsa.detectors.inputs import Images
from elsa.errors import UserError
from elsa.graph_encoder import OnnxNet, read_onnx, read_pt2, read_timm, timm_from
from elsa.mobilenet import FEATURES, MobileNetV2, fused, network_from, read_mobilenet_v2
from elsa.progress import Progress, silent
from elsa.resnet import DEPTHS, ResNet, read_resnet, resnet_from

PRETRAINED = {
    "mobilenet_v2": "mobilenet_v2:FILE",
    "resnet18": "resnet18:FILE",
    "resnet50": "resnet50:FILE (torchvision's weight files)",
    "timm": "timm:NAME=FILE",
    "onnx": "onnx:FILE",
    "pt2": "pt2:FILE",
}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
BATCH = 16  # the fastest on CPUs, whose caches hold its activations: 1,770 views/s at 96 px against 780 with 256
VIEWS = ("image", "image and its flip")


@dataclass(frozen=True)
class Encoder:
    """A frozen network with what must be recorded to find it again."""

    name: str
    net: nn.Module
    file: str
    sha256: str
    features: int = FEATURES

    @cached_property
    def inference_net(self) -> nn.Module:
        """The network as it is run, made once."""
        return fused(self.net) if isinstance(self.net, MobileNetV2 | ResNet) else self.net


def parse_encoder(text: str) -> Encoder:
    """The encoder that `--encoder mobilenet_v2:FILE` and the like ask for."""
    kind, _, rest = text.partition(":")
    if kind not in PRETRAINED or not rest:
        raise UserError(f"encoder {text!r}: a pretrained encoder is written {', '.join(PRETRAINED.values())}")
    if kind == "timm":
        network, _, checkpoint = rest.partition("=")
        if not checkpoint:
            raise UserError(f"encoder {text!r}: nothing is downloaded, name timm's checkpoint: timm:{network}=FILE")
        timm_net, sha256 = read_timm(network, Path(checkpoint))
        return Encoder(f"timm:{network}", timm_net, Path(checkpoint).name, sha256, timm_net.features)
    file = Path(rest)
    if kind in DEPTHS:
        resnet, sha256 = read_resnet(kind, file)
        return Encoder(kind, resnet, file.name, sha256, resnet.features)
    if kind in ("onnx", "pt2"):
        graph, sha256 = read_onnx(file) if kind == "onnx" else read_pt2(file)
        return Encoder("onnx", graph, file.name, sha256, graph.features)
    net, sha256 = read_mobilenet_v2(file)
    return Encoder(kind, net, file.name, sha256)


def restore_encoder(weights: dict[str, Tensor], name: str, file: str, sha256: str) -> Encoder:
    """The encoder whose weights a MODEL carries."""
    origin = f"from {file}"
    if name == "onnx":
        graph = OnnxNet(weights["file"].numpy().tobytes(), origin)
        return Encoder(name, graph, file, sha256, graph.features)
    if name in DEPTHS:
        resnet = resnet_from(name, weights, origin)
        return Encoder(name, resnet, file, sha256, resnet.features)
    if name.startswith("timm:"):
        own = {key.removeprefix("net."): value for key, value in weights.items()}
        timm_net = timm_from(name.removeprefix("timm:"), own, origin)
        return Encoder(name, timm_net, file, sha256, timm_net.features)
    if name != "mobilenet_v2":
        raise UserError(f"encoder {name!r} of a MODEL: this version knows {', '.join(PRETRAINED)}; update elsa")
    return Encoder(name, network_from(weights, origin), file, sha256)


def embed(
    encoder: Encoder,
    images: Images,
    *,
    size: int | None = None,
    views: str = "image and its flip",
    batch: int = BATCH,
    device: str = "cpu",
    progress: Progress = silent,
) -> Tensor:
    """One float32 vector [N, D] per image, on the CPU."""
    vectors = torch.empty(len(images), encoder.features)
    done = 0
    for part in embed_batches(encoder, images, size=size, views=views, batch=batch, device=device, progress=progress):
        vectors[done : done + len(part)] = part
        done += len(part)
    return vectors


def embed_batches(
    encoder: Encoder,
    images: Images,
    *,
    size: int | None = None,
    views: str = "image and its flip",
    batch: int = BATCH,
    device: str = "cpu",
    progress: Progress = silent,
) -> Iterator[Tensor]:
    """The vectors of `embed` one batch at a time, for sets whose vectors would not fit in memory."""
    if views not in VIEWS:
        raise UserError(f"views={views!r}: use one of {', '.join(map(repr, VIEWS))}")
    if len(images.shape) != 4 or images.shape[1] not in (1, 3):
        raise UserError(
            f"images of shape {list(images.shape)}: the encoder takes [N, C, H, W] with C 1 (grey) or 3 (colour)"
        )
    size = size or input_size(max(images.shape[2:]))
    net = encoder.inference_net.to(device)
    for start in range(0, len(images), batch):
        part = images[start : start + batch]
        assert part.dtype == torch.uint8, "images are uint8 everywhere but here"
        with torch.inference_mode():
            pixels = prepared(part.to(device), size).contiguous(memory_format=torch.channels_last)
            vectors = net(pixels)
            if views == "image and its flip":
                vectors = (vectors + net(pixels.flip(3))) / 2
        yield vectors.cpu().clone()
        done = min(start + batch, len(images))
        progress("embed", done, len(images), {})


def prepared(images: Tensor, size: int) -> Tensor:
    """uint8 images [B, C, H, W] as the network sees them: floats [B, 3, size, size], ImageNet-normalised."""
    pixels = images.float().div(255)
    if pixels.shape[-2:] != (size, size):
        pixels = interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    mean, std = (pixels.new_tensor(numbers).view(3, 1, 1) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    return pixels.expand(-1, 3, -1, -1).sub(mean).div(std)


def input_size(side: int) -> int:
    """The side in pixels to which images with this longer side are resized before they are embedded."""
    return 96 if side <= 28 else 160 if side <= 64 else 224
