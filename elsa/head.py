"""Elsa's prototypes, energy and loss as a head on a frozen pretrained encoder: seconds on a CPU.

Two energies make the score. The *learned* one bends the embedding space by a small map that starts at zero, so that
labelled anomalies leave the prototypes; it knows what the labels know. The *neighbour* energy takes the training
embeddings themselves as prototypes, at a low temperature, in the space as it is; it knows every image and needs no
label. Alone, each loses somewhere (docs/head.md); in equal shares they lose nowhere.

Shape suffixes: N training images, B images, K prototypes, M remembered images, D features, R rank of the map.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from elsa.detectors.inputs import LEAST_HELD_OUT, Images, checked, hold_out, kind_of, not_anomalies, subsample
from elsa.detectors.networks import refuse_below, refuse_unless_positive, settings_of
from elsa.encoders import VIEWS, Encoder, embed_batches, input_size, parse_encoder, restore_encoder
from elsa.energy import energy
from elsa.errors import UserError
from elsa.labels import ANOMALY, NORMAL, UNLABELLED
from elsa.losses import energy_loss
from elsa.progress import Progress, silent
from elsa.prototypes import spherical_kmeans
from elsa.seeds import fold, generator

KMEANS_ITERATIONS = 10  # the map is learned around the prototypes; ten more iterations move no AUROC by 0.1
SCORED_AT_ONCE = 1024  # against 4,096 remembered images 16 MB of similarities
FOLDS = 10
LEARNED_FROM = 8192  # unlabelled images in a fit; with 20,000 it took 52 s of one core


@dataclass(frozen=True)
class HeadConfig:
    """Settings of ElsaHead, chosen on the training file of Fashion-MNIST and on training images of CIFAR-10."""

    num_prototypes: int = 20
    """K of the spherical k-means."""
    tau: float = 0.4
    """Temperature of the learned energy; log(num_prototypes) must exceed 1 / tau, or the loss 1/E is unbounded."""
    rank: int = 8
    """Directions along which the map may move an embedding."""
    penalty: float = 1e-3
    """Price of the map's squared norm: the higher, the closer the learned energy stays to the encoder's geometry."""
    iterations: int = 30
    """Steps of L-BFGS; 0 leaves the map at zero and the learned energy at that of the raw embeddings."""
    normal_share: float = 0.5
    """What the labelled normals weigh beside the unlabelled images, which hide anomalies."""
    suspects: float = 0.15
    """Share of the unlabelled images, the most anomalous ones, that is kept out of prototypes, loss and memory."""
    memory: int = 4096
    """Most training images remembered as neighbours."""
    neighbour_tau: float = 0.03
    """Temperature of the neighbour energy; so low that it is about the distance to the nearest few."""
    neighbour_weight: float = 0.5
    """What the neighbour energy weighs beside the learned one when the labelled anomalies are of many kinds."""
    neighbour_weight_one_kind: float = 3.0
    """The same when they are all of one kind: then the labels say little about the other kinds there may be."""
    size: int = 0
    """Side in pixels at which the encoder sees an image; 0 chooses by the size of the images."""
    views: str = "image and its flip"
    """What an embedding is the mean of: 'image and its flip', or 'image' in half the time."""

    def __post_init__(self) -> None:
        if not self.tau * math.log(max(self.num_prototypes, 1)) > 1:  # also refuses nan
            raise UserError(
                f"tau={self.tau} with num_prototypes={self.num_prototypes} lets the energy reach zero, where the loss "
                f"1/E is unbounded: tau * log(num_prototypes) must exceed 1; use a larger tau or more prototypes"
            )
        refuse_unless_positive(self, ["neighbour_tau"])
        refuse_below(self, 0, ["iterations", "size", "penalty", "neighbour_weight", "neighbour_weight_one_kind"])
        refuse_below(self, 1, ["rank"])
        refuse_below(self, FOLDS, ["memory"])
        for name, most in (("normal_share", 1.0), ("suspects", 0.5)):
            if not 0 <= getattr(self, name) <= most:
                raise UserError(f"{name}={getattr(self, name)}: must be between 0 and {most}")
        if self.views not in VIEWS:
            raise UserError(f"views={self.views!r}: use one of {', '.join(map(repr, VIEWS))}")


class ElsaHead:
    """Learns from embeddings, or from images with an encoder; scores are higher for anomalies."""

    def __init__(
        self,
        *,
        seed: int = 0,
        device: str = "cpu",
        progress: Progress = silent,
        encoder: Encoder | str | None = None,
        **settings: Any,
    ):
        self.config = settings_of(HeadConfig, settings)
        self.seed, self.device, self.progress = seed, device, progress
        self.encoder = parse_encoder(encoder) if isinstance(encoder, str) else encoder

    def fit(self, images: Images, labels: Sequence[str | None]) -> Self:
        """Train on uint8 images [N, C, H, W] or on their embeddings [N, D], and their label words."""
        label_N = checked(images, labels)
        _, held_out = hold_out(_calibration_candidates(label_N), self.seed)
        self.size_ = self.config.size
        if kind_of(images) == "images":
            self.size_ = self.size_ or input_size(max(images.shape[2:]))
        z_ND = torch.cat(list(self._embedded(images, self.progress)))
        train = torch.ones(len(label_N), dtype=torch.bool).index_fill(0, held_out, False).nonzero().flatten()

        # Twice: the first round finds suspects among the unlabelled images, the second learns without them.
        self._learn(z_ND, label_N, train)
        self.progress("head", 1, 2, {})
        self._learn(z_ND, label_N, _without_suspects(train, label_N, self._suspicion_N, self.config.suspects))
        self.progress("head", 2, 2, {})
        self.calibration_ = self.train_scores_[held_out]
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """Learned plus neighbour energy of images or embeddings; higher is more anomalous."""
        self._check_features(images)
        scores = [self._combined(self._energies(z_BD)) for z_BD in self._embedded(images, self.progress)]
        return torch.cat([torch.empty(0, dtype=torch.float64), *scores])

    def prototype_of(self, images: Images) -> Tensor:
        """The index of the prototype each image is closest to, in the learned space."""
        self._check_features(images)
        nearest = [
            (moved(z_BD, self.down_DR_, self.up_RD_) @ self.prototypes_KD_.T).argmax(dim=1)
            for z_BD in self._embedded(images)
        ]
        return torch.cat([torch.empty(0, dtype=torch.long), *nearest])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that anomaly_score needs, the encoder's weights included, as tensors and as what JSON can hold."""
        tensors = {
            "prototypes": self.prototypes_KD_,
            "memory": self.memory_MD_,
            "map/down": self.down_DR_,
            "map/up": self.up_RD_,
            "centre": self.centre_,
            "scale": self.scale_,
            "calibration": self.calibration_,
            "train_scores": self.train_scores_,
        }
        about: dict[str, Any] = {
            "settings": dataclasses.asdict(self.config),
            "seed": self.seed,
            "size": self.size_,
            "learned": self.learned_,
            "neighbour_weight": self.neighbour_weight_,
        }
        if self.encoder is not None:
            tensors |= {f"encoder/{name}": tensor for name, tensor in self.encoder.net.state_dict().items()}
            about["encoder"] = {"name": self.encoder.name, "file": self.encoder.file, "sha256": self.encoder.sha256}
        return tensors, about

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], about: dict[str, Any], *, device: str = "cpu", progress: Progress = silent
    ) -> Self:
        """The fitted detector that state() described."""
        encoder = None
        if "encoder" in about:
            weights = {k.removeprefix("encoder/"): t for k, t in tensors.items() if k.startswith("encoder/")}
            encoder = restore_encoder(weights, **about["encoder"])
        head = cls(seed=about["seed"], device=device, progress=progress, encoder=encoder, **about["settings"])
        head.prototypes_KD_, head.memory_MD_ = tensors["prototypes"], tensors["memory"]
        head.down_DR_, head.up_RD_ = tensors["map/down"], tensors["map/up"]
        head._to_double()
        head.centre_, head.scale_, head.learned_ = tensors["centre"], tensors["scale"], about["learned"]
        head.neighbour_weight_, head.size_ = about["neighbour_weight"], about["size"]
        head.calibration_, head.train_scores_ = tensors["calibration"], tensors["train_scores"]
        return head

    def _learn(self, z_ND: Tensor, label_N: Tensor, trusted: Tensor) -> None:
        """Prototypes, map, memory and scales from the trusted places; then the scores of all N, each without itself."""
        config = self.config
        unlabelled = label_N[trusted] == UNLABELLED
        drawn = subsample(trusted[unlabelled], LEARNED_FROM, fold(self.seed, "learned from"))
        learned_from = torch.cat([trusted[~unlabelled], drawn]).sort().values
        z, label = z_ND[learned_from], label_N[learned_from]
        self.prototypes_KD_ = spherical_kmeans(
            z[label != ANOMALY], config.num_prototypes, generator(self.seed, "prototypes"), KMEANS_ITERATIONS
        )
        # With no labelled anomaly there is nothing to move away from: the loss would only draw everything together.
        self.learned_ = bool((label == ANOMALY).any())
        maps = learn_map(z, label, self.prototypes_KD_, config, self.seed) if self.learned_ else no_map(z, config.rank)
        self.down_DR_, self.up_RD_ = maps
        alike = likeness(z[label == ANOMALY], z[label != ANOMALY])
        self.neighbour_weight_ = (1 - alike) * config.neighbour_weight + alike * config.neighbour_weight_one_kind

        remembered = subsample(trusted[label_N[trusted] != ANOMALY], config.memory, fold(self.seed, "memory"))
        self.memory_MD_ = z_ND[remembered]
        self._to_double()
        energies_N2 = torch.cat([self._energies(part) for part in z_ND.split(SCORED_AT_ONCE)])
        energies_N2[remembered, 1] = self._energies_of_the_remembered()
        normal = energies_N2[trusted[label_N[trusted] != ANOMALY]]
        self.centre_, self.scale_ = normal.mean(dim=0), normal.std(dim=0).clamp(min=1e-6)
        self.train_scores_ = self._combined(energies_N2)
        self._suspicion_N = energies_N2[:, 0 if self.learned_ else 1]

    def _to_double(self) -> None:
        """Convert once what every score needs: for a full memory it takes as long as embedding an image."""
        self._double = [
            tensor.double() for tensor in (self.down_DR_, self.up_RD_, self.prototypes_KD_, self.memory_MD_)
        ]

    def _energies(self, z_BD: Tensor) -> Tensor:
        """Learned and neighbour energy [B, 2] of unit embeddings.

        In double precision: divided by so low a temperature, float32 rounds differently in batches of another size.
        """
        z_BD = z_BD.double()
        down_DR, up_RD, prototypes_KD, memory_MD = self._double
        learned_B = energy(moved(z_BD, down_DR, up_RD), prototypes_KD, self.config.tau)
        neighbour_B = energy(z_BD, memory_MD, self.config.neighbour_tau)
        return torch.stack([learned_B, neighbour_B], dim=1)

    def _energies_of_the_remembered(self) -> Tensor:
        """Neighbour energy [M] of each remembered image without the tenth of the memory that it is in itself."""
        memory_MD = self._double[3]
        fold_M = torch.arange(len(memory_MD)) % FOLDS
        energy_M = memory_MD.new_empty(len(memory_MD))
        for number in fold_M.unique():
            inside = fold_M == number
            energy_M[inside] = energy(memory_MD[inside], memory_MD[~inside], self.config.neighbour_tau)
        return energy_M

    def _combined(self, energies_B2: Tensor) -> Tensor:
        learned_B, neighbour_B = ((energies_B2 - self.centre_) / self.scale_).unbind(dim=1)
        return learned_B + self.neighbour_weight_ * neighbour_B if self.learned_ else neighbour_B

    def _check_features(self, images: Images) -> None:
        expected = self.memory_MD_.shape[1]
        if kind_of(images) == "vectors" and images.shape[1] != expected:
            raise UserError(
                f"vectors of {images.shape[1]} numbers, the head was fitted on {expected}: embed with the same encoder"
            )

    def _embedded(self, images: Images, progress: Progress = silent) -> Iterator[Tensor]:
        """Unit embeddings [B, D], a batch at a time."""
        if kind_of(images) == "images":
            yield from (normalize(part, dim=1) for part in self._encoded(images, progress))
            return
        for start in range(0, len(images), SCORED_AT_ONCE):
            part = images[start : start + SCORED_AT_ONCE].float()
            if not part.isfinite().all():
                raise UserError(
                    "vectors hold NaN or infinite numbers: only finite ones are allowed; embed these images again"
                )
            yield normalize(part, dim=1)

    def _encoded(self, images: Images, progress: Progress) -> Iterator[Tensor]:
        if self.encoder is None:
            raise UserError(
                "elsa-head was given images and has no encoder: pass encoder='mobilenet_v2:FILE', or embeddings [N, D]"
            )
        return embed_batches(
            self.encoder,
            images,
            size=self.size_ or None,
            views=self.config.views,
            device=self.device,
            progress=progress,
        )


