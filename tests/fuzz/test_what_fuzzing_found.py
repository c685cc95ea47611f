"""Every input here once got through to a traceback; `fuzz/run.py` found it."""

import hashlib
import io
import json
import struct
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elsa.data.images import BrokenImageError, Decoding, decode
from elsa.data.sources import open_source
from elsa.detectors import build
from elsa.errors import UserError
from elsa.mobilenet import read_mobilenet_v2
from elsa.model_file import digest_of, read_checkpoint
from elsa.saved import open_model, save_model


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    return folder


@pytest.mark.parametrize("path", ["a\0.png", "\ud800.png", "a" * 300, "a/" * 3000])
def test_paths_that_no_file_can_have(path, photos, tmp_path):
    labels = tmp_path / "labels.jsonl"
    labels.write_text(json.dumps({"path": path, "label": "normal"}))
    with pytest.raises(UserError, match="no file name can"):
        open_source(photos, labels=labels)


def test_a_label_of_thousands_of_digits(photos, tmp_path):
    labels = tmp_path / "labels.csv"
    labels.write_text(f"path,label\na.png,{'7' * 5000}\n")
    with pytest.raises(UserError, match="use 'normal', 'anomaly' or ''"):
        open_source(photos, labels=labels)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"path": ' + "7" * 5000 + "}"])
def test_json_that_python_does_not_read(line, tmp_path):
    table = tmp_path / "rows.jsonl"
    table.write_text(line)
    with pytest.raises(UserError, match="line 1"):
        open_source(table)


def test_parquet_text_that_is_no_utf8(tmp_path):
    table = tmp_path / "rows.parquet"
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\x8d")]
    )
    pq.write_table(pa.table({"path": bad}), table)
    with pytest.raises(UserError, match="damaged"):
        open_source(table)


@pytest.mark.parametrize("about", [b"no json", b"[]", b'{"info": {"features": {"label": {"names": [1, {}]}}}}'])
def test_what_a_parquet_declares_may_be_anything(about, tmp_path):
    table = pa.table({"image": [{"bytes": b"", "path": "a.png"}], "label": [[1]]})
    pq.write_table(table.replace_schema_metadata({b"huggingface": about}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="number"):
        open_source(tmp_path / "x.parquet")


def test_images_of_a_parquet_whose_paths_are_numbers(tmp_path):
    pq.write_table(pa.table({"image": [{"bytes": b"", "path": 7}, {"bytes": b"", "path": 8}]}), tmp_path / "x.parquet")
    assert open_source(tmp_path / "x.parquet").names == ["row-00000", "row-00001"]


def test_an_npz_that_asks_for_a_newer_zip(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, images=np.zeros((2, 8, 8), np.uint8))
    content = bytearray(path.read_bytes())
    central = content.index(b"PK\x01\x02")
    content[central + 6] = 84  # the version needed to extract
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"not an \.npz"):
        open_source(path)


def test_an_npy_header_that_is_no_literal(tmp_path):
    path = tmp_path / "x.npz"
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 8, 8"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    with pytest.raises(UserError, match=r"not an \.npz"):
        open_source(path)


def test_a_gif_whose_frame_claims_more_than_the_whole():
    screen = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65535, 32195, 0) + b"\x02\x00;"
    with pytest.raises(BrokenImageError) as refused:
        decode(screen + frame, Decoding(32, 3))
    assert refused.value.kind == "bomb"


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"\x05\0\0\0\0\0\0\0[[[[["])
def test_a_checkpoint_with_the_right_checksum_and_nothing_inside(content, tmp_path):
    path = tmp_path / "checkpoint"
    path.write_bytes(hashlib.sha256(content).digest() + content)
    with pytest.raises(UserError, match="start the fit afresh"):
        read_checkpoint(path)


@pytest.mark.parametrize("content", [b"\x80\x02.", b"N.", b"]q\x01h\x05."])
def test_pickles_that_are_no_weights(content, tmp_path):
    path, archive = tmp_path / "weights.pth", io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, part in (("data.pkl", content), ("byteorder", b"little"), ("version", b"3")):
            file.writestr(f"archive/{name}", part)
    for whole in (content, archive.getvalue()):
        path.write_bytes(whole)
        with pytest.raises(UserError, match=r"weights\.pth"):
            read_mobilenet_v2(path)


@pytest.fixture(scope="module")
def head():
    vectors = torch.randn(80, 5, generator=torch.Generator().manual_seed(0))
    words = ["anomaly"] * 4 + ["normal"] * 4 + [""] * 72
    return build("elsa-head", num_prototypes=13, iterations=1, rank=2).fit(vectors, words)


@pytest.mark.parametrize(
    "change",
    [
        {"class": []},
        {"class": "Elsa"},
        {"versions": 5, "detector": {}},
        {"detector": []},
        {"detector": {"settings": {"rank": "much"}, "seed": 0}},
        {"detector": {"settings": {}, "seed": {}}},
        {"sha256": None},
        {"format": "1"},
    ],
)
def test_a_model_by_somebody_who_can_compute_checksums(change, head, tmp_path):
    save_model(head, tmp_path / "model", {})
    path = tmp_path / "model" / "model.json"
    about = {**json.loads(path.read_text()), **change}
    about["sha256_json"] = digest_of(about)
    path.write_text(json.dumps(about))
    with pytest.raises(UserError):
        open_model(tmp_path / "model")
