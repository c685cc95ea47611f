"""Where a fit stands, on disk: after kill -9 the run goes on from here and ends at the same bits."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsa.errors import UserError
from elsa.model_file import read_checkpoint, write_checkpoint

STAGES = ("pretrain", "finetune")
SECONDS_BETWEEN = 20.0  # writing 90 MB takes 0.3 s: about 1% of the time


class Checkpoint:
    """Saves and restores the parts of a stage (anything with a state_dict) and its facts; without a path, nothing."""

    def __init__(self, path: Path | None, fingerprint: str):
        self.path = Path(path) if path is not None else None
        self.fingerprint = fingerprint
        self.written = time.monotonic()
        self.tensors: dict[str, Tensor] = {}
        self.state: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            self.tensors, self.state = read_checkpoint(self.path)
            if self.state.get("fingerprint") != fingerprint:
                raise UserError(
                    f"{self.path} belongs to a fit with other images, labels, settings or seed; "
                    f"repeat its options, or delete it to start afresh"
                )

    def passed(self, stage: str) -> bool:
        """Whether the saved run had left this stage behind."""
        return bool(self.state) and STAGES.index(self.state["stage"]) > STAGES.index(stage)

    def restore(self, stage: str, parts: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Tensor]]:
        """Load the parts of this stage; the epoch to go on with, its facts and its loose tensors."""
        if not self.state or self.state["stage"] != stage:
            return 0, {}, {}
        try:
            for name, part in parts.items():
                mine = {key for key in self.tensors if key.startswith(f"{name}/")}
                _load(part, {key.removeprefix(f"{name}/"): self.tensors[key] for key in mine})
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{self.path} was written by another version of elsa, whose {stage} had other parts; go on with that "
                f"version, or delete it to start the fit afresh"
            ) from error
        loose = {key.removeprefix("loose/"): t for key, t in self.tensors.items() if key.startswith("loose/")}
        return self.state["epoch"], self.state["facts"], loose

    def save(
        self, stage: str, epoch: int, parts: dict[str, Any], facts: dict[str, Any], loose: dict[str, Tensor], last: bool
    ) -> None:
        """Write the state after `epoch` epochs, unless the last writing is recent and this is not the stage's last."""
        if self.path is None or (not last and time.monotonic() - self.written < SECONDS_BETWEEN):
            return
        tensors = {f"loose/{name}": tensor for name, tensor in loose.items()}
        for name, part in parts.items():
            tensors.update({f"{name}/{key}": tensor for key, tensor in _flat(part).items()})
        state = {"stage": stage, "epoch": epoch, "facts": facts, "fingerprint": self.fingerprint}
        write_checkpoint(self.path, tensors, state)
        self.written = time.monotonic()

    def remove(self) -> None:
        """Delete the file: the fit is complete and its model is safe."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _flat(part: Any) -> dict[str, Tensor]:
    state = part.state_dict()
    if not isinstance(part, torch.optim.Optimizer):
        return state
    return {f"{index}/{key}": value for index, entry in state["state"].items() for key, value in entry.items()}


def _load(part: Any, tensors: dict[str, Tensor]) -> None:
    if not isinstance(part, torch.optim.Optimizer):
        part.load_state_dict(tensors)
        return
    entries: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split("/")
        entries.setdefault(int(index), {})[name] = value
    part.load_state_dict({"state": entries, "param_groups": part.state_dict()["param_groups"]})
