"""Networks learned from scratch: ResNet-18 and a tiny one, with the projection and rotation heads on top."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDING = 128  # numbers in a projection, as in the paper
LARGE_IMAGE = 96  # from this side on, resnet18 starts with the stem made for photographs


class Net(nn.Module):
    """Images [B, C, H, W] in, raw projections [B, 128] and rotation logits [B, shifts] out."""

    def __init__(self, backbone: nn.Module, width: int, shifts: int):
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, EMBEDDING))
        self.rotation = nn.Linear(width, shifts)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(images)
        return self.projection(features), self.rotation(features)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(channels: int, large_stem: bool) -> tuple[nn.Module, int]:
    """ResNet-18 and its width; the small stem keeps the resolution, the large one reduces it four times."""
    if large_stem:
        stem = [nn.Conv2d(channels, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    else:
        stem = [nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    stages: list[nn.Module] = []
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        stages += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 512


def tiny(channels: int, size: int) -> tuple[nn.Module, int]:
    """A few strided convolutions, about 100 times cheaper than resnet18 at 32 px, and its width."""
    layers: list[nn.Module] = []
    side = size
    while side > 64:  # large images are brought down by cheap layers first
        layers += [nn.Conv2d(channels, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        channels, side = 16, (side + 1) // 2
    for outputs, stride in ((32, 2), (64, 2), (128, 2 if side > 16 else 1), (128, 2 if side > 32 else 1)):
        layers += [nn.Conv2d(channels, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), channels


def channels_last(net: Net, device: torch.device) -> Net:
    """The net on the device, in the memory order in which convolutions are fastest on GPUs and CPUs."""
    return net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in stubs


def build_net(encoder: str, stem: str, channels: int, size: int, shifts: int, generator: torch.Generator) -> Net:
    """A network with fresh weights that depend on the generator alone."""
    if encoder == "resnet18":
        backbone, width = resnet18(channels, large_stem=stem == "large" or (stem == "auto" and size >= LARGE_IMAGE))
    else:
        backbone, width = tiny(channels, size)
    net = Net(backbone, width, shifts)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                # PyTorch's own default, U(+-1/sqrt(fan_in)) for weights and biases, from our generator
                bound = module.weight[0].numel() ** -0.5
                module.weight.uniform_(-bound, bound, generator=generator)
                if module.bias is not None:
                    module.bias.uniform_(-bound, bound, generator=generator)
    return net
