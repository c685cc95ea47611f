"""MobileNetV2 without its classifier, and the door through which torchvision's weight file comes in.

The names of the parameters are those of that file, so that it can be read strictly: nothing missing, nothing left over.
"""

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from elsa.weight_file import fill, read_weights

FEATURES = 1280

# Table 2 of the MobileNetV2 paper: expansion, output channels, repeats, stride of the first repeat.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class MobileNetV2(nn.Module):
    """Float images [B, 3, H, W], ImageNet-normalised, to pooled features [B, 1280]."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [_conv_bn_relu(3, 32, kernel=3, stride=2)]
        channels = 32
        for expansion, width, repeats, first_stride in STAGES:
            for repeat in range(repeats):
                blocks.append(InvertedResidual(channels, width, first_stride if repeat == 0 else 1, expansion))
                channels = width
        self.features = nn.Sequential(*blocks, _conv_bn_relu(channels, FEATURES, kernel=1))

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images).mean(dim=(2, 3))


class InvertedResidual(nn.Module):
    """Widen, filter each channel on its own, narrow again; added to the input where the shapes allow it."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        widen = [_conv_bn_relu(channels, hidden, kernel=1)] if expansion != 1 else []
        depthwise = _conv_bn_relu(hidden, hidden, kernel=3, stride=stride, groups=hidden)
        self.conv = nn.Sequential(*widen, depthwise, nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width))
        self.keeps_shape = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.keeps_shape else self.conv(x)


def fused(net: nn.Module) -> nn.Module:
    """The same function for inference with every batch norm folded into the convolution right before it."""
    folded = copy.deepcopy(net).eval()
    for module in list(folded.modules()):
        for (conv_name, conv), (norm_name, norm) in itertools.pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(module, norm_name, nn.Identity())
    for parameter in folded.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 4:  # nn.Module.to(memory_format=...) in a form that mypy knows
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return folded


def read_mobilenet_v2(file: Path, sha256: str | None = None) -> tuple[MobileNetV2, str]:
    """The network with torchvision's weights, in eval mode, and the sha256 of the file they came from."""
    weights, digest = read_weights(file, "mobilenet_v2", sha256)
    return network_from(weights, str(file)), digest


def network_from(weights: Mapping[str, object], origin: str) -> MobileNetV2:
    """The network with these weights, in eval mode; a missing, unknown or misshapen one is refused, naming `origin`."""
    net = MobileNetV2().eval().requires_grad_(False)
    fill(net, weights, origin, "mobilenet_v2", "classifier.")
    return net


def _conv_bn_relu(channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU6(inplace=True))
