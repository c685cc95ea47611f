"""A model that scores without having been trained, and pictures for it; made in a blink."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from elsa.elsa import Elsa
from elsa.saved import save_model
from elsa.trust.explain import space_of

SIDE = 32
HOW = {"size": SIDE, "channels": 3, "resize": "stretch", "pixel_limit": 200_000_000}


def make_model(folder: Path, seed: int = 0, calibrated_on: int = 99) -> Elsa:
    """An Elsa+ with random weights in a MODEL folder."""
    model = Elsa(method="elsa+", preset="cpu", encoder="tiny", views=1, num_prototypes=8, seed=seed)
    model.net_ = model._new_net((0, 3, SIDE, SIDE)).eval()
    model.prototypes_ = torch.eye(8, 128)
    space = space_of(model)
    assert space is not None
    model.prototypes_ = space.vectors(pixels(8, seed=500))  # random weights send all pictures to nearly one place
    model.history_ = []
    model.calibration_ = model.anomaly_score(pixels(calibrated_on, seed=1000))
    save_model(model, folder, {"preprocessing": HOW, "versions": {}})
    return model


def pixels(count: int, seed: int = 0, low: int = 0, high: int = 256) -> torch.Tensor:
    """Smooth random pictures uint8 [count, 3, 32, 32]."""
    coarse = np.random.default_rng(seed).integers(low, high, (count, 4, 4, 3), np.uint8)
    images = [np.asarray(Image.fromarray(each).resize((SIDE, SIDE))) for each in coarse]
    return torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).copy())


def png(image: torch.Tensor) -> bytes:
    """One picture as a file that loses nothing."""
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()
