"""Before the first question: every image decoded into shards and embedded once, resumable after a kill.

Row i of everything (shards, embeddings, names, hashes) is one image; `images.json` is written last and names the key
of what it describes, so that a workspace is prepared exactly when its key is that of the source as it lies there now.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from elsa.data.images import Decoding, Payload, quiet_pillow
from elsa.data.load import all_grey, choose_size, load_images
from elsa.data.parallel import ordered_map
from elsa.data.shards import Shards
from elsa.data.sources import Source
from elsa.encoders import Encoder, embed_batches
from elsa.errors import UserError
from elsa.output import storable, write_whole
from elsa.progress import Progress, silent

CHUNK = 64  # images embedded between two notes on the disk: what a kill may cost
LEAST_IMAGES = 40


@dataclass(frozen=True)
class Prepared:
    """The images of a workspace; row i of everything belongs to names[i]."""

    key: str
    names: list[str]
    records: list[int]
    """The source's own number of each image; those that cannot be decoded have no row."""
    sha256: list[str]
    """Of the file's bytes, or of the pixels where a packed source has no files."""
    broken: list[tuple[str, str]]
    decoding: Decoding
    shards: Shards
    embeddings: Path

    def vectors(self) -> torch.Tensor:
        """The embeddings [N, D], mapped and not read; writing to them changes no file."""
        return torch.from_numpy(np.load(self.embeddings, mmap_mode="c"))


def key_of(source: Source, encoder: str) -> str:
    """Changes with every file of the source and with the encoder."""
    return hashlib.sha256(f"{source.fingerprint()}\0{encoder}".encode()).hexdigest()


def encoder_sha256(encoder: str) -> str:
    """sha256 of the weight file that `mobilenet_v2:FILE` names."""
    kind, _, file = encoder.partition(":")
    if kind != "mobilenet_v2" or not file:
        raise UserError(f"--encoder {encoder}: use mobilenet_v2 or mobilenet_v2:FILE, with torchvision's weight file")
    return _file_sha256(Path(file), f"encoder weights {file}")


def find_prepared(folder: Path, source: Source, encoder: str) -> Prepared | None:
    """What an earlier run has prepared, if it is whole and the source still is what it was."""
    about = _read_json(folder / "images.json")
    if about is None or about.get("key") != key_of(source, encoder):
        return None
    shards = Shards(folder / about["shards"], about["counts"], (about["image_shape"][0], *about["image_shape"][1:]))
    sizes = [count * int(np.prod(about["image_shape"])) for count in about["counts"]]
    files = [shards.folder / f"{number:05d}.u8" for number in range(len(sizes))]
    embeddings = folder / "embeddings.npy"
    try:
        whole = len(np.load(embeddings, mmap_mode="r")) == len(about["records"])
        whole = whole and all(file.stat().st_size == size for file, size in zip(files, sizes, strict=True))
    except (OSError, ValueError):
        return None
    if not whole:
        return None
    records = about["records"]
    return Prepared(
        key=about["key"],
        names=[storable(source.names[record]) for record in records],
        records=records,
        sha256=about["sha256"],
        broken=[(name, why) for name, why in about["broken"]],
        decoding=Decoding(**about["decoding"]),
        shards=shards,
        embeddings=embeddings,
    )


def prepare(folder: Path, source: Source, encoder: Encoder, progress: Progress = silent) -> Prepared:
    """Decode, hash and embed what has not been yet."""
    found = find_prepared(folder, source, encoder.sha256)
    if found is not None:
        return found
    before = _read_json(folder / "images.json")  # of the same workspace before files came or went
    decoding = Decoding(**before["decoding"]) if before else _chosen(folder, source, progress)
    loaded = load_images(source, **asdict(decoding), cache=folder / "images", memory_limit=0, progress=progress)
    if len(loaded) < LEAST_IMAGES:
        raise UserError(
            f"SOURCE {source.path} has {len(loaded)} images that can be read: to learn what is normal it takes at "
            f"least {LEAST_IMAGES}"
        )
    assert isinstance(loaded.images, Shards), "memory_limit=0 puts every set into shards"
    position = {name: record for record, name in enumerate(source.names)}
    records = [position[name] for name in loaded.names]
    sha256 = list(_hashes(source, records, progress))
    key = key_of(source, encoder.sha256)
    _embed(folder, key, loaded.images, sha256, _known(folder, before, encoder), encoder, progress)
    about = {
        "key": key,
        "encoder": encoder.sha256,
        "decoding": asdict(decoding),
        "shards": loaded.images.folder.relative_to(folder).as_posix(),
        "counts": np.diff(loaded.images.first).tolist(),
        "image_shape": list(loaded.images.shape[1:]),
        "names": [storable(name) for name in loaded.names],
        "records": records,
        "sha256": sha256,
        "broken": [(storable(name), why) for name, why in loaded.broken],
    }
    write_whole(folder / "images.json", json.dumps(about).encode(), option="--workspace")
    finished = find_prepared(folder, source, encoder.sha256)
    if finished is None:
        raise UserError(f"SOURCE {source.path} changed while it was read: start again when its files are at rest")
    return finished


