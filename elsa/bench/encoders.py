"""Pre-trained encoders on disk, while a machine is held: a process that was stopped need not pre-train again.

In .npz files, as GPU hosts have no safetensors.
"""

import dataclasses
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elsa.bench.lines import commit
from elsa.bench.plans import Cell
from elsa.bench.steered import SteeredElsa
from elsa.checkpoint import SECONDS_BETWEEN, Checkpoint, _flat
from elsa.config import ElsaConfig

# Settings that pre-training reads, beside all that begin with pretrain_.
ALSO_READ = ("encoder", "stem", "shifts", "crop_area_min", "crop_area_max", "precision")


class EncoderStore:
    """One file of about 45 MB for each encoder; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def path(self, cell: Cell, config: ElsaConfig) -> Path:
        """Where the encoder of the cell lies; another commit or other settings of pre-training are another file."""
        assert self.folder is not None
        settings = dataclasses.asdict(config)
        read = {name: settings[name] for name in settings if name.startswith("pretrain_") or name in ALSO_READ}
        digest = hashlib.sha256(repr((cell.encoder, sorted(read.items()), commit())).encode()).hexdigest()
        return self.folder / f"{digest[:24]}.npz"

    def weights(self, cell: Cell, encoder: SteeredElsa, images: Tensor, labels: list[str]) -> dict[str, Tensor]:
        """Those that were kept; else pre-trained now, going on from where a stopped pre-training stood."""
        if self.folder is None:
            encoder.steered_by = Checkpoint(None, "")
            return encoder.pretrain(images, labels)
        path = self.path(cell, encoder.config)
        if path.exists():
            return {name: tensor.to(encoder.device) for name, tensor in _read(path).items()}
        stands_at = path.with_suffix(".part.npz")
        encoder.steered_by = _PartWay(stands_at)
        weights = encoder.pretrain(images, labels)
        _write(path, weights)
        stands_at.unlink(missing_ok=True)
        return weights


class _PartWay(Checkpoint):
    """Where pre-training stands, every 20 s."""

    def __init__(self, file: Path):
        super().__init__(None, "")
        self.file = file

    def restore(self, stage: str, parts: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Tensor]]:
        """Load the parts; the epoch to go on with."""
        if self.file.exists():
            self.tensors = _read(self.file)
            self.state = {"stage": stage, "epoch": int(self.tensors.pop("epoch")), "facts": {}}
        return super().restore(stage, parts)

    def save(
        self, stage: str, epoch: int, parts: dict[str, Any], facts: dict[str, Any], loose: dict[str, Tensor], last: bool
    ) -> None:
        """Called by the loop at the end of an epoch."""
        if last or time.monotonic() - self.written < SECONDS_BETWEEN:
            return
        tensors = {f"{name}/{key}": tensor for name, part in parts.items() for key, tensor in _flat(part).items()}
        _write(self.file, {**tensors, "epoch": torch.tensor(epoch)})
        self.written = time.monotonic()


def _read(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    np.savez(partial, **arrays)
    os.replace(partial, path)
