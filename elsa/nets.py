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


class Convolution(nn.Conv2d):
    """A convolution without bias; on a GPU a matrix product of its patches where cuDNN has no fast bf16 kernel.

    On an H200 a strided 1x1 convolution took 2% and the stem, with its 3 input channels, 5% of a training step.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: int):
        super().__init__(inputs, outputs, kernel, stride, padding, bias=False)
        self.as_product = (kernel == 1 and stride > 1) or (kernel == 3 and inputs < 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.as_product:
            return convolve_as_product(x, self.weight, self.stride[0], int(self.padding[0]))
        return super().forward(x)


def convolve_as_product(x_BCHW: Tensor, weight_OCKK: Tensor, stride: int, padding: int) -> Tensor:
    """F.conv2d as one product [B H W, patch] x [patch, outputs]; a patch is filled up to a multiple of 8 numbers."""
    kernel = weight_OCKK.shape[2]
    x, weight = F.pad(x_BCHW, (padding,) * 4), weight_OCKK.flatten(1)
    if kernel == 1:  # without unfold, whose gradient adds number by number
        patches = x[:, :, ::stride, ::stride].permute(0, 2, 3, 1)
    else:
        patches = x.unfold(2, kernel, stride).unfold(3, kernel, stride).permute(0, 2, 3, 1, 4, 5).flatten(3)
    missing = -weight.shape[1] % 8
    if missing:
        patches, weight = F.pad(patches, (0, missing)), F.pad(weight, (0, missing))
    return F.linear(patches, weight).permute(0, 3, 1, 2)


class Norm(nn.BatchNorm2d):
    """Batch norm; on a GPU its sums of x and of x^2 are compiled into one pass, 2% of a training step faster."""

    def forward(self, x: Tensor) -> Tensor:
        return self.in_one_pass(x) if x.is_cuda and self.training else super().forward(x)

    def in_one_pass(self, x_BCHW: Tensor) -> Tensor:
        """In training, with variance E[x^2] - E[x]^2 in fp32; the running statistics follow."""
        x, each = x_BCHW.float(), (0, 2, 3)
        mean_C = x.mean(each)
        variance_C = ((x * x).mean(each) - mean_C * mean_C).clamp(min=0)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        with torch.no_grad():
            count = x.numel() / x.shape[1]
            self.running_mean.lerp_(mean_C, self.momentum)
            self.running_var.lerp_(variance_C * (count / (count - 1)), self.momentum)
            self.num_batches_tracked.add_(1)
        scale_C = self.weight * torch.rsqrt(variance_C + self.eps)
        shift_C = self.bias - mean_C * scale_C
        return (x * scale_C[:, None, None] + shift_C[:, None, None]).to(x_BCHW.dtype)


class ConvNorm(nn.Module):
    """Convolution and batch norm, then the sum with a shortcut and a ReLU where asked for."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, relu: bool = True):
        super().__init__()
        self.conv = Convolution(inputs, outputs, kernel, stride, kernel // 2)
        self.norm = Norm(outputs)
        self.relu, self.stride, self.padding = relu, (stride, stride), (kernel // 2, kernel // 2)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        y = self.norm(self.conv(x))
        if shortcut is not None:
            y = y + shortcut
        return F.relu(y) if self.relu else y


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = ConvNorm(inputs, outputs, 3, stride)
        self.second = ConvNorm(outputs, outputs, 3, 1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = ConvNorm(inputs, outputs, 1, stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), self.shortcut(x))


def resnet18(channels: int, large_stem: bool) -> tuple[nn.Module, int]:
    """ResNet-18 and its width; the small stem keeps the resolution, the large one reduces it four times."""
    stem: list[nn.Module] = [ConvNorm(channels, 64, 3, 1)]
    if large_stem:
        stem = [ConvNorm(channels, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    stages: list[nn.Module] = []
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        stages += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 512


def tiny(channels: int, size: int) -> tuple[nn.Module, int]:
    """A few strided convolutions, about 100 times cheaper than resnet18 at 32 px, and its width."""
    layers: list[nn.Module] = []
    side = size
    while side > 64:  # large images are brought down by cheap layers first
        layers.append(ConvNorm(channels, 16, 3, 2))
        channels, side = 16, (side + 1) // 2
    for outputs, stride in ((32, 2), (64, 2), (128, 2 if side > 16 else 1), (128, 2 if side > 32 else 1)):
        layers.append(ConvNorm(channels, outputs, 3, stride))
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
