"""Each kind of trouble is put into a folder once; the audit must name it, and only it."""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from elsa.data import audit as audit_module
from elsa.data.audit import audit
from elsa.data.sources import open_source

KINDS = {"png": "PNG", "jpg": "JPEG", "gif": "GIF", "tif": "TIFF"}


def photo(seed, mode="RGB", size=(64, 48)):
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 11, 3), np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).convert(mode)


def put(folder, name, image, **options):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, KINDS[path.suffix[1:]], **options)
    return path


@pytest.fixture
def folder(tmp_path):
    """Four sound photos, all different."""
    for seed in range(4):
        put(tmp_path, f"{seed}.png", photo(seed))
    return tmp_path


def findings(folder, labels=None, **options):
    return {finding.kind: finding for finding in audit(open_source(folder, labels), **options).findings}


def test_a_sound_folder_has_nothing_to_complain_about(folder):
    found = audit(open_source(folder))
    assert found.findings == []
    assert found.lines() == [
        f"{folder}: 4 images (0 normal, 0 anomaly, 4 unlabelled)",
        "nothing to complain about",
    ]


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize(("kind", "severity", "name", "image", "options"), [
    ("animated", "note", "x.gif", photo(9, "L"), {"save_all": True, "append_images": [photo(10, "L")]}),
    ("cmyk", "note", "x.jpg", photo(9, "CMYK"), {}),
    ("16-bit", "note", "x.png", Image.fromarray(np.asarray(photo(9, "L"), np.uint16) * 257), {}),
    ("alpha", "note", "x.png", photo(9, "RGBA"), {}),
    ("palette", "note", "x.png", photo(9, "P"), {}),
    ("exif-rotated", "note", "x.jpg", photo(9, size=(48, 64)), {"exif": rotated()}),
    ("exif-rotated", "note", "x.png", photo(9, size=(48, 64)), {"exif": rotated()}),
    ("exif-rotated", "note", "x.tif", photo(9, size=(48, 64)), {"exif": rotated()}),
])  # fmt: skip
def test_traits_of_a_file(folder, kind, severity, name, image, options):
    put(folder, name, image, **options)
    found = findings(folder)
    assert set(found) - {"palette"} == {kind} - {"palette"}  # an animated GIF has one as well
    assert (found[kind].severity, found[kind].count) == (severity, 1)
    assert found[kind].examples == [f"{name} (64 x 48)"]


@pytest.mark.parametrize(("kind", "content"), [
    ("empty", lambda sound: b""),
    ("truncated", lambda sound: sound[:-300]),
    ("unreadable", lambda sound: b"<html>404</html>"),
])  # fmt: skip
def test_damaged_files(folder, kind, content):
    file = io.BytesIO()
    photo(9).save(file, "JPEG")
    (folder / "x.jpg").write_bytes(content(file.getvalue()))
    found = findings(folder)
    assert set(found) == {kind}
    assert (found[kind].severity, found[kind].count) == ("error", 1)
    assert found[kind].examples[0].startswith("x.jpg: ")


def test_bombs_and_huge_images(folder, monkeypatch):
    put(folder, "x.png", photo(9, size=(100, 80)))
    assert set(findings(folder, pixel_limit=7999)) == {"bomb"}
    monkeypatch.setattr(audit_module, "HUGE_PIXELS", 7999)
    found = findings(folder)
    assert set(found) == {"huge", "mixed-sizes"}
    assert found["mixed-sizes"].examples == ["64 x 48: 4 images", "100 x 80: 1 images"]


def test_odd_aspect(folder):
    put(folder, "x.png", photo(9, size=(40, 121)))
    put(folder, "y.png", photo(10, size=(120, 40)))  # exactly three to one is still accepted
    assert findings(folder)["odd-aspect"].examples == ["x.png (40 x 121)"]


def test_exact_and_near_duplicates_are_told_apart(folder):
    shutil.copy(folder / "1.png", folder / "copy.png")
    shutil.copy(folder / "1.png", folder / "copy2.png")
    put(folder, "again.jpg", photo(2), quality=90)
    found = findings(folder)
    assert set(found) == {"exact-duplicates", "near-duplicates"}
    assert (found["exact-duplicates"].count, found["exact-duplicates"].examples) == (
        2,
        ["1.png = copy.png = copy2.png"],
    )
    assert (found["near-duplicates"].count, found["near-duplicates"].examples) == (1, ["2.png = again.jpg"])


