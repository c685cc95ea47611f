"""The losses of the paper as pure functions of tensors.

Shape suffixes: B images, D features, N views in a batch (the second half repeats the first half's instances).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa.energy import energy_range
from elsa.labels import ANOMALY


def energy_loss(energy_B: Tensor, label_B: Tensor, num_prototypes: int, tau: float) -> Tensor:
    """L_e: push normal and unlabelled images to low energy and known anomalies to high energy.

    Each image pays 1 / (distance to the end of the energy range it must leave), so the
    pull is strongest on the images that are most wrong and fades on the ones already right.
    """
    lowest, _ = energy_range(num_prototypes, tau)
    room_B = torch.where(label_B == ANOMALY, energy_B - lowest, -energy_B)
    return room_B.reciprocal().mean()


def nt_xent(z_ND: Tensor, tau: float) -> Tensor:
    """SimCLR's loss: -log of the share of exp(similarity / tau) that a view's other view has among all other views.

    View i and view i + N/2 show the same instance; a rotated copy is an instance of its own, so it is a negative.
    """
    num_views = len(z_ND)
    similarity_NN = (z_ND @ z_ND.T / tau).float()
    similarity_NN = similarity_NN.masked_fill(torch.eye(num_views, dtype=torch.bool, device=z_ND.device), -torch.inf)
    partner_N = torch.arange(num_views, device=z_ND.device).roll(num_views // 2)
    return F.cross_entropy(similarity_NN, partner_N)


def rotation_loss(logits_NR: Tensor, rotation_N: Tensor, label_N: Tensor) -> Tensor:
    """L_s: cross-entropy of the predicted rotation, over everything but labelled anomalies."""
    counted_N = (label_N != ANOMALY).to(logits_NR.dtype)
    each_N = F.cross_entropy(logits_NR, rotation_N, reduction="none")
    return (each_N * counted_N).sum() / counted_N.sum().clamp(min=1)
