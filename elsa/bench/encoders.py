"""Pre-trained encoders on disk, while a machine is held: a process that was stopped need not pre-train again."""

import dataclasses
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from elsa.bench.lines import commit
from elsa.bench.plans import Cell
from elsa.config import ElsaConfig

# Settings that pre-training reads, beside all that begin with pretrain_.
ALSO_READ = ("encoder", "stem", "shifts", "crop_area_min", "crop_area_max", "precision")


class EncoderStore:
    """One .npz of about 45 MB for each encoder; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def path(self, cell: Cell, config: ElsaConfig) -> Path:
        """Where the encoder of the cell lies; another commit or other settings of pre-training are another file."""
        assert self.folder is not None
        settings = dataclasses.asdict(config)
        read = {name: settings[name] for name in settings if name.startswith("pretrain_") or name in ALSO_READ}
        digest = hashlib.sha256(repr((cell.encoder, sorted(read.items()), commit())).encode()).hexdigest()
        return self.folder / f"{digest[:24]}.npz"

    def find(self, cell: Cell, config: ElsaConfig, device: str) -> dict[str, Tensor] | None:
        """The weights, if they were kept."""
        if self.folder is None or not self.path(cell, config).exists():
            return None
        with np.load(self.path(cell, config), allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]).to(device) for name in file.files}

    def keep(self, cell: Cell, config: ElsaConfig, weights: dict[str, Tensor]) -> None:
        """Write the weights, whole or not at all."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(cell, config)
        partial = path.with_name(f".{path.stem}.{os.getpid()}.npz")
        np.savez(partial, **{name: tensor.cpu().numpy() for name, tensor in weights.items()})  # type: ignore[arg-type]
        os.replace(partial, path)
