"""What outsiders may hand to elsa, as functions of bytes: each returns, or refuses with UserError, and nothing else.

`fuzz/run.py` feeds them mutants; `tests/test_fuzz_corpus.py` replays what was found.
"""

import copy
import hashlib
import io
import json
import math
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialise_tensors
from torch import Tensor

from elsa.data.images import RESIZES, Decoding, decode, is_grey, quiet_pillow
from elsa.data.sources import open_source
from elsa.data.tables import read_table
from elsa.detectors import build
from elsa.errors import UserError
from elsa.mobilenet import read_mobilenet_v2
from elsa.model_file import digest_of, read_checkpoint, read_model
from elsa.saved import open_model, save_model
from elsa.ship.serving.bodies import decode_all, read_score_body
from elsa.ship.serving.limits import Refusal
from elsa.ship.serving.open_inference import read_images, split_body, wanted_outputs
from elsa.workspace.exchange import read_words

# As `elsa serve` has them: an image of 200 million pixels, which a person's own folder may hold, takes over 1 GB.
PIXELS = 10_000_000
IMPORTS = (".csv", ".parquet", ".json", ".jsonl")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".npz")
SAMPLE = 3


@cache
def _folder() -> Path:
    """A folder that one process writes its inputs to; in memory where the system has such a place."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="elsa-fuzz-", dir=memory if memory.is_dir() else None))


def image(content: bytes) -> None:
    """An image file; its first byte chooses how it is to be prepared."""
    if len(content) < 2:
        return
    choice = content[0]
    how = Decoding(32 + choice % 64, 1 + 2 * (choice & 1), RESIZES[choice % 3], PIXELS)
    with quiet_pillow(), suppress(UserError):
        pixels = decode(content[1:], how)
        assert pixels.shape == (how.channels, how.size, how.size), pixels.shape
        is_grey(content[1:], PIXELS)


def source(content: bytes) -> None:
    """A table or packed file as SOURCE, opened and its first images read; the first byte chooses the suffix."""
    if not content:
        return
    path = _folder() / f"source{TABLES[content[0] % len(TABLES)]}"
    path.write_bytes(content[1:])
    with quiet_pillow(), suppress(UserError):
        opened = open_source(path)
        assert len(opened.names) == len(opened.labels)
        assert set(opened.labels) <= {"normal", "anomaly", ""}
        for payload in opened.payloads(range(min(SAMPLE, len(opened)))):
            # what a table names must lie beside it
            assert not isinstance(payload, Path) or payload.resolve().is_relative_to(path.parent.resolve()), payload
            with suppress(UserError):
                decode(payload, Decoding(32, 3, pixel_limit=PIXELS))


def labels(content: bytes) -> None:
    """A table of labels for a source of three images."""
    if not content:
        return
    folder = _folder() / "photos"
    if not folder.exists():
        folder.mkdir()
        for name in ("a.png", "b.png", "sub c.png"):
            (folder / name).write_bytes(b"")
    path = _folder() / f"labels{TABLES[content[0] % 4]}"
    path.write_bytes(content[1:])
    with suppress(UserError):
        read_table(path)
    with suppress(UserError):
        opened = open_source(folder, labels=path)
        assert set(opened.labels) <= {"normal", "anomaly", ""}


@cache
def _fitted() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A fitted head, whose parts the target breaks."""
    vectors = torch.randn(80, 5, generator=torch.Generator().manual_seed(0))
    words = ["anomaly"] * 4 + ["normal"] * 4 + [""] * 72
    head = build("elsa-head", num_prototypes=13, iterations=1, rank=2).fit(vectors, words)
    save_model(head, _folder() / "fitted", {"preprocessing": {"size": 32, "channels": 1}, "versions": {"elsa": "0"}})
    return read_model(_folder() / "fitted")


def model(content: bytes) -> None:
    """A MODEL folder by somebody who can compute checksums.

    `content` is JSON: a list of changes to a fitted one, each [place, value]; a place is a list of keys into
    model.json, or ["tensors", name], whose value is a shape, or null for none.
    """
    folder = _folder() / "model"
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_bytes(content)
    with suppress(UserError):
        read_model(folder)
    try:
        changes = json.loads(content)
    except (ValueError, RecursionError):
        return
    tensors, about = _fitted()
    tensors, about = dict(tensors), copy.deepcopy(about)
    for change in changes if isinstance(changes, list) else []:
        with suppress(LookupError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError):
            place, value = change
            if place[0] != "tensors":
                inner = about
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
            elif value is None:
                del tensors[str(place[1])]
            elif math.prod(value) < 1000:
                tensors[str(place[1])] = torch.zeros(value)
    payload = serialise_tensors(tensors)
    about["sha256"] = hashlib.sha256(payload).hexdigest()
    with suppress(ValueError, TypeError, RecursionError):  # what JSON cannot say again
        about["sha256_json"] = digest_of(about)
        (folder / "model.json").write_text(json.dumps(about))
        (folder / "model.safetensors").write_bytes(payload)
        with suppress(UserError):
            open_model(folder)


def checkpoint(content: bytes) -> None:
    """A checkpoint with the right checksum in front."""
    path = _folder() / "checkpoint"
    for whole in (content, hashlib.sha256(content).digest() + content):
        path.write_bytes(whole)
        with suppress(UserError):
            read_checkpoint(path)


def weights(content: bytes) -> None:
    """A file of pretrained weights: as it is, and as the pickle inside torch's archive."""
    path = _folder() / "weights.pth"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, part in (("data.pkl", content), ("byteorder", b"little"), ("version", b"3"), ("data/0", bytes(3456))):
            file.writestr(f"archive/{name}", part)
    for whole in (content, archive.getvalue()):
        path.write_bytes(whole)
        with suppress(UserError):
            read_mobilenet_v2(path)


def http(content: bytes) -> None:
    """The body of a request to the service; the first byte chooses the address and the content type."""
    if not content:
        return
    body, choice, how = content[1:], content[0] % 4, Decoding(32, 3, pixel_limit=PIXELS)
    with quiet_pillow(), suppress(Refusal):
        if choice < 2:
            kind = ("multipart/form-data; boundary=elsa", "application/json")[choice]
            sent = read_score_body(body, kind)
        else:
            header = str(int.from_bytes(body[:2], "little")) if choice == 3 else None
            asked, binary = split_body(body[2:] if header else body, header)
            wanted_outputs(asked)
            sent = read_images(asked, binary, how)
        decoded = decode_all(sent, how)
        assert len(decoded.names) == len(sent) == len(decoded.places) + len(decoded.broken)


def imported(content: bytes) -> None:
    """A file of labels from elsewhere; the first byte chooses the suffix."""
    if not content:
        return
    path = _folder() / f"imported{IMPORTS[content[0] % len(IMPORTS)]}"
    path.write_bytes(content[1:])
    with suppress(UserError):
        words = read_words(path, "somebody")
        assert {word.label for word in words} <= {"normal", "anomaly", "unsure", ""}


TARGETS: dict[str, Callable[[bytes], None]] = {
    "image": image,
    "source": source,
    "labels": labels,
    "model": model,
    "checkpoint": checkpoint,
    "weights": weights,
    "http": http,
    "imported": imported,
}
