"""MobileNetV2 without its classifier, and the door through which torchvision's weight file comes in.

The names of the parameters are those of that file, so that it can be read strictly: nothing missing, nothing left over.
"""

import hashlib
import io
import itertools
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from elsa.errors import UserError

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


def fused(net: MobileNetV2) -> MobileNetV2:
    """The same function for inference with every batch norm folded into the convolution before it."""
    copy = MobileNetV2().eval()
    copy.load_state_dict(net.state_dict())
    for module in list(copy.modules()):
        if isinstance(module, nn.Sequential):
            children = list(module.named_children())
            for (conv_name, conv), (norm_name, norm) in itertools.pairwise(children):
                if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
                    setattr(module, norm_name, nn.Identity())
    for parameter in copy.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 4:  # nn.Module.to(memory_format=...) in a form that mypy knows
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return copy


def read_mobilenet_v2(file: Path, sha256: str | None = None) -> tuple[MobileNetV2, str]:
    """The network with torchvision's weights, in eval mode, and the sha256 of the file they came from."""
    file = Path(file)
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise UserError(
            f"encoder weights {file}: {error.strerror or error}; give torchvision's mobilenet_v2 weight file"
        ) from error
    digest = hashlib.sha256(payload).hexdigest()
    named = re.search(r"-([0-9a-f]{8,64})\.pth$", file.name)  # torchvision writes the first 8 digits into the name
    promised = sha256 or (named.group(1) if named else "")
    if not digest.startswith(promised):
        raise UserError(
            f"encoder weights {file} have sha256 {digest[:16]}..., expected {promised[:16]}...: "
            f"the file is damaged or another one; download it again"
        )
    return network_from(_unpickle_tensors(payload, file), str(file)), digest


def network_from(weights: Mapping[str, object], origin: str) -> MobileNetV2:
    """The network with these weights, in eval mode; a missing, unknown or misshapen one is refused, naming `origin`."""
    net = MobileNetV2().eval().requires_grad_(False)
    # A file saved before torch 0.4.1 has no count of batches; it plays no part in eval mode.
    expected = {name: value for name, value in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    offered = {
        name: value
        for name, value in weights.items()
        if not name.startswith("classifier.") and not name.endswith("num_batches_tracked")
    }
    missing, unknown = sorted(expected.keys() - offered.keys()), sorted(offered.keys() - expected.keys())
    if missing or unknown:
        raise UserError(
            f"encoder weights {origin} are not those of torchvision's mobilenet_v2: {len(missing)} parameters are "
            f"missing{_first(missing)}, {len(unknown)} unknown{_first(unknown)}; give its mobilenet_v2-*.pth file"
        )
    for name, value in offered.items():
        if not isinstance(value, Tensor) or value.shape != expected[name].shape:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"encoder weights {origin}: {name} is {shape}, expected {list(expected[name].shape)}; "
                f"give the weight file of the full-width mobilenet_v2"
            )
        if not value.isfinite().all():
            raise UserError(f"encoder weights {origin}: {name} holds values that are not finite; download it again")
    net.load_state_dict({name: value for name, value in offered.items() if isinstance(value, Tensor)}, strict=False)
    return net


def _unpickle_tensors(payload: bytes, file: Path) -> Mapping[str, object]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders about a pickle before it refuses it; one line is enough
            weights = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(
            f"encoder weights {file} cannot be read as a file of plain tensors "
            f"({type(error).__name__}); give torchvision's mobilenet_v2 weight file"
        ) from error
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise UserError(
            f"encoder weights {file} hold a {type(weights).__name__}, not named tensors; "
            f"give torchvision's mobilenet_v2 weight file"
        )
    return weights


def _conv_bn_relu(channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU6(inplace=True))


def _first(names: list[str]) -> str:
    return f" (first: {names[0]})" if names else ""
