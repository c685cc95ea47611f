"""The Open Inference Protocol v2 (KServe, Triton, Seldon): tensors in, tensors out, as JSON or as binary data after it.

Inputs: `images`, UINT8 [N, C, S, S] prepared already, or BYTES [N] of encoded files (base64 in JSON). Outputs: score,
p_value, verdict, prototype; heat_map if named among the outputs. A broken image refuses the request: a tensor has no
room for a reason.
"""

import json
import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from elsa import __version__
from elsa.data.images import Decoding
from elsa.ship.serving.bodies import Sent, from_base64, parsed
from elsa.ship.serving.limits import Refusal
from elsa.ship.serving.loaded import Findings, Loaded

HEADER_LENGTH = "inference-header-content-length"
OUTPUTS = {"score": "FP64", "p_value": "FP64", "verdict": "BYTES", "prototype": "INT64", "heat_map": "FP32"}
ON_REQUEST = "heat_map"


class InputTensor(BaseModel):
    """`images`: UINT8 of shape [N, C, S, S], or BYTES of shape [N]."""

    name: str
    shape: list[int] = Field(min_length=1)
    datatype: str
    parameters: dict[str, Any] = Field(default_factory=dict, description="binary_data_size: data follows the JSON.")
    data: list[Any] | None = Field(None, description="Numbers, flat or nested; for BYTES strings of base64.")


