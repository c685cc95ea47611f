"""Elsa's prototypes, energy and loss as a head on a frozen pretrained encoder: seconds on a CPU.

Four parts make the score, each in standard deviations of the images that pass for normal. The *bent* energy is the
paper's: prototypes, and a small map of the embeddings, zero at first, trained by L_e so that labelled anomalies leave
them. The *neighbour* energy takes the training embeddings themselves as prototypes, at a low temperature. The *spread*
is the distance from their middle in units of how much they vary in each direction. The *straight* part is the direction
in which anomalies leave. Labels of many kinds of anomalies are worth a map; labels of one kind, of which a map would
learn too much, a direction and the company of neighbours and spread.

What passes for normal is found on the way: unlabelled images that straight part, neighbours and spread together call
anomalies are turned to the other side, and all three are fitted again. None of the three counts an image for itself.

Shape suffixes: N training images, B images, K prototypes, M remembered images or directions of the map, D features,
R rank of the basis, U unlabelled images.
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
LEARNED_FROM = 6144  # unlabelled images in a fit: similarities of all pairs take 150 MB
USUAL_FALSE_SUSPECTS = 0.05  # of clean images the mixture below calls about so many suspects, as scores are skewed
AS_GOOD_AS = 20  # labelled normals: what the usual share counts beside the one seen among labelled normals
STEEP = 2.5  # bags with labels of nine kinds come out at 0, CIFAR-10's classes with labels of one kind above 0.9
HANDFUL = 20  # labelled anomalies
FEW = 5  # so many anomalies make the learned parts weigh half


@dataclass(frozen=True)
class HeadConfig:
    """Settings of ElsaHead, chosen on training images of CIFAR-10 and of Fashion-MNIST (docs/robust.md)."""

    num_prototypes: int = 20
    """K of the spherical k-means."""
    tau: float = 0.4
    """Temperature of the bent energy; log(num_prototypes) must exceed 1 / tau, or the loss 1/E is unbounded."""
    map_rank: int = 8
    """Directions along which the map may move an embedding."""
    map_penalty: float = 1e-3
    """Price of the map's squared norm: the higher, the closer the bent energy stays to the encoder's geometry."""
    map_iterations: int = 30
    """Steps of L-BFGS; 0 leaves the map at zero and the bent energy at that of the raw embeddings."""
    normal_share: float = 0.5
    """What the labelled normals weigh in L_e beside the unlabelled images, which hide anomalies."""
    rank: int = 384
    """Directions of the embedding space that are kept: those in which normals and labelled anomalies lie."""
    penalty: float = 0.3
    """Price of the straight part's squared norm, in mean squares of the embeddings."""
    floor: float = 1.0
    """Least variance the spread counts with, in mean variances: the higher, the rounder."""
    iterations: int = 2
    """Times the unlabelled images are searched for suspects and everything is fitted again; 0 takes all as normal."""
    memory: int = 4096
    """Most training images remembered as neighbours."""
    neighbour_tau: float = 0.03
    """Temperature of the neighbour energy; so low that it is about the distance to the nearest few."""
    neighbour_weight: float = 0.0
    """What neighbours and spread each weigh beside the learned parts when the anomalies known are of many kinds."""
    neighbour_weight_one_kind: float = 0.6
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
        refuse_unless_positive(self, ["neighbour_tau", "penalty", "floor"])
        refuse_below(self, 0, ["iterations", "map_iterations", "map_penalty", "size"])
        refuse_below(self, 0, ["neighbour_weight", "neighbour_weight_one_kind"])
        refuse_below(self, 1, ["rank", "map_rank"])
        if not 0 <= self.normal_share <= 1:
            raise UserError(f"normal_share={self.normal_share}: must be between 0 and 1.0")
        refuse_below(self, 10, ["memory"])
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
        source = images if kind_of(images) == "vectors" else self._all_encoded(images)
        learned_from = self._learned_from(label_N, held_out)
        z, label = torch.cat(list(self._embedded(source[learned_from]))), label_N[learned_from]
        self.basis_DR_ = principal_directions(z, label, self.config.rank)
        y = z @ self.basis_DR_

        alike_NN = alikeness(y, self.config.neighbour_tau)
        anomalous = (label == ANOMALY).to(y.dtype)
        for step in range(self.config.iterations + 1):
            parts_N3 = self._learn(y, label, anomalous, alike_NN)
            self.progress("head", step + 1, self.config.iterations + 1, {})
            if step < self.config.iterations:
                score = self._combined(parts_N3)
                anomalous[label == UNLABELLED] = suspicion(score[label == UNLABELLED], score[label == NORMAL])
        self._remember(z, y, anomalous)
        parts_N4 = self._bend(y, label, anomalous, parts_N3)
        self._to_double()
        self.calibration_ = self._score(source[held_out])
        self.train_scores_ = self._scores_of_training(source, learned_from, parts_N4)
        self.train_scores_[held_out] = self.calibration_
        return self

    def anomaly_score(self, images: Images) -> Tensor:
        """Learned parts plus neighbours plus spread of images or embeddings; higher is more anomalous."""
        self._check_features(images)
        return self._score(images)

    def prototype_of(self, images: Images) -> Tensor:
        """The index of the prototype each image is closest to."""
        self._check_features(images)
        nearest = [(z_BD @ self.basis_DR_ @ self.prototypes_KR_.T).argmax(dim=1) for z_BD in self._embedded(images)]
        return torch.cat([torch.empty(0, dtype=torch.long), *nearest])

    @property
    def prototypes_KD_(self) -> Tensor:  # noqa: N802, a fitted tensor like the others
        """The prototypes as unit embeddings."""
        return normalize(self.prototypes_KR_ @ self.basis_DR_.T, dim=1)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that anomaly_score needs, the encoder's weights included, as tensors and as what JSON can hold."""
        tensors = {
            "prototypes": self.prototypes_KR_,
            "memory": self.memory_MD_,
            "memory/log_weight": self.log_weight_M_,
            "basis": self.basis_DR_,
            "middle": self.middle_R_,
            "whitening": self.whitening_RR_,
            "direction": self.direction_R_,
            "map/down": self.down_RM_,
            "map/up": self.up_MR_,
            "centre": self.centre_,
            "scale": self.scale_,
            "weight": self.weight_,
            "calibration": self.calibration_,
            "train_scores": self.train_scores_,
        }
        about: dict[str, Any] = {"settings": dataclasses.asdict(self.config), "seed": self.seed, "size": self.size_}
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
        head.prototypes_KR_, head.basis_DR_, head.size_ = tensors["prototypes"], tensors["basis"], about["size"]
        head.memory_MD_, head.log_weight_M_ = tensors["memory"], tensors["memory/log_weight"]
        head.middle_R_, head.whitening_RR_ = tensors["middle"], tensors["whitening"]
        head.direction_R_, head.down_RM_, head.up_MR_ = tensors["direction"], tensors["map/down"], tensors["map/up"]
        head.centre_, head.scale_, head.weight_ = tensors["centre"], tensors["scale"], tensors["weight"]
        head.calibration_, head.train_scores_ = tensors["calibration"], tensors["train_scores"]
        head._to_double()
        return head

    def _learned_from(self, label_N: Tensor, held_out: Tensor) -> Tensor:
        """Places of the labelled images and of at most LEARNED_FROM others that are not held out."""
        train = torch.ones(len(label_N), dtype=torch.bool).index_fill(0, held_out, False).nonzero().flatten()
        unlabelled = label_N[train] == UNLABELLED
        drawn = subsample(train[unlabelled], LEARNED_FROM, fold(self.seed, "learned from"))
        labelled = subsample(train[~unlabelled], LEARNED_FROM, fold(self.seed, "labelled"))
        return torch.cat([labelled, drawn]).sort().values

    def _learn(self, y_NR: Tensor, label_N: Tensor, anomalous_N: Tensor, alike_NN: Tensor) -> Tensor:
        """Fit every part to these shares of anomaly; the parts [N, 3] of each image as one that was not fitted to."""
        config, normal_N = self.config, 1 - anomalous_N
        known = bool((label_N == ANOMALY).any())
        if known:
            self.direction_R_, learned_N = separating_direction(y_NR, anomalous_N, config.penalty)
        else:  # nothing to move away from: what only looks odd does not tell a direction
            self.direction_R_, learned_N = y_NR.new_zeros(y_NR.shape[1]), y_NR.new_zeros(len(y_NR))
        self.middle_R_, self.whitening_RR_, spread_N = spread_of(y_NR, normal_N, config.floor)
        neighbour_N = -(alike_NN @ normal_N).clamp(min=torch.finfo(alike_NN.dtype).tiny).log()
        parts_N3 = torch.stack([learned_N, neighbour_N, spread_N], dim=1).double()

        share_N = normal_N.double() / normal_N.sum()
        self.centre_ = share_N @ parts_N3
        self.scale_ = (share_N @ (parts_N3 - self.centre_).square()).sqrt().clamp(min=1e-6)
        labelled = label_N == ANOMALY
        count = labelled.sum().item()
        # a handful of labels says little, whatever it looks like; turned suspects are of the kinds that hide
        one_kind = max(likeness(y_NR, labelled), 1 - count / HANDFUL) if known else 1.0
        one_kind *= count / (count + (anomalous_N.sum().item() - count) / 2) if known else 1.0
        rest = config.neighbour_weight + one_kind * (config.neighbour_weight_one_kind - config.neighbour_weight)
        trust = min(1.0, count / HANDFUL)
        self.one_kind_ = one_kind
        evidence = trust * anomalous_N.sum().item() if known else 0.0
        use = [max(usefulness(parts_N3[:, k], labelled), 1 - trust) if known else 1.0 for k in (1, 2)]
        self.weight_ = torch.tensor([evidence / (evidence + FEW), *(rest * u for u in use)], dtype=torch.float64)
        return parts_N3

    def _remember(self, z_ND: Tensor, y_NR: Tensor, anomalous_N: Tensor) -> None:
        """Keep what passes for normal as neighbours and as prototypes."""
        normal = (anomalous_N < 0.5).nonzero().flatten()
        kept = subsample(normal, self.config.memory, fold(self.seed, "memory"))
        self.memory_MD_ = z_ND[kept].clone()
        # As if all had been kept, so that new images are compared with the energies of the training images.
        self.log_weight_M_ = (1 - anomalous_N[kept]).log() + math.log(len(normal) / len(kept))
        prototypes_KR = spherical_kmeans(
            normalize(y_NR[normal], dim=1),
            self.config.num_prototypes,
            generator(self.seed, "prototypes"),
            KMEANS_ITERATIONS,
        )
        self.prototypes_KR_ = prototypes_KR

    def _bend(self, y_NR: Tensor, label_N: Tensor, anomalous_N: Tensor, parts_N3: Tensor) -> Tensor:
        """Learn the map from the labels and from what passes for normal; the parts with the bent energy, [N, 4]."""
        config, trusted = self.config, (anomalous_N < 0.5) | (label_N == ANOMALY)
        self.down_RM_, self.up_MR_ = no_map(y_NR, config.map_rank)
        if self.one_kind_ < 1:
            self.down_RM_, self.up_MR_ = learn_map(
                y_NR[trusted], label_N[trusted], self.prototypes_KR_, config, self.seed
            )
        energy_N = energy(moved(y_NR, self.down_RM_, self.up_MR_), self.prototypes_KR_, config.tau).double()
        share_N = (1 - anomalous_N.double()) / (1 - anomalous_N.double()).sum()
        centre = share_N @ energy_N
        scale = (share_N @ (energy_N - centre).square()).sqrt().clamp(min=1e-6)
        self.centre_, self.scale_ = torch.cat([self.centre_, centre[None]]), torch.cat([self.scale_, scale[None]])
        learned, *rest = self.weight_.tolist()
        # a map learned from a handful of labels would learn them by heart
        bent = (1 - self.one_kind_) * min(1.0, (label_N == ANOMALY).sum().item() / HANDFUL)
        weights = [learned * (1 - bent), *rest, learned * bent]
        self.weight_ = torch.tensor(weights, dtype=torch.float64)
        return torch.cat([parts_N3, energy_N[:, None]], dim=1)

    def _scores_of_training(self, source: Images, learned_from: Tensor, parts_N4: Tensor) -> Tensor:
        """Scores of all N, each as one that was not fitted to, but for the bent energy.

        In single precision, with which 100,000 take a third of the time.
        """
        fitted = [tensor.float() for tensor in self._double]
        scores = [self._combined(parts_of(z_BD, *self._taus, *fitted).double()) for z_BD in self._embedded(source)]
        score_N = torch.cat(scores)
        score_N[learned_from] = self._combined(parts_N4)
        return score_N

    def _all_encoded(self, images: Images) -> Tensor:
        """Embeddings [N, D] of images, in one tensor that is there once; of whatever length the encoder gives them."""
        z_ND, done = torch.empty(0), 0
        for part in self._encoded(images, self.progress):
            if not done:
                z_ND = part.new_empty(len(images), part.shape[1])
            z_ND[done : done + len(part)] = part
            done += len(part)
        return z_ND

    def _score(self, images: Images) -> Tensor:
        scores = [self._combined(self._energies(z_BD)) for z_BD in self._embedded(images, self.progress)]
        return torch.cat([torch.empty(0, dtype=torch.float64), *scores])

    @property
    def _taus(self) -> tuple[float, float]:
        return self.config.neighbour_tau, self.config.tau

    def _to_double(self) -> None:
        """Convert once what every score needs: for a full memory it takes as long as embedding an image."""
        basis_DR = self.basis_DR_.double()
        self._double = [
            basis_DR,
            self.memory_MD_.double() @ basis_DR,
            self.log_weight_M_.double(),
            self.middle_R_.double(),
            self.whitening_RR_.double(),
            self.direction_R_.double(),
            self.down_RM_.double(),
            self.up_MR_.double(),
            self.prototypes_KR_.double(),
        ]

    def _energies(self, z_BD: Tensor) -> Tensor:
        """The four parts [B, 4] of unit embeddings.

        In double precision: divided by so low a temperature, float32 rounds differently in batches of another size.
        """
        return parts_of(z_BD.double(), *self._taus, *self._double)

    def _combined(self, parts_BP: Tensor) -> Tensor:
        return ((parts_BP - self.centre_) / self.scale_) @ self.weight_

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


