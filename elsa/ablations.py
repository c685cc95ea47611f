"""What the paper compares its energy and its loss with: other scores, other losses, and a single prototype.

Shape suffixes: B images, K prototypes (or remembered embeddings), D features, N views of a batch. All are unit vectors.
A score S is higher for normal images and has a highest value C; the energy is -S.
"""

import math

import torch
from torch import Tensor

from elsa.energy import energy
from elsa.labels import ANOMALY
from elsa.losses import energy_loss

SCORES = ("prototypes", "cosine", "contrastive")
LOSSES = ("inverse", "clamped", "naive", "deep-sad")
LEAST = 0.01  # what 1/S and 1/(C - S) divide by at least; a cosine can reach either end, a single prototype S < 0


def cosine_score(z_BD: Tensor, prototypes_KD: Tensor) -> Tensor:
    """S_cos(x) = 1 + max_k z . p_k: shifted by its lower bound, so between 0 and 2."""
    return 1 + (z_BD @ prototypes_KD.T).amax(dim=1)


def contrastive_score(z_BD: Tensor, remembered_KD: Tensor) -> Tensor:
    """S_cont(x) = log sum of exp(z . z') over remembered embeddings: how it is taken in a test."""
    return torch.logsumexp(z_BD @ remembered_KD.T, dim=1)


def contrastive_score_of_batch(z_ND: Tensor) -> Tensor:
    """S_cont(x) over all other views of the batch: how it is taken in training."""
    itself = torch.eye(len(z_ND), dtype=torch.bool, device=z_ND.device)
    return torch.logsumexp((z_ND @ z_ND.T).masked_fill(itself, -torch.inf), dim=1)


def highest_score(score: str, count: int, tau: float) -> float:
    """C: the largest value the score can take with so many prototypes or other views."""
    if score == "cosine":
        return 2.0
    return math.log(count) + (1 / tau if score == "prototypes" else 1.0)


def loss_of_scores(score_B: Tensor, label_B: Tensor, highest: float, loss: str) -> Tensor:
    """The mean over the batch of what a labelled anomaly and what everything else pays.

    inverse: 1/(C - S) and 1/S; naive: S and -S; deep-sad: 1/(C - S) and -S. Denominators are kept above LEAST;
    `clamped` is inverse by another name, for settings under which that matters to say so.
    """
    is_anomaly_B = label_B == ANOMALY
    pushed_B = score_B if loss == "naive" else (highest - score_B).clamp(min=LEAST).reciprocal()
    pulled_B = score_B.clamp(min=LEAST).reciprocal() if loss in ("inverse", "clamped") else -score_B
    return torch.where(is_anomaly_B, pushed_B, pulled_B).mean()


def ablated_loss(z_ND: Tensor, prototypes_KD: Tensor, label_N: Tensor, score: str, loss: str, tau: float) -> Tensor:
    """L_e with another score or another form; with `prototypes` and `inverse` it is Elsa's own, to the bit."""
    if (score, loss) == ("prototypes", "inverse"):
        return energy_loss(energy(z_ND, prototypes_KD, tau), label_N, len(prototypes_KD), tau)
    if score == "contrastive":
        return loss_of_scores(contrastive_score_of_batch(z_ND), label_N, highest_score(score, len(z_ND) - 1, tau), loss)
    score_N = cosine_score(z_ND, prototypes_KD) if score == "cosine" else -energy(z_ND, prototypes_KD, tau)
    return loss_of_scores(score_N, label_N, highest_score(score, len(prototypes_KD), tau), loss)


def ablated_energy(z_BD: Tensor, prototypes_KD: Tensor, tau: float, score: str) -> Tensor:
    """-S for scoring and early stopping; for `contrastive` the prototypes are all training embeddings."""
    if score == "cosine":
        return -cosine_score(z_BD, prototypes_KD)
    if score == "contrastive":
        return -contrastive_score(z_BD, prototypes_KD)
    return energy(z_BD, prototypes_KD, tau)


def uniformity(z_ND: Tensor) -> Tensor:
    """log of the mean over pairs of exp(-2 |z - z'|^2) (Wang and Isola): lower is more evenly spread."""
    pairs = len(z_ND) * (len(z_ND) - 1)
    squared_NN = 2 - 2 * z_ND @ z_ND.T
    itself = torch.eye(len(z_ND), dtype=torch.bool, device=z_ND.device)
    return torch.logsumexp((-2 * squared_NN).masked_fill(itself, -torch.inf).flatten(), dim=0) - math.log(pairs)


def contrastive_energy(z_BD: Tensor, training_ND: Tensor, tau: float, within: bool = False) -> Tensor:
    """E(x) = -log of the mean over training images of exp(z . z' / tau); `within` leaves each image itself out."""
    similarity_BN = z_BD @ training_ND.T / tau
    if within:
        itself = torch.eye(len(z_BD), dtype=torch.bool, device=z_BD.device)
        similarity_BN = similarity_BN.masked_fill(itself, -torch.inf)
    return math.log(len(training_ND) - within) - torch.logsumexp(similarity_BN, dim=1)