class WantedOutput(BaseModel):
    """An output by its name."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict, description="binary_data: true sends it after the JSON.")


class InferenceRequest(BaseModel):
    """The body of an infer request."""

    inputs: list[InputTensor] = Field(min_length=1, max_length=1)
    id: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict, description="binary_data_output: true for all outputs.")
    outputs: list[WantedOutput] | None = None


class OutputTensor(BaseModel):
    """One output; `data` is missing where it follows as binary data."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferenceResponse(BaseModel):
    """The answer to an infer request."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


def split_body(body: bytes, header_length: str | None) -> tuple[InferenceRequest, memoryview]:
    """The JSON object and the binary data after it."""
    length = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit()) or int(header_length) > length:
            raise Refusal(400, f"Inference-Header-Content-Length {header_length!r}: the body has {length} bytes")
        length = int(header_length)
    return parsed(InferenceRequest, body[:length]), memoryview(body)[length:]


def wanted_outputs(asked: InferenceRequest) -> dict[str, bool]:
    """Names of the outputs to send, and whether as binary data."""
    all_binary = asked.parameters.get("binary_data_output") is True
    if not asked.outputs:
        return {name: all_binary for name in OUTPUTS if name != ON_REQUEST}
    for output in asked.outputs:
        if output.name not in OUTPUTS:
            raise Refusal(400, f"output {output.name!r}: there are {', '.join(OUTPUTS)}")
    return {output.name: output.parameters.get("binary_data", all_binary) is True for output in asked.outputs}


def read_images(asked: InferenceRequest, binary: memoryview, how: Decoding) -> list[Sent]:
    """The images of an infer request."""
    [tensor] = asked.inputs
    size = tensor.parameters.get("binary_data_size")
    if tensor.name != "images":
        raise Refusal(400, f"input {tensor.name!r}: the one input is called 'images'")
    if size is not None and (size != len(binary) or tensor.data is not None):
        raise Refusal(400, f"binary_data_size {size}: {len(binary)} bytes follow the JSON, and data must be absent")
    if size is None and (tensor.data is None or len(binary)):
        raise Refusal(400, "give either data, or binary_data_size and Inference-Header-Content-Length")
    if tensor.datatype == "BYTES":
        encoded = read_lengths(binary) if size is not None else [text_of(item) for item in tensor.data or []]
        if tensor.shape not in ([len(encoded)], [len(encoded), 1]):
            raise Refusal(400, f"shape {tensor.shape}: {len(encoded)} images were sent")
        sent = [Sent("", file) for file in encoded]
    elif tensor.datatype == "UINT8":
        expected = [how.channels, how.size, how.size]
        if tensor.shape[1:] != expected:
            raise Refusal(
                400,
                f"shape {tensor.shape}: this model takes [N, {', '.join(map(str, expected))}]; BYTES takes any file",
            )
        pixels = np.frombuffer(binary, np.uint8) if size is not None else numbers_of(tensor.data)
        if pixels.size != math.prod(tensor.shape):
            raise Refusal(400, f"shape {tensor.shape} holds {math.prod(tensor.shape)} numbers, {pixels.size} were sent")
        sent = [Sent("", image.transpose(1, 2, 0)) for image in pixels.reshape(tensor.shape)]
    else:
        raise Refusal(400, f"datatype {tensor.datatype!r}: images are UINT8 pixels or BYTES of encoded files")
    if not sent:
        raise Refusal(400, "no image was sent: N must be at least 1")
    return sent


def text_of(item: Any) -> bytes:
    """One image file of a JSON tensor of BYTES."""
    if not isinstance(item, str):
        raise Refusal(400, "BYTES in JSON are strings of base64, one for each image")
    return from_base64(item, "data")


def numbers_of(data: list[Any] | None) -> NDArray[np.uint8]:
    """Flat uint8 pixels of a JSON tensor."""
    try:
        numbers = np.array(data)
    except ValueError:  # lists of different lengths
        raise Refusal(400, "data is nested unevenly") from None
    if numbers.dtype.kind != "i" or numbers.min() < 0 or numbers.max() > 255:
        raise Refusal(400, "UINT8 data holds whole numbers from 0 to 255")
    return numbers.astype(np.uint8).reshape(-1)


def read_lengths(binary: memoryview) -> list[bytes]:
    """The elements of a binary BYTES tensor: each after its length, 4 bytes little-endian."""
    found, place = [], 0
    while place < len(binary):
        end = place + 4
        length = struct.unpack_from("<I", binary, place)[0] if end <= len(binary) else len(binary)
        if end + length > len(binary):
            raise Refusal(400, "the binary data ends in the middle of an image")
        found.append(bytes(binary[end : end + length]))
        place = end + length
    return found


def answer(model: Loaded, asked: InferenceRequest, findings: Findings) -> tuple[bytes, int | None]:
    """The body of the answer, and the length of its JSON if binary data follows."""
    values: dict[str, Any] = {
        "score": findings.scores,
        "p_value": findings.p_values,
        "verdict": findings.verdicts or [""] * len(findings.scores),
        "prototype": findings.prototypes or [-1] * len(findings.scores),
        "heat_map": findings.heat,
    }
    outputs, tail = [], []
    for name, as_binary in wanted_outputs(asked).items():
        described: dict[str, Any] = {"name": name, "shape": [len(findings.scores)], "datatype": OUTPUTS[name]}
        if name == "heat_map":
            described["shape"] = list(values[name].shape)
        if as_binary:
            tail.append(as_bytes(values[name], OUTPUTS[name]))
            described["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            described["data"] = values[name] if isinstance(values[name], list) else values[name].flatten().tolist()
        outputs.append(described)
    head = {"model_name": model.name, "model_version": model.id, "outputs": outputs}
    text = json.dumps(head | ({} if asked.id is None else {"id": asked.id})).encode()
    return (text + b"".join(tail), len(text)) if tail else (text, None)


def as_bytes(values: Any, datatype: str) -> bytes:
    """A tensor as binary data."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(word)) + word.encode() for word in values)
    return np.asarray(values, {"FP64": "<f8", "FP32": "<f4", "INT64": "<i8"}[datatype]).tobytes()


def about_server() -> dict[str, Any]:
    """Server metadata."""
    return {"name": "elsa", "version": __version__, "extensions": ["binary_tensor_data"]}


def about_model(model: Loaded) -> dict[str, Any]:
    """Model metadata; both forms of the one input are listed."""
    how = model.decoding
    shapes = {name: [-1] for name in OUTPUTS} | {"heat_map": [-1, how.size, how.size]}
    return {
        "name": model.name,
        "versions": [model.id],
        "platform": "elsa",
        "inputs": [
            {"name": "images", "datatype": "UINT8", "shape": [-1, how.channels, how.size, how.size]},
            {"name": "images", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [{"name": name, "datatype": kind, "shape": shapes[name]} for name, kind in OUTPUTS.items()],
    }