def test_contradictory_labels(folder):
    for place, number in (("normal", 1), ("anomaly", 1), ("normal", 2), ("anomaly", 3)):
        (folder / place).mkdir(exist_ok=True)
        shutil.copy(folder / f"{number}.png", folder / place / f"{number}.png")
    found = findings(folder)
    assert set(found) == {"exact-duplicates", "contradictory-labels"}
    contradiction = found["contradictory-labels"]
    assert (contradiction.severity, contradiction.count) == ("error", 1)  # an unlabelled copy is no contradiction
    assert contradiction.examples == ["1.png = anomaly/1.png [anomaly] = normal/1.png [normal]"]


def test_look_alikes_with_different_labels_even_through_an_exact_copy(folder):
    put(folder, "again.jpg", photo(2), quality=90)
    shutil.copy(folder / "again.jpg", folder / "labelled.jpg")
    (folder / "l.csv").write_text("path,label\n2.png,normal\nlabelled.jpg,anomaly\n")
    found = findings(folder, folder / "l.csv")
    assert set(found) == {"exact-duplicates", "near-duplicates", "contradictory-look-alikes"}
    assert found["contradictory-look-alikes"].severity == "warning"


def test_leakage_between_folders_and_by_a_split_column(folder):
    for place in ("train", "test"):
        (folder / place).mkdir()
        shutil.copy(folder / "1.png", folder / place / "a.png")
    put(folder, "train/b.png", photo(20))
    put(folder, "test/b.jpg", photo(20), quality=90)
    shutil.copy(folder / "2.png", folder / "train" / "only.png")
    found = findings(folder)
    assert (found["leakage"].severity, found["leakage"].count) == ("error", 1)
    assert found["leakage"].examples == ["1.png = test/a.png = train/a.png"]
    assert found["near-leakage"].examples == ["test/b.jpg = train/b.png"]
    shutil.rmtree(folder / "train")
    shutil.rmtree(folder / "test")
    shutil.copy(folder / "1.png", folder / "copy.png")
    (folder / "m.csv").write_text("path,split\n1.png,train\ncopy.png,test\n2.png,test\n")
    assert findings(folder / "m.csv")["leakage"].examples == ["1.png = copy.png"]


def test_transparent_drawings_are_compared_as_they_are_seen(tmp_path):
    for seed in range(2):
        shape = photo(seed, "L")
        image = Image.new("RGBA", shape.size, (0, 0, 0, 0))  # black everywhere: only the transparency draws
        image.putalpha(shape)
        put(tmp_path, f"{seed}.png", image)
    assert set(findings(tmp_path)) == {"alpha"}


def test_packed_pixels(tmp_path):
    images = np.stack([np.asarray(photo(seed)) for seed in (1, 2, 3, 2)])
    np.savez(tmp_path / "t.npz", images=images, labels=["normal", "normal", "", "anomaly"])
    found = findings(tmp_path / "t.npz")
    assert set(found) == {"exact-duplicates", "contradictory-labels"}
    assert found["exact-duplicates"].examples == ["image-00001 [normal] = image-00003 [anomaly]"]


def test_worst_comes_first_and_json_says_the_same(folder):
    (folder / "x.png").write_bytes(b"")
    put(folder, "y.png", photo(9, "RGBA"))
    shutil.copy(folder / "1.png", folder / "copy.png")
    found = audit(open_source(folder))
    assert [finding.severity for finding in found.findings] == ["error", "warning", "note"]
    about = json.loads(json.dumps(found.to_dict()))
    assert (about["images"], about["labels"]) == (7, {"normal": 0, "anomaly": 0, "unlabelled": 7})
    assert [finding["kind"] for finding in about["findings"]] == ["empty", "exact-duplicates", "alpha"]
    lines = found.lines()
    assert any(line.startswith("error: empty: 1. ") for line in lines)
    assert all("\n" not in line for line in lines)


def test_progress_ends_at_the_number_of_images(folder):
    steps = []
    audit(open_source(folder), lambda *step: steps.append(step))
    assert steps == [("check images", 4, 4, {})]
