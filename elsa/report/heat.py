"""Heat maps as pictures: the image in grey, and colour where the score comes from."""

import torch
from torch import Tensor

# From see-through yellow to opaque red; red means the same in light and dark, on screen and on paper.
COLD, HOT = (255, 210, 60), (214, 30, 30)
MOST_OPAQUE = 0.75


def overlay(image: Tensor, heat: Tensor, at_least: float) -> Tensor:
    """uint8 [3, H, W]: the grey image under its heat [H, W].

    Full red is the hottest place, or `at_least` where the whole map is cooler: without it the least unusual image
    would glow like the most unusual one.
    """
    assert at_least > 0
    grey_HW = image.float().mean(dim=0)
    strength_HW = (heat.float() / max(at_least, float(heat.max()))).clamp(0, 1)
    colour = torch.stack(
        [
            torch.lerp(torch.tensor(float(a)), torch.tensor(float(b)), strength_HW)
            for a, b in zip(COLD, HOT, strict=True)
        ]
    )
    return torch.lerp(grey_HW.expand(3, -1, -1), colour, MOST_OPAQUE * strength_HW.sqrt()).round().to(torch.uint8)


def faint(calibration: Tensor) -> float:
    """The heat below which a map stays faint: one standard deviation of the scores of held-out images."""
    return max(float(calibration.double().std(correction=0)), 1e-6)
