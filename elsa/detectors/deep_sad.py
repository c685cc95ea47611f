"""Deep SAD, and Deep SVDD, which is Deep SAD without labels: distance to one centre in a learned space.

Ruff et al., ICML 2018 and ICLR 2020. Shape suffixes: N training images, B images, D numbers in an embedding.
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
    initialise,
    packed,
    refuse_below,
    refuse_unless_positive,
    score_batches,
    settings_of,
    train_epochs,
    unpack,
)
from elsa.labels import ANOMALY, UNLABELLED
from elsa.progress import Progress, silent
from elsa.seeds import generator
from elsa.training import build_optimizer, fetch, reside, tuned

EMBEDDING = 128
WIDTHS = (32, 64, 128)
START = 4  # side of the map at which the decoder starts: 128 numbers as 8 maps of 4x4
AT_ONCE = 1024
FAR_FROM_ZERO = 0.1  # a coordinate of the centre near zero could be met by switching a unit off
SMALLEST_DISTANCE = 1e-6


@dataclass(frozen=True)
class DeepSADConfig:
    """Settings of Deep SAD and Deep SVDD as published for CIFAR-10."""

    eta: float = 1.0
    """What a labelled image weighs beside an unlabelled one."""
    autoencoder_epochs: int = 150
    """Passes over the training images as an autoencoder, before there is a centre."""
    autoencoder_weight_decay: float = 5e-4
    """Weight decay of the autoencoder."""
    epochs: int = 150
    """Passes over the training images towards the centre."""
    weight_decay: float = 5e-7
    """Weight decay of the second stage."""
    lr: float = 1e-4
    """Learning rate of Adam in both stages."""
    slower_from: int = 50
    """Epoch from which on the learning rate is a tenth, in both stages."""
    batch: int = 128
    """Images per step."""
    precision: str = "fp32"
    """fp32, as published: bf16 rounds what is left of the distances once all images lie near the centre."""

    def __post_init__(self) -> None:
        refuse_unless_positive(self, ["lr"])
        refuse_below(self, 0, ["eta", "autoencoder_epochs", "epochs", "weight_decay", "autoencoder_weight_decay"])
        refuse_below(self, 0, ["slower_from"])
        refuse_below(self, 2, ["batch"])


class LeNet(nn.Module):
    """Images [B, C, H, W] to embeddings [B, 128]; no biases, or it could map everything onto the centre."""

    def __init__(self, channels: int, height: int, width: int, outputs: int = EMBEDDING):
        super().__init__()
        self.sides = [(height >> halvings, width >> halvings) for halvings in range(len(WIDTHS) + 1)]
        inputs = (channels, *WIDTHS)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 5, padding=2, bias=False) for before, after in zip(inputs, WIDTHS, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, eps=1e-4, affine=False) for width in WIDTHS)
        last_height, last_width = self.sides[-1]
        self.linear = nn.Linear(WIDTHS[-1] * last_height * last_width, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.leaky_relu(norm(convolution(x))), 2)
        return self.linear(x.flatten(1))


class Autoencoder(nn.Module):
    """LeNet and its mirror image: images [B, C, H, W] to images in [0, 1]."""

    def __init__(self, encoder: LeNet, channels: int):
        super().__init__()
        self.encoder = encoder
        outputs = (*reversed(WIDTHS), channels)
        inputs = (EMBEDDING // START**2, *outputs[:-1])
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 5, padding=2, bias=False) for before, after in zip(inputs, outputs, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, eps=1e-4, affine=False) for width in outputs[:-1])

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.encoder(x).view(len(x), -1, START, START))
        for convolution, norm, side in zip(self.convolutions, self.norms, self.encoder.sides[-2::-1], strict=False):
            x = F.interpolate(F.leaky_relu(norm(convolution(x))), size=side)
        return torch.sigmoid(self.convolutions[-1](x))


def deep_sad_loss(distance_B: Tensor, label_B: Tensor, eta: float) -> Tensor:
    """Squared distance of unlabelled images, eta times it of normals, eta times its inverse of anomalies; the mean."""
    from_zero_B = distance_B + SMALLEST_DISTANCE
    labelled_B = eta * torch.where(label_B == ANOMALY, from_zero_B.reciprocal(), from_zero_B)
    return torch.where(label_B == UNLABELLED, distance_B, labelled_B).mean()


def centre_of(embedding_ND: Tensor) -> Tensor:
    """The mean embedding, with every coordinate moved to at least 0.1 away from zero."""
    centre_D = embedding_ND.mean(dim=0)
    side_D = torch.where(centre_D < 0, -FAR_FROM_ZERO, FAR_FROM_ZERO)
    return torch.where(centre_D.abs() < FAR_FROM_ZERO, side_D, centre_D)


def reconstruction_loss(net: Autoencoder, images: Tensor, bf16: bool = False) -> Tensor:
    """Mean squared error per pixel."""
    x = plain(images)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        y = net(x.contiguous(memory_format=torch.channels_last))
    return F.mse_loss(y.float(), x)


def embedding(net: LeNet, images: Tensor) -> Tensor:
    """Embeddings [B, 128] in fp32."""
    return net(plain(images).contiguous(memory_format=torch.channels_last)).float()


def squared_distance(net: LeNet, centre_D: Tensor, images: Tensor) -> Tensor:
    """The anomaly score: squared distance of each image to the centre."""
    return (embedding(net, images) - centre_D).square().sum(dim=1)


def step_loss(net: LeNet, images: Tensor, label_B: Tensor, centre_D: Tensor, eta: float, bf16: bool = False) -> Tensor:
    """Deep SAD's loss of one batch."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        distance_B = squared_distance(net, centre_D, images)
    return deep_sad_loss(distance_B, label_B, eta)


