"""GOAD: which of 72 geometric transformations was applied? An image on which that is hard to tell is anomalous.

Bergman and Hoshen, ICLR 2020. Shape suffixes: B images, T transformations, D numbers in an embedding.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elsa.augment import plain
from elsa.detectors.inputs import Images, hold_out, not_anomalies
from elsa.detectors.networks import (
    autocast,
    checked_pixels,
    each_batch,
    in_bf16,
    packed,
    refuse_below,
    refuse_unless_positive,
    score_batches,
    settings_of,
    train_epochs,
    unpack,
)
from elsa.errors import UserError
from elsa.progress import Progress, silent
from elsa.seeds import generator
from elsa.training import build_optimizer, fetch, reside, tuned

FLIPS, STEPS, TURNS = 2, (-1, 0, 1), 4
NUM_TRANSFORMATIONS = FLIPS * len(STEPS) ** 2 * TURNS
AT_ONCE = 32  # images, so 2,304 views
STEM = 16


@dataclass(frozen=True)
class GOADConfig:
    """Settings of GOAD as published for CIFAR-10."""

    blocks: int = 1
    """Residual blocks per stage: 1 is Wide-ResNet-10."""
    width: int = 4
    """Widening factor: the last stage has 64 times as many channels, which are the embedding."""
    margin: float = 1.0
    """How much closer than any other centre, in squared distance, an embedding should be to its own."""
    triplet_weight: float = 0.1
    """What the centre-triplet loss weighs beside the cross-entropy."""
    norm_weight: float = 10.0
    """What the mean squared coordinate of the embeddings weighs."""
    epochs: int = 16
    """Passes over the training images, each in all 72 transformations."""
    batch: int = 4
    """Images per step; each gives 72 views. The centres of a step are means over so few."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    norms_fixed_from: int = 1
    """Epoch from which on batch norm keeps its statistics: the published code never leaves its first evaluation."""
    inner_norm: int = 0
    """1 puts norm and ReLU between a block's two convolutions; the published code computes them, then drops them."""
    precision: str = "auto"
    """auto is bf16 on a GPU and fp32 on a CPU."""

    def __post_init__(self) -> None:
        refuse_unless_positive(self, ["lr"])
        refuse_below(self, 0, ["epochs", "margin", "triplet_weight", "norm_weight", "norms_fixed_from"])
        if self.inner_norm not in (0, 1):
            raise UserError(f"inner_norm={self.inner_norm}: use 0, as published, or 1, a Wide-ResNet by its own paper")
        refuse_below(self, 1, ["blocks", "width", "batch"])


def shifted(x: Tensor, down: int, right: int) -> Tensor:
    """Images moved by so many pixels; what is left empty mirrors what lies beside it."""
    return x[:, :, _mirrored(x.shape[2], down, x.device)][:, :, :, _mirrored(x.shape[3], right, x.device)]


def _mirrored(size: int, step: int, device: torch.device) -> Tensor:
    """Where each pixel of an axis comes from: d c b a | a b c d | d c b a."""
    place = (torch.arange(size, device=device) - step) % (2 * size)
    return torch.where(place < size, place, 2 * size - 1 - place)


def transformations(x: Tensor) -> Tensor:
    """All 72 of each image, in steps of 8 px at 32 px: [B, 72, C, H, W], by flip, step down, step right, turn."""
    step = x.shape[2] // 4
    moved = [
        torch.rot90(shifted(flipped, step * down, step * right), turn, (2, 3))
        for flipped in (x, x.flip(3))
        for down in STEPS
        for right in STEPS
        for turn in range(TURNS)
    ]
    return torch.stack(moved, dim=1)


class WideBlock(nn.Module):
    """Norm, ReLU and two 3x3 convolutions, with norm and ReLU between them or not, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, inner_norm: bool):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.between = nn.Sequential(nn.BatchNorm2d(outputs), nn.ReLU()) if inner_norm else nn.Identity()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        return shortcut + self.conv2(self.between(self.conv1(y)))


class WideResNet(nn.Module):
    """Views [B, C, H, W] to embeddings [B, 64 * width] and logits of the transformations [B, 72]."""

    def __init__(self, channels: int, blocks: int, width: int, inner_norm: bool = False):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, STEM, 3, 1, 1, bias=False)]
        inputs = STEM
        for outputs, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for block in range(blocks):
                layers.append(WideBlock(inputs, outputs, stride if block == 0 else 1, inner_norm))
                inputs = outputs
        layers += [nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.backbone = nn.Sequential(*layers)
        self.linear = nn.Linear(inputs, NUM_TRANSFORMATIONS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        return features, self.linear(features)


def squared_distances(z_BTD: Tensor, centre_TD: Tensor) -> Tensor:
    """Of each view to every transformation's centre: [B, T, T]."""
    product_BTT = z_BTD @ centre_TD.T
    return (z_BTD.square().sum(2, keepdim=True) + centre_TD.square().sum(1) - 2 * product_BTT).clamp_min(0)


def centre_triplet_loss(z_BTD: Tensor, margin: float) -> Tensor:
    """By how much a view fails to be closer to its transformation's mean than to any other one, by the margin."""
    distance_BTT = squared_distances(z_BTD, z_BTD.mean(dim=0))
    own_BT = distance_BTT.diagonal(dim1=1, dim2=2)
    is_own = torch.eye(z_BTD.shape[1], dtype=torch.bool, device=z_BTD.device)
    nearest_other_BT = distance_BTT.masked_fill(is_own, torch.inf).amin(dim=2)
    return F.relu(own_BT + margin - nearest_other_BT).mean()


