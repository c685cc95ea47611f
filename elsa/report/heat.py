"""Heat maps as pictures: the image in grey, and colour where the score comes from."""

import torch
from torch import Tensor

# From see-through yellow to opaque red; red means the same in light and dark, on screen and on paper.
COLD, HOT = (255.0, 210.0, 60.0), (214.0, 30.0, 30.0)
MOST_OPAQUE = 0.75
FAINTEST = 0.2


def overlay(image: Tensor, heat: Tensor, strength: float = 1.0) -> Tensor:
    """uint8 [3, H, W]: the grey image under its heat [H, W]; at `strength` 1 the hottest place is fully red."""
    grey_HW = image.float().mean(dim=0)
    hot_HW = (heat.float() / heat.max().clamp(min=1e-12)).clamp(0, 1) * strength
    cold_3, red_3 = torch.tensor(COLD)[:, None, None], torch.tensor(HOT)[:, None, None]
    colour = torch.lerp(cold_3, red_3, hot_HW.expand(3, -1, -1))
    return torch.lerp(grey_HW.expand(3, -1, -1), colour, MOST_OPAQUE * hot_HW.sqrt()).round().to(torch.uint8)


def strength_of(score: float, calibration: Tensor) -> float:
    """How red an image may get: fully from the highest twentieth of the held-out images on, faintly up to their middle.

    A place stands out in every image, if only by a hair; without this the most ordinary image would glow like the
    strangest one.
    """
    middle, high = calibration.double().quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    if high <= middle:
        return 1.0 if score > middle else FAINTEST
    return min(1.0, max(FAINTEST, (score - middle) / (high - middle)))
