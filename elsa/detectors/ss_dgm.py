"""SS-DGM: the semi-supervised variational autoencoder M2 of Kingma et al. (2014); its class probability is the score.

Sizes and training are those of Deep SAD's experiments, from which the paper takes the row; they report the better one
of M2 and M1+M2, both near chance, and M2 is what is here.

Shape suffixes: B images, D numbers in an image, H hidden units, Z latent numbers, 2 classes (0 normal, 1 anomaly).
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elsa.augment import plain
from elsa.detectors.deep_sad import LeNet
from elsa.detectors.inputs import Images, hold_out, not_anomalies
from elsa.detectors.networks import (
    autocast,
    checked_pixels,
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
from elsa.errors import UserError
from elsa.labels import ANOMALY, NORMAL, UNLABELLED
from elsa.progress import Progress, silent
from elsa.seeds import generator
from elsa.training import build_optimizer, fetch, reside, tuned

AT_ONCE = 1024


@dataclass(frozen=True)
class SSDGMConfig:
    """Settings of M2 in Deep SAD's experiments on CIFAR-10."""

    hidden: int = 512
    """Units of the hidden layer next to the images; the other one has half as many."""
    latent: int = 128
    """Numbers in the latent code."""
    anomaly_prior: float = 0.5
    """Share of anomalies that the generative model expects; Kingma's classes are equally likely."""
    classification_weight: float = 0.1
    """What the labelled images' mean cross-entropy weighs beside the mean bounds."""
    epochs: int = 150
    """Passes over the training images."""
    batch: int = 128
    """Images per step."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    weight_decay: float = 1e-6
    """Weight decay of Adam."""
    precision: str = "auto"
    """auto is bf16 on a GPU and fp32 on a CPU."""

    def __post_init__(self) -> None:
        refuse_unless_positive(self, ["lr"])
        refuse_below(self, 0, ["epochs", "classification_weight", "weight_decay"])
        refuse_below(self, 1, ["latent", "batch"])
        refuse_below(self, 2, ["hidden"])
        if not 0 < self.anomaly_prior < 1:
            raise UserError(f"anomaly_prior={self.anomaly_prior}: a share lies between 0 and 1")


class M2(nn.Module):
    """The three networks: q(y|x) is Deep SAD's LeNet, q(z|x,y) and p(x|z,y) have two hidden layers each."""

    def __init__(self, shape: Sequence[int], hidden: int, latent: int):
        super().__init__()
        num_features = math.prod(shape)
        self.classifier = LeNet(shape[0], shape[1], shape[2], outputs=2)
        self.encoder = _layers(num_features + 2, hidden, hidden // 2, 2 * latent)
        self.decoder = _layers(latent + 2, hidden // 2, hidden, num_features)

    def forward(self, x_BD: Tensor, y_B2: Tensor, noise_BZ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean_BZ, log_variance_BZ = self.encoder(torch.cat([x_BD, y_B2], dim=1)).float().chunk(2, dim=1)
        z_BZ = mean_BZ + (log_variance_BZ / 2).exp() * noise_BZ
        return self.decoder(torch.cat([z_BZ, y_B2], dim=1)).float(), mean_BZ, log_variance_BZ


def _layers(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def evidence_bound(x_BD: Tensor, logits_BD: Tensor, mean_BZ: Tensor, log_variance_BZ: Tensor) -> Tensor:
    """log p(x|z,y) - KL(q(z|x,y) || N(0, 1)), in nats; pixels are Bernoulli probabilities."""
    log_likelihood_B = -F.binary_cross_entropy_with_logits(logits_BD, x_BD, reduction="none").sum(dim=1)
    divergence_B = 0.5 * (mean_BZ.square() + log_variance_BZ.exp() - 1 - log_variance_BZ).sum(dim=1)
    return log_likelihood_B - divergence_B


def m2_loss(bound_B2: Tensor, class_logits_B2: Tensor, label_B: Tensor, weight: float) -> Tensor:
    """Minus the bound of the known class, or of both as q(y|x) mixes them plus its entropy, and the cross-entropy.

    `bound_B2` holds log p(x, y) bounds: the prior of the class is part of them. Labelled and unlabelled images are
    averaged apart, as published, so that few labelled ones weigh as much as all others; without any they cost nothing.
    """
    log_q_B2 = F.log_softmax(class_logits_B2, dim=1)
    unlabelled_B = (log_q_B2.exp() * (log_q_B2 - bound_B2)).sum(dim=1)
    class_B1 = (label_B == ANOMALY).long()[:, None]
    labelled_B = -bound_B2.gather(1, class_B1)[:, 0] - weight * log_q_B2.gather(1, class_B1)[:, 0]
    is_unlabelled_B = (label_B == UNLABELLED).to(bound_B2.dtype)
    return _mean_where(unlabelled_B, is_unlabelled_B) + _mean_where(labelled_B, 1 - is_unlabelled_B)


def _mean_where(value_B: Tensor, counted_B: Tensor) -> Tensor:
    return (value_B * counted_B).sum() / counted_B.sum().clamp(min=1)


def step_loss(
    net: M2,
    images: Tensor,
    label_B: Tensor,
    noise_2BZ: Tensor,
    log_prior: tuple[float, float],
    weight: float,
    bf16: bool = False,
) -> Tensor:
    """M2's loss of one batch; each image is tried as both classes."""
    x = plain(images)
    x_BD, bounds = x.flatten(1), []
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        for kind in (0, 1):
            y_B2 = F.one_hot(torch.full_like(label_B, kind, dtype=torch.long), 2).to(x_BD.dtype)
            bounds.append(evidence_bound(x_BD, *net(x_BD, y_B2, noise_2BZ[kind])) + log_prior[kind])
        class_logits_B2 = net.classifier(x.contiguous(memory_format=torch.channels_last)).float()
    return m2_loss(torch.stack(bounds, dim=1), class_logits_B2, label_B, weight)


def log_odds(net: M2, images: Tensor) -> Tensor:
    """log q(anomaly|x) - log q(normal|x): ranks as the probability does, and does not saturate."""
    logits_B2 = net.classifier(plain(images).contiguous(memory_format=torch.channels_last)).float()
    return logits_B2[:, 1] - logits_B2[:, 0]


class SSDGMDetector:
    """A generative model of images with a class each, known for the labelled ones and inferred for the others."""

    settings_class = SSDGMConfig

    def __init__(self, *, seed: int = 0, device: str = "cpu", progress: Progress = silent, **settings: Any):
        self.config = settings_of(SSDGMConfig, settings)
        self.seed, self.device, self.progress = seed, torch.device(device), progress

    def fit(self, images: Images, labels: Sequence[str | None]) -> Self:
        """Train on uint8 images [N, C, H, W] and their label words; needs labels of both kinds."""
        config = self.config
        codes = checked_pixels("ss-dgm", images, labels)
        train, held_out = _hold_out(codes, self.seed)
        train = torch.cat([train, (codes == ANOMALY).nonzero().flatten()]).to(self.device)
        codes, resident = codes.to(self.device), reside(images, self.device)
        self.shape_ = tuple(images.shape[1:])
        self.net_ = self._new_net()
        log_prior = (math.log(1 - config.anomaly_prior), math.log(config.anomaly_prior))

        def inputs_of(index_B: Tensor, draws_of: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
            noise_2BZ = torch.randn(2, len(index_B), config.latent, generator=draws_of, device=self.device)
            return fetch(resident, index_B, self.device), codes[index_B], noise_2BZ

        train_epochs(
            "train",
            self.net_,
            build_optimizer("adam", self.net_, config.lr, config.weight_decay),
            step_loss,
            (log_prior, config.classification_weight, in_bf16(config.precision, self.device)),
            inputs_of,
            train,
            epochs=config.epochs,
            batch=config.batch,
            seed=self.seed,
            progress=self.progress,
        )
        self.net_.eval()
        self.calibration_ = self.anomaly_score(fetch(resident, held_out, self.device))
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """Log-odds of being an anomaly; higher is more anomalous."""
        with autocast(self.config.precision, self.device):
            score = partial(tuned(log_odds, self.device), self.net_)
            return score_batches(images, self.shape_, AT_ONCE, self.device, score, self.progress)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that anomaly_score needs, as tensors and as what JSON can hold."""
        about = {"settings": dataclasses.asdict(self.config), "seed": self.seed, "shape": list(self.shape_)}
        return packed(self.net_, calibration=self.calibration_), about

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], about: dict[str, Any], *, device: str = "cpu", progress: Progress = silent
    ) -> Self:
        """The fitted detector that state() described."""
        model = cls(seed=about["seed"], device=device, progress=progress, **about["settings"])
        model.shape_ = tuple(about["shape"])
        model.net_ = model._new_net()
        unpack(model.net_, tensors)
        model.calibration_ = tensors["calibration"]
        return model

    def _new_net(self) -> M2:
        net = M2(self.shape_, self.config.hidden, self.config.latent)
        initialise(net, generator(self.seed, "initial weights"))
        return net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def _hold_out(codes: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """As for every detector, but never the last labelled normal."""
    normals, anomalies = int((codes == NORMAL).sum()), int((codes == ANOMALY).sum())
    if not normals or not anomalies:
        raise UserError(
            f"ss-dgm learns two classes: {normals} images are 'normal' and {anomalies} 'anomaly'; "
            f"label some of both kinds, or use another method"
        )
    train, held_out = hold_out(not_anomalies(codes), seed)
    if not (codes[train] == NORMAL).any():
        kept = held_out[codes[held_out] == NORMAL][:1]
        train, held_out = torch.cat([train, kept]).sort().values, held_out[held_out != kept]
    return train, held_out