def goad_score(z_BTD: Tensor, centre_TD: Tensor) -> Tensor:
    """Minus the log-probability that each view is recognised by its distances, summed over the transformations."""
    log_share_BTT = F.log_softmax(-squared_distances(z_BTD, centre_TD), dim=2)
    return -log_share_BTT.diagonal(dim1=1, dim2=2).sum(dim=1)


def views_of(images: Tensor) -> Tensor:
    """All transformations of each image as floats in [-1, 1]: [B * 72, C, H, W]."""
    return (2 * transformations(plain(images)) - 1).flatten(0, 1).contiguous(memory_format=torch.channels_last)


def embed_views(net: WideResNet, images: Tensor) -> Tensor:
    """Embeddings of all transformations of each image: [B, 72, D]."""
    return net(views_of(images))[0].float().unflatten(0, (len(images), NUM_TRANSFORMATIONS))


def score_views(net: WideResNet, centre_TD: Tensor, images: Tensor) -> Tensor:
    """The anomaly score of each image."""
    return goad_score(embed_views(net, images), centre_TD)


def step_loss(
    net: WideResNet, images: Tensor, margin: float, triplet_weight: float, norm_weight: float, bf16: bool = False
) -> Tensor:
    """Cross-entropy of the transformations plus the centre-triplet loss plus a pull towards zero."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        z, logits = net(views_of(images))
    z_BTD = z.float().unflatten(0, (len(images), NUM_TRANSFORMATIONS))
    applied = torch.arange(NUM_TRANSFORMATIONS, device=images.device).repeat(len(images))
    recognised = F.cross_entropy(logits.float(), applied)
    return recognised + triplet_weight * centre_triplet_loss(z_BTD, margin) + norm_weight * z_BTD.square().mean()


class GOADDetector:
    """Learns to tell 72 transformations of normal images apart; labelled anomalies are left out."""

    settings_class = GOADConfig

    def __init__(self, *, seed: int = 0, device: str = "cpu", progress: Progress = silent, **settings: Any):
        self.config = settings_of(GOADConfig, settings)
        self.seed, self.device, self.progress = seed, torch.device(device), progress

    def fit(self, images: Images, labels: Sequence[str | None]) -> Self:
        """Train on uint8 images [N, C, H, H], everything but labelled anomalies."""
        config = self.config
        codes = checked_pixels("goad", images, labels)
        if images.shape[2] != images.shape[3]:
            height, width = images.shape[2:]
            raise UserError(f"images of {width}x{height} px given; goad turns images by 90 degrees and needs squares")
        train, held_out = hold_out(not_anomalies(codes), self.seed)
        train, resident = train.to(self.device), reside(images, self.device)
        self.shape_ = tuple(images.shape[1:])
        self.net_ = self._new_net()
        bf16 = in_bf16(config.precision, self.device)

        def inputs_of(index_B: Tensor, _: torch.Generator) -> tuple[Tensor]:
            return (fetch(resident, index_B, self.device),)

        train_epochs(
            "train",
            self.net_,
            build_optimizer("adam", self.net_, config.lr, 0.0),
            step_loss,
            (config.margin, config.triplet_weight, config.norm_weight, bf16),
            inputs_of,
            train,
            epochs=config.epochs,
            batch=config.batch,
            seed=self.seed,
            progress=self.progress,
            norms_fixed_from=config.norms_fixed_from,
            views=NUM_TRANSFORMATIONS,
        )
        self.net_.eval()
        # The published code averages what each training step had embedded; the finished network embeds better.
        self.centre_TD_ = self._centres(resident, train)
        self.calibration_ = self.anomaly_score(fetch(resident, held_out, self.device))
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """How badly an image's transformations are recognised; higher is more anomalous."""
        with autocast(self.config.precision, self.device):
            score = partial(tuned(score_views, self.device), self.net_, self.centre_TD_)
            return score_batches(images, self.shape_, AT_ONCE, self.device, score, self.progress)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that anomaly_score needs, as tensors and as what JSON can hold."""
        about = {"settings": dataclasses.asdict(self.config), "seed": self.seed, "shape": list(self.shape_)}
        return packed(self.net_, centres=self.centre_TD_, calibration=self.calibration_), about

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], about: dict[str, Any], *, device: str = "cpu", progress: Progress = silent
    ) -> Self:
        """The fitted detector that state() described."""
        model = cls(seed=about["seed"], device=device, progress=progress, **about["settings"])
        model.shape_ = tuple(about["shape"])
        model.net_ = model._new_net()
        unpack(model.net_, tensors)
        model.centre_TD_, model.calibration_ = tensors["centres"].to(model.device), tensors["calibration"]
        return model

    def _centres(self, images: Images, train: Tensor) -> Tensor:
        total_TD = torch.zeros((), device=self.device)
        with autocast(self.config.precision, self.device):
            embedded = partial(tuned(embed_views, self.device), self.net_)
            for part in train.split(AT_ONCE):  # 5,000 images times 72 embeddings would be 370 MB
                total_TD = total_TD + each_batch(images, part, AT_ONCE, self.device, embedded).sum(dim=0)
        return total_TD / len(train)

    def _new_net(self) -> WideResNet:
        net = WideResNet(self.shape_[0], self.config.blocks, self.config.width, self.config.inner_norm == 1)
        weights_of = generator(self.seed, "initial weights")
        with torch.no_grad():
            for module in net.modules():
                if isinstance(module, nn.Conv2d):  # as published: normal, variance 2 / (numbers that feed on a weight)
                    fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                    module.weight.normal_(0, (2 / fan_out) ** 0.5, generator=weights_of)
                elif isinstance(module, nn.Linear):
                    bound = module.in_features**-0.5
                    module.weight.uniform_(-bound, bound, generator=weights_of)
                    module.bias.zero_()
        return net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
