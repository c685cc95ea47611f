"""Every kind of source, how labels reach it, and every way to get it wrong."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from elsa.data.audit import audit
from elsa.data.images import Decoding, decode
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.errors import UserError


def picture(value=0, kind="PNG"):
    file = io.BytesIO()
    Image.new("L", (40, 33), value).save(file, kind)
    return file.getvalue()


def fill(folder, names):
    """Pictures whose grey value is their number in the list."""
    for value, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture(value))


def grey_values(source, records=None):
    how = Decoding(32, 1)
    return [int(decode(p, how).max()) for p in source.payloads(range(len(source)) if records is None else records)]


def write_image_parquet(path, values, row_group_size=3, metadata=None, **columns):
    image = pyarrow.array([{"bytes": picture(v), "path": None} for v in values])
    table = pyarrow.table({"image": image, **columns})
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path, row_group_size=row_group_size)


# --- folders


def test_folder_of_any_depth_in_a_stable_order(tmp_path):
    fill(tmp_path, ["b/deep/er/2.JPG", "a.png", "b/1.webp"])
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".thumbs").mkdir()
    fill(tmp_path, [".thumbs/x.png", "._a.png"])
    source = open_source(tmp_path)
    assert (source.kind, source.names, source.labels) == ("folder", ["a.png", "b/1.webp", "b/deep/er/2.JPG"], [""] * 3)
    assert source.extra == {}


def test_folders_named_normal_and_anomaly_label_down_to_the_second_level(tmp_path):
    fill(tmp_path, ["normal/a.png", "train/Anomaly/b.png", "x/y/normal/c.png", "normality/d.png", "anomaly.png"])
    source = open_source(tmp_path)
    labels = dict(zip(source.names, source.labels, strict=True))
    assert labels == {
        "normal/a.png": "normal", "train/Anomaly/b.png": "anomaly", "x/y/normal/c.png": "", "normality/d.png": "",
        "anomaly.png": "",
    }  # fmt: skip
    assert source.extra == {"split": ["", "", "", "train", ""]}


def test_a_file_in_a_normal_and_an_anomaly_folder_is_refused(tmp_path):
    fill(tmp_path, ["normal/anomaly/a.png"])
    with pytest.raises(UserError, match=r"normal/anomaly/a.png.*contradict each other: anomaly and normal"):
        open_source(tmp_path)


def test_empty_and_missing_sources_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no images; looked for .*\.png"):
        open_source(tmp_path)
    with pytest.raises(UserError, match=r"nowhere: No such file"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "photos.zip").write_bytes(b"")
    with pytest.raises(UserError, match=r"photos.zip: use a folder, a table .* not a .zip file"):
        open_source(tmp_path / "photos.zip")
    write_image_parquet(tmp_path / "shard.parquet", [1])
    with pytest.raises(UserError, match="holds Parquet files and no images"):
        open_source(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="there are no such files on Windows")
def test_a_pipe_and_a_link_to_nothing_are_left_out_like_other_broken_images(tmp_path):
    """A pipe that is opened waits for whoever writes to it: for ever."""
    fill(tmp_path, ["a.png"])
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").symlink_to("gone.png")
    source = open_source(tmp_path)
    loaded = load_images(source)
    assert loaded.names == ["a.png"]
    assert [name for name, _ in loaded.broken] == ["b.png", "c.png"]
    assert "a pipe" in loaded.broken[0][1]
    assert "No such file" in loaded.broken[1][1]
    [found] = [finding for finding in audit(source).findings if finding.kind == "unreadable"]
    assert found.count == 2
    before = source.fingerprint()
    fill(tmp_path, ["gone.png"])
    assert source.fingerprint() != before


@pytest.mark.skipif(os.name != "posix", reason="links need rights on Windows")
def test_links_may_not_leave_a_folder(tmp_path):
    fill(tmp_path, ["in/a.png", "out/b.png"])
    (tmp_path / "in/again.png").symlink_to("a.png")
    (tmp_path / "in/loop").symlink_to(".")
    assert open_source(tmp_path / "in").names == ["a.png", "again.png"]
    (tmp_path / "in/leak.png").symlink_to("../out/b.png")
    with pytest.raises(UserError, match=r"leak.png leaves the source"):
        open_source(tmp_path / "in")
    (tmp_path / "in/leak.png").unlink()
    (tmp_path / "in/leak").symlink_to("../out")
    with pytest.raises(UserError, match=r"leak leaves the source"):
        open_source(tmp_path / "in")
    (tmp_path / "link").symlink_to("out")  # the source itself may be a link
    assert open_source(tmp_path / "link").names == ["b.png"]


# --- manifests


def test_manifest_keeps_columns_sorts_rows_and_merges_repetitions(tmp_path):
    fill(tmp_path, ["sub/a.png", "b.png", "c.png"])
    (tmp_path / "m.csv").write_text(
        "path,label,group\nsub/../c.png,,7\n./b.png,anomaly,8\nsub/a.png,normal,9\nb.png,anomaly,1\n"
    )
    source = open_source(tmp_path / "m.csv")
    assert (source.kind, source.names) == ("manifest", ["b.png", "c.png", "sub/a.png"])
    assert source.labels == ["anomaly", "", "normal"]
    assert source.extra == {"group": ["8", "7", "9"]}
    assert grey_values(source) == [1, 2, 0]


def test_manifest_paths_may_be_absolute_inside_written_on_windows_and_begin_with_dots(tmp_path):
    fill(tmp_path, ["sub/a.png", "b.png", "..c.png"])
    rows = [{"path": str(tmp_path / "b.png")}, {"path": "sub\\a.png", "label": None}, {"path": "..c.png"}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert open_source(tmp_path / "m.jsonl").names == ["..c.png", "b.png", "sub/a.png"]


@pytest.mark.parametrize("path", ["../out.png", "sub/../../out.png", "{root}/out.png", "linked/out.png", "link.png"])
def test_manifest_paths_that_leave_are_refused(tmp_path, path):
    fill(tmp_path, ["out.png", "in/a.png"])
    if path.startswith("link"):
        if os.name != "posix":
            pytest.skip("links need rights on Windows")
        (tmp_path / "in/linked").symlink_to("..")
        (tmp_path / "in/link.png").symlink_to("../out.png")
    (tmp_path / "in/m.csv").write_text("path\na.png\n" + path.format(root=tmp_path) + "\n")
    with pytest.raises(UserError, match=r"m.csv: path '.*' leaves the source"):
        open_source(tmp_path / "in/m.csv")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("path,label\na.png,good\n", r"m.csv: label 'good' of a.png: use 'normal'"),
        ("path,label\na.png,1\n", r"m.csv: label 1 of a.png is a number"),
        ("path,label\na.png,normal\n./a.png,anomaly\n", r"m.csv gives 'a.png' two labels, 'normal' and 'anomaly'"),
        ("path,label\na.png,normal\na.png,\n", r"m.csv gives 'a.png' two labels"),
        ("file,label\na.png,normal\n", r"m.csv has no column `path`; its columns are file, label"),
        ("path\na.png\n1.png\n2.png\n3.png\n4.png\n", r"m.csv: '1.png', '2.png', '3.png' and 1 more \(4 in all\) not"),
        ("path,label\n,normal\n", r"`path` of row 0 is ''"),
        ("path\n", r"lists no images"),
        ("", r"m.csv has no column `path`; its columns are none"),
    ],
)
def test_wrong_manifests_are_refused(tmp_path, text, complaint):
    fill(tmp_path, ["a.png"])
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(UserError, match=complaint) as caught:
        open_source(tmp_path / "m.csv")
    assert "\n" not in str(caught.value)


# --- a table of labels


def test_labels_of_the_table_win_and_the_rest_stays(tmp_path):
    fill(tmp_path, ["s/normal/a.png", "s/normal/b.png", "s/c.png", "s/d.png"])
    (tmp_path / "l.csv").write_text("path,label\nnormal/b.png,anomaly\n./c.png,normal\nnormal\\a.png,\n")
    source = open_source(tmp_path / "s", labels=tmp_path / "l.csv")
    assert dict(zip(source.names, source.labels, strict=True)) == {
        "c.png": "normal", "d.png": "", "normal/a.png": "", "normal/b.png": "anomaly",
    }  # fmt: skip


def test_labels_may_name_files_as_seen_from_the_table(tmp_path):
    fill(tmp_path, ["s/a.png"])
    (tmp_path / "l.jsonl").write_text(json.dumps({"path": "s/a.png", "label": "anomaly"}))
    assert open_source(tmp_path / "s", labels=tmp_path / "l.jsonl").labels == ["anomaly"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "path,label\n1.png,\n2.png,\n3.png,\n4.png,\n",
            r"'1.png', '2.png', '3.png' and 1 more \(4 in all\).*like 'a.png'",
        ),
        ("path,label\na.png,bad\n", r"l.csv: label 'bad' of a.png"),
        ("path,label\na.png,normal\ns/a.png,anomaly\n", r"gives 'a.png' two labels"),
        ("path\na.png\n", r"has no column `label`"),
        ("label\nnormal\n", r"has no column `path`"),
    ],
)
def test_wrong_label_tables_are_refused(tmp_path, text, complaint):
    fill(tmp_path, ["s/a.png"])
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(UserError, match=complaint):
        open_source(tmp_path / "s", labels=tmp_path / "l.csv")


# --- Parquet with images


def test_image_parquet_reads_rows_across_row_groups(tmp_path):
    path = tmp_path / "t.parquet"
    write_image_parquet(path, range(50, 61), group=list("abcdefghijk"))
    source = open_source(path)
    assert (source.kind, len(source), source.names[10]) == ("image-parquet", 11, "row-00010")
    assert source.extra == {"group": list("abcdefghijk")}
    assert grey_values(source) == list(range(50, 61))
    assert grey_values(source, [1, 2, 6, 10]) == [51, 52, 56, 60]
    assert grey_values(source.subset([3, 8, 9]), [0, 2]) == [53, 59]
    assert source.payload(7) == picture(57)


def test_image_parquet_with_one_large_row_group_is_read_in_pieces(tmp_path):
    path = tmp_path / "t.parquet"
    write_image_parquet(path, [i % 251 for i in range(100)], row_group_size=1000)
    source = open_source(path)
    assert grey_values(source, [0, 31, 32, 33, 99]) == [0, 31, 32, 33, 99]


def test_image_parquet_uses_paths_as_names_if_they_tell_images_apart(tmp_path):
    image = pyarrow.array([{"bytes": picture(v), "path": f"x/{v}.png"} for v in range(3)])
    pyarrow.parquet.write_table(pyarrow.table({"img": image, "label": ["normal", "", None]}), tmp_path / "t.parquet")
    (tmp_path / "l.csv").write_text("path,label\nx/2.png,anomaly\n")
    source = open_source(tmp_path / "t.parquet", labels=tmp_path / "l.csv")
    assert (source.names, source.labels) == (["x/0.png", "x/1.png", "x/2.png"], ["normal", "", "anomaly"])
    assert "label" not in source.extra


def test_classes_of_a_public_set_are_no_labels(tmp_path):
    write_image_parquet(tmp_path / "t.parquet", range(2), label=["cat", "dog"])
    source = open_source(tmp_path / "t.parquet")
    assert (source.labels, source.extra) == (["", ""], {"label": ["cat", "dog"]})
    names = {"info": {"features": {"label": {"names": ["anomaly", "normal"], "_type": "ClassLabel"}}}}
    metadata = {"huggingface": json.dumps(names)}
    write_image_parquet(tmp_path / "t.parquet", range(3), metadata=metadata, label=[1, 0, -1])
    assert open_source(tmp_path / "t.parquet").labels == ["normal", "anomaly", ""]


def test_wrong_labels_in_an_image_parquet_are_refused(tmp_path):
    write_image_parquet(tmp_path / "t.parquet", range(2), label=["normal", "anomoly"])
    with pytest.raises(UserError, match="label 'anomoly' of row-00001: use"):
        open_source(tmp_path / "t.parquet")
    write_image_parquet(tmp_path / "t.parquet", range(2), label=[0, 1])
    with pytest.raises(UserError, match="label 0 of row-00000 is a number"):
        open_source(tmp_path / "t.parquet")


# --- CIFAR-10 and .npz


def test_cifar10_folder_found_from_above_and_read_pixel_for_pixel(tmp_path, monkeypatch):
    monkeypatch.setattr("elsa.data.benchmarks.CIFAR10_IMAGES_PER_FILE", 3)
    monkeypatch.setattr("elsa.data.packed.CIFAR10_IMAGES_PER_FILE", 3)
    pixels = np.random.default_rng(0).integers(0, 256, (18, 3, 32, 32), np.uint8)
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    for file, name in enumerate([f"data_batch_{k}.bin" for k in range(1, 6)] + ["test_batch.bin"]):
        (place / name).write_bytes(b"".join(bytes([k + 7]) + pixels[3 * file + k].tobytes() for k in range(3)))
    for folder in (tmp_path, place):
        source = open_source(folder)
        assert source.kind == "cifar-10"
        assert (source.names[14], source.names[15]) == ("train/00014", "test/00000")
        assert source.extra["class"][:3] == ["Horse", "Ship", "Truck"]
        assert source.extra["split"] == ["train"] * 15 + ["test"] * 3
        np.testing.assert_array_equal([decode(p, Decoding(32, 3)) for p in source.payloads(range(18))], pixels)
        np.testing.assert_array_equal(decode(source.payload(16), Decoding(32, 3)), pixels[16])
    content = (place / "test_batch.bin").read_bytes()
    (place / "test_batch.bin").write_bytes(b"\x0b" + content[1:])
    with pytest.raises(UserError, match="test files name class 11"):
        open_source(tmp_path)


@pytest.mark.parametrize("compress", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", [(5, 37, 41), (5, 37, 41, 3), (5, 3, 37, 41), (5, 1, 37, 41), (5, 37, 41, 1)])
def test_npz_in_all_layouts(tmp_path, shape, compress):
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    words = ["normal", "", "anomaly", "", ""]
    compress(tmp_path / "t.npz", images=images, labels=words, group=np.arange(5), about="text")
    source = open_source(tmp_path / "t.npz")
    assert (source.kind, source.labels, source.extra) == ("npz", words, {"group": [0, 1, 2, 3, 4]})
    assert source.names[4] == "image-00004"
    expected = images if 3 not in shape[1:2] else images.transpose(0, 2, 3, 1)
    expected = expected.reshape(5, 37, 41, -1).squeeze() if 1 in shape else expected
    np.testing.assert_array_equal(list(source.payloads(range(5))), expected)
    np.testing.assert_array_equal(list(source.payloads([1, 4])), expected[[1, 4]])


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"pixels": np.zeros((2, 9, 9), np.uint8)}, "has no array `images`; its arrays are pixels"),
        ({"images": np.zeros((2, 9, 9))}, r"`images` is float64 \[2, 9, 9\]; save it as uint8"),
        ({"images": np.zeros((2, 9), np.uint8)}, r"use \[N, H, W\]"),
        ({"images": np.zeros((2, 9, 9, 2), np.uint8)}, "with 1 or 3 channels"),
        ({"images": np.zeros((2, 3, 9, 3), np.uint8)}, "second or the last axis"),
        ({"images": np.zeros((0, 9, 9), np.uint8)}, r"use \[N, H, W\]"),
        ({"images": np.asfortranarray(np.zeros((2, 9, 9), np.uint8))}, "column order"),
        ({"images": np.zeros((2, 9, 9), np.uint8), "labels": [0, 1]}, "label 0 of image-00000 is a number"),
        ({"images": np.zeros((2, 9, 9), np.uint8), "labels": ["normal"]}, r"`labels` has shape \[1\]"),
        ({"images": np.zeros((2, 9, 9), np.uint8), "labels": np.array(["normal", None])}, "not an .npz of plain"),
    ],
)
def test_wrong_npz_are_refused(tmp_path, arrays, complaint):
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(UserError, match=complaint):
        open_source(tmp_path / "t.npz")


def test_damaged_npz_is_refused(tmp_path):
    path = tmp_path / "t.npz"
    path.write_bytes(b"not a zip archive")
    with pytest.raises(UserError, match=r"t.npz is not an .npz of plain arrays"):
        open_source(path)
    np.savez_compressed(path, images=np.random.default_rng(0).integers(0, 256, (50, 32, 32), np.uint8))
    source = open_source(path)
    content = bytearray(path.read_bytes())
    content[20000:20100] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"t.npz is damaged"):
        list(source.payloads(range(50)))


SHARED = Path(os.environ.get("ELSA_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "elpv_128.parquet"


@pytest.mark.skipif(not SHARED.is_file(), reason="needs elpv_128.parquet: set ELSA_SHARED to the folder above data/")
def test_real_photos_of_solar_cells():
    source = open_source(SHARED)
    assert (len(source), source.labels.count("")) == (2624, 2624)
    assert set(source.extra["defect_probability"]) == {0.0, 1 / 3, 2 / 3, 1.0}
    pixels = [decode(payload, Decoding(128, 1)) for payload in source.payloads([0, 1311, 2623])]
    assert min(image.std() for image in pixels) > 5


# --- fingerprints


def test_fingerprint_follows_names_sizes_and_times(tmp_path):
    fill(tmp_path, ["a.png", "b.png"])
    first = open_source(tmp_path).fingerprint()
    assert open_source(tmp_path).fingerprint() == first
    os.utime(tmp_path / "a.png", (1, 1))
    touched = open_source(tmp_path).fingerprint()
    fill(tmp_path, ["c.png"])
    assert len({first, touched, open_source(tmp_path).fingerprint()}) == 3
    source = open_source(tmp_path)
    (tmp_path / "b.png").unlink()
    with pytest.raises(UserError, match=r"b.png has gone"):
        source.fingerprint()