def parts_of(
    z_BD: Tensor,
    neighbour_tau: float,
    tau: float,
    basis_DR: Tensor,
    memory_MR: Tensor,
    log_weight_M: Tensor,
    middle_R: Tensor,
    whitening_RR: Tensor,
    direction_R: Tensor,
    down_RM: Tensor,
    up_MR: Tensor,
    prototypes_KR: Tensor,
) -> Tensor:
    """Straight part, neighbour energy, spread and bent energy [B, 4] of unit embeddings; higher is more anomalous."""
    y_BR = z_BD @ basis_DR
    neighbour_B = -torch.logsumexp((y_BR @ memory_MR.T - 1) / neighbour_tau + log_weight_M, dim=1)
    spread_B = ((y_BR - middle_R) @ whitening_RR).square().sum(dim=1)
    bent_B = energy(moved(y_BR, down_RM, up_MR), prototypes_KR, tau)
    return torch.stack([y_BR @ direction_R, neighbour_B, spread_B, bent_B], dim=1)


def moved(y_BR: Tensor, down_RM: Tensor, up_MR: Tensor) -> Tensor:
    """Embeddings at length one after the map y + (y down) up, which does nothing while `up` is zero."""
    return normalize(y_BR + y_BR @ down_RM @ up_MR, dim=1)


