"""Encoders that others made: a local ONNX file, a torch.export archive, a timm network with a local checkpoint.

All take what elsa.encoders prepares: float images [B, 3, H, W], ImageNet-normalised. A MODEL carries the ONNX file
itself. A .pt2 archive is loaded once, when the user names it, and becomes ONNX: reading such an archive may run code,
reading a MODEL never does.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from elsa.errors import UserError
from elsa.weight_file import UNPICKLING_ERRORS, read_weights

PROBED_SIDE = 96  # pixels of the image that tells how long a vector is, where the file accepts any size


class OnnxNet(nn.Module):
    """An ONNX file run by ONNX Runtime on the CPU; its bytes are its state."""

    file: Tensor

    def __init__(self, payload: bytes, origin: str) -> None:
        super().__init__()
        self.register_buffer("file", torch.from_numpy(np.frombuffer(payload, np.uint8).copy()))
        self.session = _session(payload, origin)
        inputs, self.origin = self.session.get_inputs(), origin
        shape = inputs[0].shape if inputs else []
        if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(shape) != 4 or shape[1] not in (3, "3"):
            given = ", ".join(f"{one.name} {one.type} {one.shape}" for one in inputs)
            raise UserError(
                f"encoder {origin} takes {given or 'nothing'}: it must take one float tensor [N, 3, H, W] of images, "
                f"ImageNet-normalised"
            )
        self.batch, *side = (length if isinstance(length, int) else None for length in (shape[0], *shape[2:]))
        self.side = tuple(side)
        self.features = self(torch.zeros(1, 3, PROBED_SIDE, PROBED_SIDE)).shape[1]

    def forward(self, pixels: Tensor) -> Tensor:
        """Vectors [B, D]; maps [B, D, H, W] are averaged over the image."""
        side = tuple(own or given for own, given in zip(self.side, pixels.shape[2:], strict=True))
        if side != tuple(pixels.shape[2:]):
            pixels = interpolate(pixels, side, mode="bilinear", antialias=True)
        parts = [self._run(part.contiguous().numpy()) for part in pixels.cpu().split(self.batch or len(pixels))]
        vectors = torch.from_numpy(np.concatenate(parts)).to(pixels.device)
        return vectors.mean(dim=(2, 3)) if vectors.ndim == 4 else vectors

    def _run(self, images: Any) -> Any:
        missing = (self.batch or len(images)) - len(images)
        filled_up = np.concatenate([images, np.repeat(images[:1], missing, axis=0)]) if missing else images
        output = self.session.run(None, {self.session.get_inputs()[0].name: filled_up})[0]
        if output.ndim not in (2, 4) or output.dtype != np.float32 or len(output) != len(filled_up):
            raise UserError(
                f"encoder {self.origin} gives {output.dtype} {list(output.shape)} for {len(filled_up)} images: its "
                f"first output must be float vectors [N, D] or maps [N, D, H, W]"
            )
        return output[: len(images)]


class TimmNet(nn.Module):
    """A timm network without its classifier, for images normalised ImageNet's way whatever its own way is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = _timm().create_model(name, pretrained=False, num_classes=0).eval().requires_grad_(False)
        self.features = int(self.net.num_features)
        about = self.net.pretrained_cfg
        self.mean, self.std = tuple(about["mean"]), tuple(about["std"])

    def forward(self, pixels: Tensor) -> Tensor:
        from elsa.encoders import IMAGENET_MEAN, IMAGENET_STD

        def column(numbers: tuple[float, ...]) -> Tensor:
            return pixels.new_tensor(numbers).view(3, 1, 1)

        if (self.mean, self.std) != (IMAGENET_MEAN, IMAGENET_STD):
            pixels = (pixels * column(IMAGENET_STD) + column(IMAGENET_MEAN) - column(self.mean)) / column(self.std)
        return self.net(pixels)


def read_onnx(file: Path) -> tuple[OnnxNet, str]:
    """The encoder in a local ONNX file that holds all of its weights, and the file's sha256."""
    payload = _read(file, "an ONNX file")
    return OnnxNet(payload, str(file)), hashlib.sha256(payload).hexdigest()


def read_pt2(file: Path) -> tuple[OnnxNet, str]:
    """The encoder in a torch.export archive as ONNX, and the archive's sha256. Reading it may run code it holds."""
    from elsa.ship.export_onnx import quiet, require_onnx

    require_onnx()
    payload = _read(file, "a .pt2 archive of torch.export.save")
    with quiet():
        try:
            program = torch.export.load(io.BytesIO(payload))
            exported = torch.onnx.export(program, dynamo=True, verbose=False)
        except UNPICKLING_ERRORS as error:
            raise UserError(
                f"encoder {file} is not a torch.export archive this torch can read ({type(error).__name__}); "
                f"save it with torch.export.save"
            ) from error
    assert exported is not None
    return OnnxNet(exported.model_proto.SerializeToString(), str(file)), hashlib.sha256(payload).hexdigest()


def read_timm(name: str, file: Path) -> tuple[TimmNet, str]:
    """The timm network of that name with the weights of a local checkpoint, and the sha256 of the checkpoint."""
    _timm()
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load

        payload = _read(file, "a timm checkpoint")
        try:
            weights: Any = load(payload)
        except SafetensorError as error:
            raise UserError(f"encoder weights {file} are no safetensors file: {error}") from error
        digest = hashlib.sha256(payload).hexdigest()
    else:
        weights, digest = read_weights(file, name)
    return timm_from(name, weights, str(file)), digest


def timm_from(name: str, weights: Any, origin: str) -> TimmNet:
    """The timm network of that name with these weights, its classifier's left out; others than its own are refused."""
    try:
        wrapper = TimmNet(name)
    except RuntimeError as error:
        raise UserError(f"encoder timm:{name}: {' '.join(str(error).split())}; see timm.list_models()") from error
    own = wrapper.net.state_dict()
    unlike = [key for key, value in own.items() if key not in weights or weights[key].shape != value.shape]
    if unlike:
        raise UserError(
            f"encoder weights {origin} are not those of timm's {name}: {len(unlike)} of {len(own)} parameters are "
            f"missing or of another shape (first: {unlike[0]}); give a checkpoint of {name}"
        )
    wrapper.net.load_state_dict({key: weights[key] for key in own})
    return wrapper


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise UserError(
            "--encoder timm:NAME=FILE needs timm, which is not installed: pip install elsa[timm]"
        ) from error
    return timm


def _session(payload: bytes, origin: str) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(
            f"encoder {origin} needs onnxruntime, which is not installed: pip install elsa[onnx]"
        ) from error
    from onnxruntime.capi import onnxruntime_pybind11_state as failures

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    except (
        failures.InvalidProtobuf,
        failures.InvalidArgument,
        failures.InvalidGraph,
        failures.Fail,
        failures.NotImplemented,
    ) as error:
        raise UserError(
            f"encoder {origin} is not an ONNX file that ONNX Runtime can run ({type(error).__name__}); "
            f"give one that holds its weights itself"
        ) from error


def _read(file: Path, what: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"encoder {file}: {error.strerror or error}; give {what}") from error