def moved(z_BD: Tensor, down_DR: Tensor, up_RD: Tensor) -> Tensor:
    """Unit embeddings after the map z + (z down) up; the embeddings themselves while `up` is zero."""
    return normalize(z_BD + z_BD @ down_DR @ up_RD, dim=1)


def likeness(anomalies_AD: Tensor, normals_ND: Tensor) -> float:
    """How much the anomalies are of one kind: 0 if no more alike than anomaly and normal are, 1 if as alike as normals.

    One anomaly is of one kind.
    """
    if len(anomalies_AD) < 2 or len(normals_ND) < 2:
        return 1.0
    across = (anomalies_AD.mean(dim=0) @ normals_ND.mean(dim=0)).item()
    among_anomalies, among_normals = mean_similarity(anomalies_AD), mean_similarity(normals_ND)
    if among_anomalies <= across or among_anomalies >= among_normals:
        return float(among_anomalies > across)
    return (among_anomalies - across) / (among_normals - across)


def mean_similarity(z_ND: Tensor) -> float:
    """The mean cosine of two different ones among unit embeddings; a sum over pairs without the N x N matrix."""
    count = len(z_ND)
    return ((z_ND.sum(dim=0).square().sum() - count) / (count * (count - 1))).item()


def no_map(z_ND: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The map that moves nothing."""
    return z_ND.new_zeros(z_ND.shape[1], rank), z_ND.new_zeros(rank, z_ND.shape[1])


def learn_map(
    z_ND: Tensor, label_N: Tensor, prototypes_KD: Tensor, config: HeadConfig, seed: int
) -> tuple[Tensor, Tensor]:
    """The small map (down_DR, up_RD) after which L_e is low: anomalies away from the prototypes, the rest close.

    Each group pays its mean loss, so that 30 labels are heard among thousands of images.
    """
    num_features = z_ND.shape[1]
    down_DR = torch.randn(num_features, config.rank, generator=generator(seed, "map")) / math.sqrt(num_features)
    down_DR.requires_grad_()
    up_RD = z_ND.new_zeros(config.rank, num_features).requires_grad_()
    optimizer = torch.optim.LBFGS([down_DR, up_RD], max_iter=config.iterations, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = head_loss(z_ND, label_N, prototypes_KD, down_DR, up_RD, config)
        loss.backward()
        return loss

    if config.iterations:
        optimizer.step(step)
    return down_DR.detach(), up_RD.detach()


def head_loss(
    z_ND: Tensor, label_N: Tensor, prototypes_KD: Tensor, down_DR: Tensor, up_RD: Tensor, config: HeadConfig
) -> Tensor:
    """L_e as the mean over both sides, anomalies and the rest, plus the price of the map."""
    energy_N = energy(moved(z_ND, down_DR, up_RD), prototypes_KD, config.tau)
    shares = {ANOMALY: 1.0, NORMAL: config.normal_share, UNLABELLED: 1 - config.normal_share}
    groups = {code: label_N == code for code in shares if (label_N == code).any()}
    total = sum(shares[code] for code in groups)
    loss = sum(
        shares[code] / total * energy_loss(energy_N[group], label_N[group], len(prototypes_KD), config.tau)
        for code, group in groups.items()
    )
    # |down up|^2 without the D x D matrix
    return loss + config.penalty * ((down_DR.T @ down_DR) * (up_RD @ up_RD.T)).sum()


def _calibration_candidates(label_N: Tensor) -> Tensor:
    """Unlabelled images where there are enough: labelled normals are too few and too well known to be held out."""
    unlabelled = (label_N == UNLABELLED).nonzero().flatten()
    return unlabelled if len(unlabelled) >= 2 * LEAST_HELD_OUT else not_anomalies(label_N)


def _without_suspects(train: Tensor, label_N: Tensor, score_N: Tensor, share: float) -> Tensor:
    """The training places without that share of the unlabelled ones that scores highest."""
    unlabelled = train[label_N[train] == UNLABELLED]
    ranked = unlabelled[score_N[unlabelled].argsort(descending=True, stable=True)]
    suspects = ranked[: int(share * len(ranked))]
    return train[~torch.isin(train, suspects)]
