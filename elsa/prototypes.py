"""Prototypes of normal data: the centres of spherical k-means.

Shape suffixes: N embeddings, K prototypes, D features. All are unit vectors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa.errors import UserError


def spherical_kmeans(z_ND: Tensor, num_prototypes: int, generator: torch.Generator, iterations: int = 50) -> Tensor:
    """Unit vectors prototypes_KD that maximise the mean similarity of each embedding to its nearest one.

    The generator lives on the CPU, so that a seed means the same start on every device.
    """
    if num_prototypes > len(z_ND):
        raise UserError(
            f"num_prototypes={num_prototypes} exceeds the {len(z_ND)} embeddings to cluster; "
            f"use fewer prototypes (--set num_prototypes=N) or more images"
        )
    prototypes_KD = _spread_start(z_ND, num_prototypes, generator)
    for _ in range(iterations):
        similarity_NK = z_ND @ prototypes_KD.T
        best_N, member_N = similarity_NK.max(dim=1)
        # a product with the one-hot matrix, not index_add: the latter adds in random order on a GPU
        member_KN = F.one_hot(member_N, num_prototypes).to(z_ND.dtype).T
        sums_KD = member_KN @ z_ND
        # the first empty cluster takes the embedding served worst, the second the next, and so on
        empty_K = member_KN.sum(dim=1) == 0
        worst_N = best_N.argsort(stable=True)
        replacement_KD = z_ND[worst_N[(empty_K.cumsum(0) - 1).clamp(min=0)]]
        sums_KD = torch.where(empty_K[:, None], replacement_KD, sums_KD)
        updated_KD = F.normalize(sums_KD, dim=1)
        settled = torch.equal(updated_KD, prototypes_KD)
        prototypes_KD = updated_KD
        if settled:
            break
    return prototypes_KD


def _spread_start(z_ND: Tensor, num_prototypes: int, generator: torch.Generator) -> Tensor:
    """k-means++: each next start is drawn with probability proportional to its distance from the ones chosen."""
    uniform_K = torch.rand(num_prototypes, generator=generator, dtype=torch.float64).to(z_ND.device)
    chosen = (uniform_K[:1] * len(z_ND)).long().clamp(max=len(z_ND) - 1)
    distance_N = (1 - z_ND @ z_ND[chosen].T).flatten().clamp(min=0)
    for k in range(1, num_prototypes):
        cumulative_N = distance_N.double().cumsum(0)
        # identical embeddings leave no distance to draw from; then any one will do
        target = torch.where(cumulative_N[-1] > 0, uniform_K[k] * cumulative_N[-1], uniform_K[k] * 0)
        drawn = torch.searchsorted(cumulative_N, target.reshape(1), right=True).clamp(max=len(z_ND) - 1)
        chosen = torch.cat([chosen, drawn])
        distance_N = torch.minimum(distance_N, (1 - z_ND @ z_ND[drawn].T).flatten().clamp(min=0))
    return z_ND[chosen]
