"""From the body of a request to images: multipart forms, JSON with base64, and what the decoder makes of them."""

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from torch import Tensor

from elsa.data.images import BrokenImageError, Decoding, decode
from elsa.ship.serving.limits import Refusal


class NamedImage(BaseModel):
    """One image in a JSON body."""

    model_config = ConfigDict(extra="forbid")
    data: str = Field(description="A whole image file (JPEG, PNG, WebP, ...) in base64.")
    name: str = Field("", description="Comes back with the result.")


class ScoreRequest(BaseModel):
    """One image or many."""

    model_config = ConfigDict(extra="forbid")
    images: list[NamedImage] = Field(min_length=1)


@dataclass(frozen=True)
class Sent:
    """One image as it was sent: an encoded file, or pixels that need no decoding."""

    name: str
    payload: bytes | NDArray[np.uint8]


@dataclass(frozen=True)
class Decoded:
    """The images that could be read, and why the others could not; both by their place in the request."""

    names: list[str]
    places: list[int]
    images: Tensor
    broken: dict[int, BrokenImageError]


def read_score_body(body: bytes, content_type: str) -> list[Sent]:
    """The images of a /score request."""
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data" and options.get(b"boundary"):
        sent = read_multipart(body, options[b"boundary"])
    elif kind == b"application/json":
        sent = [Sent(image.name, from_base64(image.data, "data")) for image in parsed(ScoreRequest, body).images]
    else:
        raise Refusal(415, f"Content-Type {content_type!r}: send multipart/form-data or application/json")
    if not sent:
        raise Refusal(400, "the form holds no file: send each image as a part with a file name")
    return sent


def read_multipart(body: bytes, boundary: bytes) -> list[Sent]:
    """Every part that has a file name, in their order."""
    sent: list[Sent] = []
    header: dict[str, bytes] = {"field": b"", "value": b""}
    disposition, ended = b"", False
    data: list[bytes] = []

    def on_part_begin() -> None:
        nonlocal disposition
        disposition = b""
        data.clear()

    def note(what: str) -> Callable[[bytes, int, int], None]:
        def add(part: bytes, start: int, end: int) -> None:
            header[what] += part[start:end]

        return add

    def on_header_end() -> None:
        nonlocal disposition
        if header["field"].lower() == b"content-disposition":
            disposition = header["value"]
        header.update(field=b"", value=b"")

    def on_part_data(part: bytes, start: int, end: int) -> None:
        data.append(part[start:end])

    def on_part_end() -> None:
        filename = parse_options_header(disposition)[1].get(b"filename")
        if filename is not None:
            sent.append(Sent(filename.decode(errors="replace"), b"".join(data)))

    def on_end() -> None:
        nonlocal ended
        ended = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": on_part_begin,
                "on_header_field": note("field"),
                "on_header_value": note("value"),
                "on_header_end": on_header_end,
                "on_part_data": on_part_data,
                "on_part_end": on_part_end,
                "on_end": on_end,
            },
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Refusal(400, f"the multipart body is damaged: {one_line(str(error))}") from error
    if not ended:
        raise Refusal(400, "the multipart body ends before its closing boundary")
    return sent


def parsed(schema: type[Any], body: bytes) -> Any:
    """The JSON body as its schema says, or 400 with the first place where it differs."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refusal(400, f"{where}: {one_line(first['msg'])}; /openapi.json describes the body") from None


def from_base64(text: str, what: str) -> bytes:
    """The bytes, strictly: a stray character is a damaged image."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal(400, f"{what} is not base64: {one_line(str(error))}") from None


def decode_all(sent: list[Sent], how: Decoding) -> Decoded:
    """Each image as the model wants it; their pixels are counted before they are unpacked."""
    places: list[int] = []
    arrays: list[NDArray[np.uint8]] = []
    broken: dict[int, BrokenImageError] = {}
    for place, image in enumerate(sent):
        try:
            arrays.append(decode(image.payload, how))
            places.append(place)
        except BrokenImageError as error:
            broken[place] = error
    shape = (len(arrays), how.channels, how.size, how.size)
    images = torch.from_numpy(np.stack(arrays)) if arrays else torch.empty(shape, dtype=torch.uint8)
    return Decoded([image.name for image in sent], places, images, broken)


def one_line(text: str) -> str:
    """Without line breaks and of bounded length."""
    return " ".join(text.split())[:300]
