"""Valid inputs for every target, small and made here: what a mutant starts from."""

import io
import json
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from elsa.model_file import write_checkpoint

MODES = {"PNG": ("L", "RGB", "RGBA", "P", "I;16", "1"), "JPEG": ("L", "RGB", "CMYK"), "TIFF": ("RGB", "I;16", "CMYK")}
OTHERS = {
    "GIF": ("P",),
    "BMP": ("RGB",),
    "PPM": ("RGB",),
    "WEBP": ("RGB", "RGBA"),
    "JPEG2000": ("RGB",),
    "AVIF": ("RGB",),
}


def seeds() -> dict[str, list[bytes]]:
    """A few valid inputs for each target."""
    tables = _tables()
    labels = [bytes([kind]) + text for kind, text in enumerate(tables[:4])]
    return {
        "image": [bytes([number]) + content for number, content in enumerate(_images())],
        "source": [bytes([kind]) + text for kind, text in enumerate(tables)] + [bytes([3]) + _image_parquet()],
        "labels": labels,
        "model": _models(),
        "checkpoint": [_checkpoint()],
        "weights": _weights(),
    }


def _images() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    found = []
    for kind, modes in {**MODES, **OTHERS}.items():
        for mode in modes:
            image = Image.fromarray(pixels)
            image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 200) if mode == "I;16" else image.convert(mode)
            file = io.BytesIO()
            image.save(file, kind)
            found.append(file.getvalue())
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", exif=exif, progressive=True)
    return [*found, file.getvalue()]


def _tables() -> list[bytes]:
    """CSV, TSV, JSONL, Parquet, npz."""
    rows = [
        {"path": "a.png", "label": "normal"},
        {"path": "b.png", "label": "anomaly"},
        {"path": "sub c.png", "label": ""},
    ]
    csv = "path,label\n" + "".join(f'"{row["path"]}",{row["label"]}\n' for row in rows)
    parquet, npz = io.BytesIO(), io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    np.savez_compressed(npz, images=np.zeros((3, 8, 8), np.uint8), labels=np.array(["normal", "", "anomaly"]))
    jsonl = "".join(json.dumps(row) + "\n" for row in rows)
    return [csv.encode(), csv.replace(",", "\t").encode(), jsonl.encode(), parquet.getvalue(), npz.getvalue()]


def _image_parquet() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    about = {"info": {"features": {"label": {"names": ["normal", "anomaly"], "_type": "ClassLabel"}}}}
    table = pa.table({"image": [{"bytes": file.getvalue(), "path": f"{i}.png"} for i in range(3)], "label": [0, 1, 0]})
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(about)}), sink)
    return sink.getvalue()


def _models() -> list[bytes]:
    changes = [
        [[["versions"], 5], [["class"], "Elsa"]],
        [[["detector", "settings", "tau"], 0.3], [["detector", "settings", "rank"], "8"], [["format"], 2]],
        [[["tensors", "prototypes"], [3, 4]], [["tensors", "memory"], None], [["detector"], []]],
        [[["detector", "encoder"], {"name": "mobilenet_v2", "file": "x", "sha256": "y"}]],
        [[["detector", "seed"], -1], [["detector", "settings", "views"], "image"], [["preprocessing", "size"], 0]],
    ]
    return [json.dumps(change).encode() for change in changes]


def _checkpoint() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        state = {"stage": "pretrain", "epoch": 1, "facts": {}, "fingerprint": "x"}
        write_checkpoint(path, {"net/weight": torch.ones(2, 3)}, state)
        return path.read_bytes()[32:]


def _weights() -> list[bytes]:
    """A whole file, and the pickle inside one."""
    file = io.BytesIO()
    torch.save({"features.0.0.weight": torch.ones(32, 3, 3, 3)}, file)
    with zipfile.ZipFile(file) as archive:
        inside = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return [file.getvalue(), archive.read(inside)]