def no_map(y_NR: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The map that moves nothing."""
    return y_NR.new_zeros(y_NR.shape[1], rank), y_NR.new_zeros(rank, y_NR.shape[1])


def learn_map(
    y_NR: Tensor, label_N: Tensor, prototypes_KR: Tensor, config: HeadConfig, seed: int
) -> tuple[Tensor, Tensor]:
    """The small map (down_RM, up_MR) after which L_e is low: anomalies away from the prototypes, the rest close.

    Each group pays its mean loss, so that 30 labels are heard among thousands of images.
    """
    num_features = y_NR.shape[1]
    down_RM = torch.randn(num_features, config.map_rank, generator=generator(seed, "map")) / math.sqrt(num_features)
    down_RM.requires_grad_()
    up_MR = y_NR.new_zeros(config.map_rank, num_features).requires_grad_()
    optimizer = torch.optim.LBFGS([down_RM, up_MR], max_iter=config.map_iterations, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = head_loss(y_NR, label_N, prototypes_KR, down_RM, up_MR, config)
        loss.backward()
        return loss

    if config.map_iterations:
        optimizer.step(step)
    return down_RM.detach(), up_MR.detach()


def head_loss(
    y_NR: Tensor, label_N: Tensor, prototypes_KR: Tensor, down_RM: Tensor, up_MR: Tensor, config: HeadConfig
) -> Tensor:
    """L_e as the mean over both sides, anomalies and the rest, plus the price of the map."""
    energy_N = energy(moved(y_NR, down_RM, up_MR), prototypes_KR, config.tau)
    shares = {ANOMALY: 1.0, NORMAL: config.normal_share, UNLABELLED: 1 - config.normal_share}
    groups = {code: label_N == code for code in shares if (label_N == code).any()}
    total = sum(shares[code] for code in groups)
    loss = sum(
        shares[code] / total * energy_loss(energy_N[group], label_N[group], len(prototypes_KR), config.tau)
        for code, group in groups.items()
    )
    # |down up|^2 without the D x D matrix
    return loss + config.map_penalty * ((down_RM.T @ down_RM) * (up_MR @ up_MR.T)).sum()


def principal_directions(z_ND: Tensor, label_N: Tensor, rank: int) -> Tensor:
    """Orthonormal directions [D, R] that hold most of the squared length; not centred, both sides count the same."""
    sides = [z_ND[label_N != ANOMALY], z_ND[label_N == ANOMALY]]
    square_DD = torch.stack([side.T @ side / len(side) for side in sides if len(side)]).sum(dim=0)
    rank = min(rank, *z_ND.shape)
    return torch.linalg.eigh(square_DD.double()).eigenvectors[:, -rank:].to(z_ND.dtype).contiguous()


def alikeness(y_NR: Tensor, tau: float) -> Tensor:
    """exp((y . y' - 1) / tau) of all pairs, 0 for an image with itself: no image is its own neighbour."""
    alike_NN = y_NR @ y_NR.T
    return alike_NN.sub_(1).div_(tau).exp_().fill_diagonal_(0)


def separating_direction(y_NR: Tensor, anomalous_N: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """The direction along which anomalies are +1 and normals -1, by least squares; and what each image gets without it.

    Each side weighs the same in all. What image i gets from the fit without i follows from its leverage h:
    (f - h t) / (1 - h).
    """
    y = y_NR.double()
    for_anomaly_N = anomalous_N.double() / anomalous_N.sum()
    for_normal_N = (1 - anomalous_N.double()) / (1 - anomalous_N.double()).sum()
    weight_N = for_anomaly_N + for_normal_N
    target_N = (for_anomaly_N - for_normal_N) / weight_N
    weighted_NR = y * weight_N[:, None]
    square_RR = weighted_NR.T @ y
    square_RR += penalty * square_RR.diagonal().mean() * torch.eye(len(square_RR), dtype=y.dtype)
    factor_RR = torch.linalg.cholesky(square_RR)
    direction_R = torch.cholesky_solve((weighted_NR.T @ target_N)[:, None], factor_RR)[:, 0]
    leverage_N = torch.linalg.solve_triangular(factor_RR, y.T, upper=False).square().sum(dim=0) * weight_N
    without_N = (y @ direction_R - leverage_N * target_N) / (1 - leverage_N)
    return direction_R.to(y_NR.dtype), without_N.to(y_NR.dtype)


def spread_of(y_NR: Tensor, normal_N: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Middle and whitening [R, R] of the normals, and each image's squared distance in the measure without it.

    To each direction's variance `floor` mean variances are added, as few images do not tell the small ones.
    """
    y, total = y_NR.double(), normal_N.double().sum()
    middle_R = normal_N.double() @ y / total
    off_NR = y - middle_R
    square_RR = (off_NR * normal_N.double()[:, None]).T @ off_NR / total
    ridge = (floor * square_RR.diagonal().mean()).clamp(min=1e-12)
    factor_RR = torch.linalg.cholesky(square_RR + ridge * torch.eye(len(square_RR), dtype=y.dtype))
    whitening_RR = torch.linalg.inv(factor_RR).T.contiguous()
    distance_N = (off_NR @ whitening_RR).square().sum(dim=1)
    without_N = distance_N / (1 - normal_N.double() * distance_N / total).clamp(min=1e-3)
    return middle_R.to(y_NR.dtype), whitening_RR.to(y_NR.dtype), without_N.to(y_NR.dtype)


def suspicion(score_U: Tensor, known_K: Tensor, steps: int = 50) -> Tensor:
    """How likely each unlabelled image is a hidden anomaly: 0 to 1.

    The scores are taken as a mixture of two bells, the normal one fitted to the labelled normals as well. As scores of
    normal images are skewed, some of them land in the upper bell; as many as do so among the labelled normals
    are discounted from every suspect alike.
    """
    if len(known_K):
        place = torch.searchsorted(score_U.sort().values, known_K).double().mean() / len(score_U)
        if (place - 0.5) * math.sqrt(12 * len(known_K)) > 1:  # asked for because they look odd: no fair sample
            known_K = known_K[:0]
    middle = score_U.median()
    spread = (middle - score_U.quantile(0.16)).clamp(min=1e-9)
    low, wide = middle, spread
    high, broad, rate = middle + 3 * spread, 1.5 * spread, 0.05

    def responsibility(score: Tensor) -> Tensor:
        log_odds = math.log(rate / (1 - rate)) + (wide / broad).log()
        log_odds = log_odds - 0.5 * ((score - high) / broad).square() + 0.5 * ((score - low) / wide).square()
        return torch.where(score > low, torch.sigmoid(log_odds), 0.0)

    for _ in range(steps):
        r = responsibility(score_U)
        normal, weight = torch.cat([score_U, known_K]), torch.cat([1 - r, torch.ones_like(known_K)])
        low = weight @ normal / weight.sum()
        wide = (weight @ (normal - low).square() / weight.sum()).sqrt().clamp(min=1e-9)
        if r.sum() > 3:
            high = r @ score_U / r.sum()
            broad = (r @ (score_U - high).square() / r.sum()).sqrt().clamp(min=0.5 * wide, max=3 * wide)
            high = torch.maximum(high, low + 2 * wide)
        rate = float((r.sum() + 1) / (len(score_U) + 20))

    r = responsibility(score_U)
    false = (responsibility(known_K).sum() + AS_GOOD_AS * USUAL_FALSE_SUSPECTS) / (len(known_K) + AS_GOOD_AS)
    return (r * (1 - false / r.mean().clamp(min=1e-9)).clamp(min=0)).float()


def usefulness(part_N: Tensor, is_anomaly_N: Tensor) -> float:
    """How far a part tells the labelled anomalies from the rest: 0 up to an AUROC of .6, 1 from .8 on."""
    rest = part_N[~is_anomaly_N].sort().values
    places = [torch.searchsorted(rest, part_N[is_anomaly_N], right=right).double().mean() for right in (False, True)]
    return min(max((torch.stack(places).mean().item() / len(rest) - 0.6) / 0.2, 0.0), 1.0)


def likeness(y_NR: Tensor, is_anomaly_N: Tensor) -> float:
    """How much the labelled anomalies are of one kind: 1 if each lies as near to another of them as to the rest.

    Towards 0 as the nearest of the rest come nearer: then each is of a kind of its own. One anomaly is of one kind.
    """
    anomalies, rest = y_NR[is_anomaly_N], y_NR[~is_anomaly_N]
    if len(anomalies) < 2:
        return 1.0
    among = (anomalies @ anomalies.T).fill_diagonal_(-torch.inf).amax(dim=1).mean().item()
    across = (anomalies @ rest.T).amax(dim=1).mean().item()
    return min(max(1 + STEEP * (among - across) / max(1 - across, 1e-6), 0.0), 1.0)


def _calibration_candidates(label_N: Tensor) -> Tensor:
    """Unlabelled images where there are enough: labelled normals are too few and too well known to be held out."""
    unlabelled = (label_N == UNLABELLED).nonzero().flatten()
    return unlabelled if len(unlabelled) >= 2 * LEAST_HELD_OUT else not_anomalies(label_N)
