"""MODEL folders and checkpoints: safetensors and JSON, written atomically, refused when incomplete or altered.

A folder holds `model.safetensors` and `model.json`; the JSON carries the sha256 of the tensors and of itself, so a
torn write, a mixed pair or an edited file is noticed. Nothing is ever unpickled. safetensors is imported where it is
used, because benchmarks run on hosts that lack it.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from elsa.errors import UserError

FORMAT = 1


def write_model(folder: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write a MODEL folder in one atomic step: afterwards it is complete, or what stood there before still stands."""
    from safetensors.torch import save as serialise_tensors

    folder = Path(folder)
    partial, previous = folder.with_name(f".{folder.name}.partial"), _previous(folder)
    _recover(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        payload = serialise_tensors(_storable(tensors))
        about = {"format": FORMAT, "higher_is": "anomalous", **about, "sha256": hashlib.sha256(payload).hexdigest()}
        about["sha256_json"] = digest_of(about)
        _write_synced(partial / "model.safetensors", payload)
        _write_synced(partial / "model.json", (json.dumps(about, indent=1) + "\n").encode())
        _sync_folder(partial)
        if folder.exists():
            # a folder cannot be replaced by rename: step aside first; _recover undoes a crash in between
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(folder, previous)
        os.rename(partial, folder)
        _sync_folder(folder.parent)
    except OSError as error:
        if previous.exists() and not folder.exists():
            os.rename(previous, folder)
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}; free some space or choose another --out"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


def read_model(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description of a MODEL folder; anything torn, mixed or edited is refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load as parse_tensors

    folder = Path(folder)
    try:
        _recover(folder)
        text = (folder / "model.json").read_bytes()
        payload = (folder / "model.safetensors").read_bytes()
    except OSError as error:
        raise UserError(
            f"{folder} is not a MODEL folder written by `elsa fit`: {Path(error.filename).name}: {error.strerror}; "
            f"give one, or fit the model again"
        ) from error
    try:
        about = json.loads(text)
        intact = isinstance(about, dict) and about.get("sha256_json") == digest_of(about)
        intact = intact and isinstance(about.get("format"), int) and isinstance(about.get("sha256"), str)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{folder / 'model.json'} is incomplete or was changed after writing; fit the model again")
    if about["format"] > FORMAT:
        raise UserError(f"{folder} has format {about['format']}, this version reads up to {FORMAT}; update elsa")
    if hashlib.sha256(payload).hexdigest() != about["sha256"]:
        raise UserError(
            f"{folder / 'model.safetensors'} does not belong to its model.json or is damaged; fit the model again"
        )
    try:
        return parse_tensors(payload), about
    except SafetensorError as error:
        raise UserError(f"{folder / 'model.safetensors'} is not a safetensors file: {error}") from error


def write_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Replace the checkpoint file in one atomic step; a kill at any moment leaves the old one or the new one whole."""
    from safetensors.torch import save as serialise_tensors

    path = Path(path)
    payload = serialise_tensors(_storable(tensors), metadata={"state": json.dumps(state)})
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(partial, hashlib.sha256(payload).digest() + payload)
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}; free some space or change --out") from error


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the state of a checkpoint; a torn or altered file is refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load as parse_tensors

    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; delete it to start the fit afresh") from error
    digest, payload = content[:32], content[32:]
    if hashlib.sha256(payload).digest() != digest:
        raise UserError(f"{path} is incomplete or was changed after writing; delete it to start the fit afresh")
    try:
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        tensors, state = parse_tensors(payload), json.loads(header["__metadata__"]["state"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a checkpoint of `elsa fit`; delete it to start the fit afresh") from error
    if not isinstance(state, dict):
        raise UserError(f"{path} is not a checkpoint of `elsa fit`; delete it to start the fit afresh")
    return tensors, state


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, each with memory of its own: safetensors refuses shared memory."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        stored[name] = tensor
    return stored


def _previous(folder: Path) -> Path:
    """Where a model stands while the one that replaces it is moved in."""
    return folder.with_name(f".{folder.name}.previous")


def _recover(folder: Path) -> None:
    """Undo a replacement that a crash cut between its two renames."""
    if _previous(folder).exists() and not folder.exists():
        os.rename(_previous(folder), folder)


def digest_of(about: dict[str, Any]) -> str:
    """sha256 of what a model.json says, itself left out."""
    return hashlib.sha256(
        json.dumps({k: v for k, v in about.items() if k != "sha256_json"}, sort_keys=True).encode()
    ).hexdigest()


def _write_synced(path: Path, payload: bytes) -> None:
    with open(path, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # Windows has no handle on a folder to sync
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