def _chosen(folder: Path, source: Source, progress: Progress) -> Decoding:
    """Size and channels for a new workspace; noted at once, for to choose them every image is read."""
    note = folder / ".decoding.json"
    noted = _read_json(note)
    if noted is None or noted["fingerprint"] != source.fingerprint():
        progress("look at images", 0, len(source), {})
        with quiet_pillow():
            noted = {"size": choose_size(source), "channels": 1 if all_grey(source) else 3}
        noted["fingerprint"] = source.fingerprint()
        write_whole(note, json.dumps(noted).encode(), option="--workspace")
    return Decoding(noted["size"], noted["channels"])


def _hashes(source: Source, records: Sequence[int], progress: Progress) -> Iterator[str]:
    for done, digest in enumerate(ordered_map(hash_payload, source.payloads(records)), start=1):
        if done % 64 == 0 or done == len(records):
            progress("hash images", done, len(records), {})
        yield digest


def hash_payload(payload: Payload) -> str:
    """sha256 of a file, of encoded bytes, or of pixels."""
    if isinstance(payload, Path):
        return _file_sha256(payload, str(payload))
    assert payload is not None, "an empty record has no row"
    content = payload if isinstance(payload, bytes) else np.ascontiguousarray(payload).tobytes()
    return hashlib.sha256(content).hexdigest()


def _known(folder: Path, before: dict[str, Any] | None, encoder: Encoder) -> dict[str, NDArray[np.float32]]:
    """Embeddings of an earlier state of the source by the hash of their images: only new files are embedded again."""
    if before is None or before["encoder"] != encoder.sha256:
        return {}
    try:
        rows = np.load(folder / "embeddings.npy", mmap_mode="r")
    except (OSError, ValueError):
        return {}
    return dict(zip(before["sha256"], rows, strict=False)) if len(rows) == len(before["sha256"]) else {}


def _embed(
    folder: Path,
    key: str,
    images: Shards,
    sha256: Sequence[str],
    known: dict[str, NDArray[np.float32]],
    encoder: Encoder,
    progress: Progress,
) -> None:
    """Fill embeddings.npy under another name, noting every so often how far it is, and rename it."""
    partial, note = folder / ".embeddings.partial", folder / ".embeddings.json"
    about = _read_json(note)
    shape = (len(images), encoder.features)
    begun = about is not None and about["key"] == key
    if begun and about["done"] == len(images) and not partial.exists():
        return  # killed between the rename below and images.json
    if begun and partial.exists():
        vectors, done = np.lib.format.open_memmap(partial, mode="r+"), about["done"]
    else:
        try:
            vectors, done = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape), 0
        except OSError as error:
            raise UserError(f"cannot write {partial}: {error.strerror}; free some space") from error
    while done < len(images):
        rows = torch.arange(done, min(done + CHUNK, len(images)))
        new = [row for row in rows.tolist() if sha256[row] not in known]
        for row in rows.tolist():
            if sha256[row] in known:
                vectors[row] = known[sha256[row]]
        if new:
            parts = embed_batches(encoder, images[torch.tensor(new)])
            vectors[new] = normalize(torch.cat(list(parts)), dim=1).numpy()
        done += len(rows)
        vectors.flush()
        write_whole(note, json.dumps({"key": key, "done": done}).encode(), option="--workspace")
        progress("embed", done, len(images), {})
    del vectors  # closes the map
    os.replace(partial, folder / "embeddings.npy")


def _read_json(path: Path) -> Any:
    """What a file of ours holds; None if it is missing or damaged, for then it is made again."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _file_sha256(path: Path, what: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}; name a file that can be read") from error