class DeepSADDetector:
    """Autoencoder pre-training, then normal images towards one centre and labelled anomalies away from it."""

    uses_labels = True
    settings_class = DeepSADConfig

    def __init__(self, *, seed: int = 0, device: str = "cpu", progress: Progress = silent, **settings: Any):
        self.config = settings_of(DeepSADConfig, settings)
        self.seed, self.device, self.progress = seed, torch.device(device), progress

    def fit(self, images: Images, labels: Sequence[str | None]) -> Self:
        """Train on uint8 images [N, C, H, W] and their label words."""
        config = self.config
        codes = checked_pixels("deep-sad" if self.uses_labels else "deep-svdd", images, labels)
        train, held_out = hold_out(not_anomalies(codes), self.seed)
        if self.uses_labels:
            train = torch.cat([train, (codes == ANOMALY).nonzero().flatten()])
        else:
            codes = torch.full_like(codes, UNLABELLED)
        train, codes = train.to(self.device), codes.to(self.device)
        resident = reside(images, self.device)
        self.shape_ = tuple(images.shape[1:])
        self.net_ = self._new_net()

        # 1. the encoder of an autoencoder, so that the centre lies among embeddings that differ
        self._pretrain(resident, train)

        # 2. the centre: where the training images lie on average, as published with the labelled anomalies
        self.net_.eval()
        with autocast(config.precision, self.device):
            embedded = partial(tuned(embedding, self.device), self.net_)
            self.centre_D_ = centre_of(each_batch(resident, train, AT_ONCE, self.device, embedded))

        # 3. everything towards it but the labelled anomalies
        optimizer = build_optimizer("adam", self.net_, config.lr, config.weight_decay)
        facts = (self.centre_D_, config.eta, in_bf16(config.precision, self.device))

        def inputs_of(index_B: Tensor, _: torch.Generator) -> tuple[Tensor, Tensor]:
            return fetch(resident, index_B, self.device), codes[index_B]

        self._train("train", self.net_, optimizer, step_loss, facts, inputs_of, train, config.epochs)
        self.net_.eval()
        self.calibration_ = self.anomaly_score(fetch(resident, held_out, self.device))
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """Squared distance to the centre; higher is more anomalous."""
        with autocast(self.config.precision, self.device):
            score = partial(tuned(squared_distance, self.device), self.net_, self.centre_D_)
            return score_batches(images, self.shape_, AT_ONCE, self.device, score, self.progress)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that anomaly_score needs, as tensors and as what JSON can hold."""
        about = {"settings": dataclasses.asdict(self.config), "seed": self.seed, "shape": list(self.shape_)}
        return packed(self.net_, centre=self.centre_D_, calibration=self.calibration_), about

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], about: dict[str, Any], *, device: str = "cpu", progress: Progress = silent
    ) -> Self:
        """The fitted detector that state() described."""
        model = cls(seed=about["seed"], device=device, progress=progress, **about["settings"])
        model.shape_ = tuple(about["shape"])
        model.net_ = model._new_net()
        unpack(model.net_, tensors)
        model.centre_D_, model.calibration_ = tensors["centre"].to(model.device), tensors["calibration"]
        return model

    def _pretrain(self, images: Images, train: Tensor) -> None:
        config = self.config
        autoencoder = Autoencoder(self.net_, self.shape_[0])
        weights_of = generator(self.seed, "initial weights")
        initialise(autoencoder, weights_of)
        with torch.no_grad():
            for weight in autoencoder.convolutions.parameters():  # as published: Xavier's for the decoder alone
                nn.init.xavier_uniform_(weight, nn.init.calculate_gain("leaky_relu"), generator=weights_of)
        autoencoder.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = build_optimizer("adam", autoencoder, config.lr, config.autoencoder_weight_decay)
        facts = (in_bf16(config.precision, self.device),)

        def inputs_of(index_B: Tensor, _: torch.Generator) -> tuple[Tensor]:
            return (fetch(images, index_B, self.device),)

        epochs = config.autoencoder_epochs
        self._train("autoencoder", autoencoder, optimizer, reconstruction_loss, facts, inputs_of, train, epochs)

    def _train(
        self,
        stage: str,
        net: nn.Module,
        optimizer: Any,
        loss: Any,
        facts: Any,
        inputs_of: Any,
        train: Tensor,
        epochs: int,
    ) -> None:
        train_epochs(
            stage,
            net,
            optimizer,
            loss,
            facts,
            inputs_of,
            train,
            epochs=epochs,
            batch=self.config.batch,
            seed=self.seed,
            progress=self.progress,
            slower_from=self.config.slower_from,
        )

    def _new_net(self) -> LeNet:
        net = LeNet(*self.shape_)
        initialise(net, generator(self.seed, "initial weights"))
        return net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]


class DeepSVDDDetector(DeepSADDetector):
    """Deep SAD of everything but the labelled anomalies, all of it as unlabelled."""

    uses_labels = False
