"""torchvision's weight files: named tensors, checked by hash, that fit a network strictly; no object is unpickled."""

import hashlib
import io
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from elsa.errors import UserError

# What torch's own unpickler raises on files that are damaged or made to do damage.
UNPICKLING_ERRORS = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, OSError,
    ArithmeticError, AssertionError, MemoryError, struct.error, zipfile.BadZipFile,
)  # fmt: skip


def read_weights(file: Path, network: str, sha256: str | None = None) -> tuple[Mapping[str, object], str]:
    """The named tensors in torchvision's weight file of a network, and the sha256 of the file."""
    file = Path(file)
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise UserError(
            f"encoder weights {file}: {error.strerror or error}; give torchvision's {network} weight file"
        ) from error
    digest = hashlib.sha256(payload).hexdigest()
    named = re.search(r"-([0-9a-f]{8,64})\.pth$", file.name)  # torchvision writes the first 8 digits into the name
    promised = sha256 or (named.group(1) if named else "")
    if not digest.startswith(promised):
        raise UserError(
            f"encoder weights {file} have sha256 {digest[:16]}..., expected {promised[:16]}...: "
            f"the file is damaged or another one; download it again"
        )
    return _unpickle_tensors(payload, file, network), digest


def fill(net: nn.Module, weights: Mapping[str, object], origin: str, network: str, classifier: str) -> None:
    """Give the net these weights; a missing, unknown or misshapen one is refused, naming `origin`."""
    # A file saved before torch 0.4.1 has no count of batches; it plays no part in eval mode.
    expected = {name: value for name, value in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    offered = {
        name: value
        for name, value in weights.items()
        if not name.startswith(classifier) and not name.endswith("num_batches_tracked")
    }
    missing, unknown = sorted(expected.keys() - offered.keys()), sorted(offered.keys() - expected.keys())
    if missing or unknown:
        raise UserError(
            f"encoder weights {origin} are not those of torchvision's {network}: {len(missing)} parameters are "
            f"missing{_first(missing)}, {len(unknown)} unknown{_first(unknown)}; give its {network}-*.pth file"
        )
    for name, value in offered.items():
        if not isinstance(value, Tensor) or value.shape != expected[name].shape:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"encoder weights {origin}: {name} is {shape}, expected {list(expected[name].shape)}; "
                f"give the weight file of the full-width {network}"
            )
        if not value.isfinite().all():
            raise UserError(f"encoder weights {origin}: {name} holds values that are not finite; download it again")
    net.load_state_dict({name: value for name, value in offered.items() if isinstance(value, Tensor)}, strict=False)


def _unpickle_tensors(payload: bytes, file: Path, network: str) -> Mapping[str, object]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders about a pickle before it refuses it; one line is enough
            weights = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except UNPICKLING_ERRORS as error:
        raise UserError(
            f"encoder weights {file} cannot be read as a file of plain tensors "
            f"({type(error).__name__}); give torchvision's {network} weight file"
        ) from error
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise UserError(
            f"encoder weights {file} hold a {type(weights).__name__}, not named tensors; "
            f"give torchvision's {network} weight file"
        )
    return weights


def _first(names: list[str]) -> str:
    return f" (first: {names[0]})" if names else ""
