"""Valid inputs for every target, small and made here: what a mutant starts from."""

import base64
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
        "http": _bodies(),
        "imported": _imports(tables),
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


def _bodies() -> list[bytes]:
    """A form, a JSON body, and the Open Inference Protocol with and without binary data."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    picture = file.getvalue()
    part = b'Content-Disposition: form-data; name="images"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    form = b"--elsa\r\n" + part + picture + b"\r\n--elsa--\r\n"
    encoded = base64.b64encode(picture).decode()
    plain = {"images": [{"data": encoded, "name": "a.png"}]}
    tensor = {"name": "images", "shape": [1, 3, 2, 2], "datatype": "UINT8", "data": list(range(12))}
    files = {"name": "images", "shape": [1], "datatype": "BYTES", "data": [encoded]}
    binary = {"name": "images", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(picture) + 4}}
    sent = json.dumps({"inputs": [binary], "outputs": [{"name": "score"}]}).encode()
    return [
        bytes([0]) + form,
        bytes([1]) + json.dumps(plain).encode(),
        bytes([2]) + json.dumps({"inputs": [tensor], "id": "x"}).encode(),
        bytes([2]) + json.dumps({"inputs": [files]}).encode(),
        bytes([3]) + len(sent).to_bytes(2, "little") + sent + len(picture).to_bytes(4, "little") + picture,
    ]


def _imports(tables: list[bytes]) -> list[bytes]:
    """Tables, Label Studio's tasks, COCO's tags."""
    choice = {"value": {"choices": ["anomaly"]}, "from_name": "label", "to_name": "image", "type": "choices"}
    task = [{"id": 1, "data": {"image": "a.png"}, "annotations": [{"result": [choice], "completed_by": 1}]}]
    coco = {
        "images": [{"id": 1, "file_name": "a.png"}],
        "categories": [{"id": 1, "name": "normal"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1}],
    }
    texts = [json.dumps(task).encode(), json.dumps(coco).encode()]
    return [
        bytes([0]) + tables[0],
        bytes([1]) + tables[3],
        bytes([2]) + texts[0],
        bytes([2]) + texts[1],
        bytes([3]) + tables[2],
    ]
