"""Early stopping without labels: can the model tell held-back images from strongly distorted copies of them?"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elsa.augment import draw, rotations, weak
from elsa.config import ElsaConfig
from elsa.energy import energy
from elsa.inference import fold_norms, project
from elsa.nets import Net
from elsa.seeds import generator
from elsa.strong import strong

GROUP = 64  # images whose AUROC is taken together, as in the paper
MOST = 4096  # images that are copied: their copies stay in memory, and 64 groups say enough


def looked_at(held_back: Tensor) -> Tensor:
    """All of these places, or evenly spread ones where there are more than MOST."""
    return held_back[:: -(-len(held_back) // MOST)]


def early_stop_copies(images: Tensor, config: ElsaConfig, seed: int) -> tuple[Tensor, Tensor]:
    """A weakly and a strongly augmented copy of each image, drawn once and kept for all epochs."""
    draws = generator(seed, "early stop")
    distorted = strong(images, draws)
    copies = [
        weak(x, draw(len(x), draws).to(images.device), config.crop_area_min, config.crop_area_max)
        for x in (images, distorted)
    ]
    return copies[0], copies[1]


def early_stop_score(net: Net, prototypes_KD: Tensor, copies: tuple[Tensor, Tensor], config: ElsaConfig) -> float:
    """AUROC of strongly against weakly augmented copies by energy, mean over groups; higher is a better model."""
    folded = fold_norms(net, config)
    weak_B, strong_B = (rotation_summed_energy(folded, prototypes_KD, x, config) for x in copies)
    groups = zip(weak_B.split(GROUP), strong_B.split(GROUP), strict=True)
    return torch.stack([pairwise_auroc(normal, anomalous) for normal, anomalous in groups]).mean().item()


def rotation_summed_energy(net: nn.Module, prototypes_KD: Tensor, x: Tensor, config: ElsaConfig) -> Tensor:
    """Energy of each image, summed over its rotations; higher is more anomalous."""
    z_ND = F.normalize(project(net, rotations(x, config.shifts), config), dim=1)
    return energy(z_ND, prototypes_KD, config.score_tau).view(config.shifts, len(x)).sum(dim=0)


def pairwise_auroc(normal_A: Tensor, anomalous_B: Tensor) -> Tensor:
    """Share of pairs in which the anomalous one scores higher; a tie counts half."""
    difference_AB = anomalous_B[None, :] - normal_A[:, None]
    return ((difference_AB > 0).double() + 0.5 * (difference_AB == 0).double()).mean()
