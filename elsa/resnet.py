"""ResNet-18 and ResNet-50 without their classifier, to be filled from torchvision's weight files.

The names of the parameters are those of these files, so that they can be read strictly: nothing missing, nothing left
over. The network of elsa.nets learns from scratch and has names and layers of its own.
"""

from collections.abc import Mapping
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from elsa.weight_file import fill, read_weights

# Table 1 of the ResNet paper: blocks in each of the four stages.
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
WIDTHS = (64, 128, 256, 512)


class ResNet(nn.Module):
    """Float images [B, 3, H, W], ImageNet-normalised, to pooled features [B, 512] or [B, 2048]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        block = Bottleneck if name == "resnet50" else BasicBlock
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        channels, stages = 64, []
        for stage, (depth, width) in enumerate(zip(DEPTHS[name], WIDTHS, strict=True)):
            blocks = []
            for number in range(depth):
                blocks.append(block(channels, width, stride=2 if stage and not number else 1))
                channels = width * block.widening
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.features = channels

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, padding=1)
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean(dim=(2, 3))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    widening = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width * self.widening, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """Narrow, filter, widen, and a shortcut; the stride is at the 3x3 convolution, where torchvision has it."""

    widening = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.widening, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.widening)
        self.downsample = _shortcut(channels, width * self.widening, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def read_resnet(name: str, file: Path) -> tuple[ResNet, str]:
    """The network with torchvision's weights, in eval mode, and the sha256 of the file they came from."""
    weights, digest = read_weights(file, name)
    return resnet_from(name, weights, str(file)), digest


def resnet_from(name: str, weights: Mapping[str, object], origin: str) -> ResNet:
    """The network with these weights, in eval mode; a missing, unknown or misshapen one is refused, naming `origin`."""
    net = ResNet(name).eval().requires_grad_(False)
    fill(net, weights, origin, name, "fc.")
    return net


def _shortcut(channels: int, width: int, stride: int) -> nn.Sequential:
    if stride == 1 and channels == width:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
