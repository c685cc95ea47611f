"""A small workspace, made the way `elsa label` makes one, with an encoder of 24 numbers instead of a network."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from elsa.data.sources import open_source
from elsa.encoders import Encoder
from elsa.mobilenet import MobileNetV2
from elsa.workspace.prepare import encoder_sha256, prepare
from elsa.workspace.refit import fit
from elsa.workspace.session import open_session

FEATURES = 24


class Projection(nn.Module):
    """Random directions in the pixels, averaged over patches: enough to tell a bright disc from a dark one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 3 * 8 * 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, pixels):
        small = nn.functional.adaptive_avg_pool2d(pixels, 8).flatten(1)
        return small @ self.weight.T + 3


@dataclass(frozen=True)
class TinyEncoder(Encoder):
    features: int = FEATURES

    @cached_property
    def inference_net(self):
        return Projection()


def weight_file(folder: Path) -> Path:
    """A file that the refit process can read as MobileNetV2, with random weights."""
    path = folder / "random.pth"
    if not path.exists():
        torch.save(MobileNetV2().state_dict(), path)
    return path


def make_folder(folder: Path, count: int = 90) -> Path:
    """Dark discs on grey; every ninth is bright, hence an anomaly. Two come with a word from their folder."""
    noise = np.random.default_rng(0)
    y, x = np.mgrid[:36, :36]
    for number in range(count):
        place = folder / {0: "anomaly", 1: "normal"}.get(number, "parts")
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.full((36, 36, 3), 120.0) + noise.normal(0, 12, (36, 36, 3))
        shift = noise.integers(-6, 7, 2)
        disc = (y - 18 - shift[0]) ** 2 + (x - 18 - shift[1]) ** 2 < 60
        pixels[disc] += 110 if number % 9 == 0 else -90
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number:03}.png")
    return folder


def is_anomaly(name: str) -> bool:
    return int(Path(name).stem) % 9 == 0


def make_workspace(folder: Path, source: Path, weights: Path, models: int = 1) -> Path:
    """Prepared, and with finished models that no store knows of yet, as after a kill at the very end of a fit."""
    text = f"mobilenet_v2:{weights}"
    open_session(source, folder, encoder=text, who="ann").close()
    sha256 = encoder_sha256(text)
    encoder = TinyEncoder("mobilenet_v2", MobileNetV2(), weights.name, sha256)
    prepared = prepare(folder, open_source(source), encoder)
    for number in range(1, models + 1):
        labelled = [row for row, name in enumerate(prepared.names) if not name.startswith("parts")]
        job = {
            "number": number,
            "after": 0,
            "command": "elsa label",
            "normal": [row for row in labelled if not is_anomaly(prepared.names[row])],
            "anomaly": [row for row in labelled if is_anomaly(prepared.names[row])] if number == 1 else [],
        }
        fit(folder, prepared, encoder, job, lambda *news: None)
    return folder
