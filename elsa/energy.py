"""Elsa's energy: how far a feature lies from every prototype of normal data.

Shape suffixes: B images, K prototypes, D features, R rotations (1 for Elsa, 4 for Elsa+).
Features and prototypes are unit vectors unless a name says raw.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def energy(z_BD: Tensor, prototypes_KD: Tensor, tau: float) -> Tensor:
    """E(x) = -log sum_k exp(z . p_k / tau), one per image; higher is more anomalous."""
    return -torch.logsumexp(z_BD @ prototypes_KD.T / tau, dim=1)


def energy_range(num_prototypes: int, tau: float) -> tuple[float, float]:
    """The lowest energy (every prototype equal to z) and the highest (every prototype opposite to z)."""
    return -(math.log(num_prototypes) + 1 / tau), -(math.log(num_prototypes) - 1 / tau)


def ensemble_of_projections(raw_VRBD: Tensor, prototypes_KD: Tensor, tau: float) -> Tensor:
    """Energy of the mean raw projection over V views, summed over rotations: one unlucky crop cannot decide a score."""
    mean_RBD = F.normalize(raw_VRBD.mean(dim=0), dim=-1)
    return torch.stack([energy(z_BD, prototypes_KD, tau) for z_BD in mean_RBD]).sum(dim=0)


def ensemble_of_scores(raw_VRBD: Tensor, prototypes_KD: Tensor, tau: float) -> Tensor:
    """Mean energy over views and rotations, as the paper's formula reads (its pseudo-code averages projections)."""
    views = F.normalize(raw_VRBD, dim=-1).flatten(0, 1)
    return torch.stack([energy(z_BD, prototypes_KD, tau) for z_BD in views]).mean(dim=0)


ENSEMBLES = {"projections": ensemble_of_projections, "scores": ensemble_of_scores}
