"""The sets beside CIFAR-10: each layout on small files made here, and the development data where it lies."""

import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from elsa.bench.pack import CHUNKS, pack
from elsa.data import benchmark_sets as module
from elsa.data.benchmark_sets import find_set, load_set, read_packed, write_packed
from elsa.data.benchmarks import IMAGENETTE_CLASSES, checksum
from elsa.errors import UserError

DEVELOPMENT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def pictures(number, side=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (number, side, side, 3), dtype=np.uint8)


def encoded(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def test_what_is_packed_comes_back_pixel_by_pixel_with_its_classes(tmp_path):
    images = pictures(7)
    write_packed(tmp_path / "deep" / "cifar100-test.npz", [encoded(image) for image in images], list("cabbaca"))
    found = load_set(tmp_path, ("cifar100", "cifar100-test"))
    assert found.name == "cifar100-test"
    assert torch.equal(found.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert found.classes.tolist() == list("cabbaca")


def test_a_packed_file_that_is_cut_is_refused_in_one_line(tmp_path):
    write_packed(tmp_path / "svhn-test-cropped-10k.npz", [encoded(image) for image in pictures(3)], list("abc"))
    np.savez(tmp_path / "cifar100-test.npz", content=np.zeros(3, np.uint8), ends=np.array([3]))
    with pytest.raises(UserError, match="cifar100-test.npz: .*classes.*bench pack"):
        read_packed(tmp_path / "cifar100-test.npz")


def test_cifar100_in_its_binary_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CIFAR100_TEST_IMAGES", 200)
    images = pictures(200).transpose(0, 3, 1, 2)
    records = [bytes([k % 20, k % 100]) + image.tobytes() for k, image in enumerate(images)]
    path = tmp_path / "cifar-100-binary" / "test.bin"
    path.parent.mkdir()
    path.write_bytes(b"".join(records))
    found = load_set(tmp_path, ("cifar100", "cifar100-test"))
    assert found.name == "cifar100"
    assert torch.equal(found.images, torch.from_numpy(images))
    assert found.classes[107] == "7"
    path.write_bytes(b"".join([bytes([0, 1]) + records[0][2:], *records[1:]]))
    with pytest.raises(UserError, match="100 classes of one size"):
        load_set(tmp_path, ("cifar100",))
    path.write_bytes(b"".join(records)[:-1])
    with pytest.raises(UserError, match=r"test.bin has 614799 bytes.*614800"):
        load_set(tmp_path, ("cifar100",))


def test_svhn_in_its_mat_file(tmp_path, monkeypatch):
    from scipy.io import savemat

    images = pictures(5)
    path = tmp_path / "test_32x32.mat"
    savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": np.array([[10], [1], [2], [3], [4]])})
    with pytest.raises(UserError, match="is not SVHN's test_32x32.mat"):
        load_set(tmp_path, ("svhn",))
    monkeypatch.setattr(module, "SVHN_TEST_MD5", hashlib.md5(path.read_bytes()).hexdigest())
    found = load_set(tmp_path, ("svhn",))
    assert torch.equal(found.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert found.classes.tolist() == ["0", "1", "2", "3", "4"]


def test_folders_of_images_are_read_in_order_at_32_px(tmp_path):
    small, large = pictures(2), pictures(1, side=64)
    for place, pixels in (("b/1.png", small[1]), ("a/2.png", large[0]), ("a/1.png", small[0])):
        (tmp_path / "LSUN_fix" / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "LSUN_fix" / place)
    (tmp_path / "LSUN_fix" / "readme.txt").write_text("no image")
    found = load_set(tmp_path, ("lsun-fix",))
    assert found.images.shape == (3, 3, 32, 32)
    assert torch.equal(found.images[0], torch.from_numpy(small[0]).permute(2, 0, 1))
    assert torch.equal(found.images[2], torch.from_numpy(small[1]).permute(2, 0, 1))
    assert found.classes.tolist() == ["a", "a", "b"]
    (tmp_path / "LSUN_fix" / "a" / "3.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"3.png cannot be read"):
        load_set(tmp_path, ("lsun-fix",))


def test_the_original_comes_before_its_stand_in_and_none_is_none(tmp_path):
    assert find_set(tmp_path, ("lsun", "lsun-fix")) is None
    with pytest.raises(UserError, match=r"test_32x32.mat or svhn-test-cropped-10k.npz is not there"):
        load_set(tmp_path, module.OUTLIERS["SVHN"])
    write_packed(tmp_path / "tinyimagenet-test-32.npz", [encoded(pictures(1)[0])], ["x"])
    assert find_set(tmp_path, module.OUTLIERS["ImageNet (FIX)"]).name == "tinyimagenet-test-32"
    (tmp_path / "Imagenet_fix").mkdir()
    Image.fromarray(pictures(1)[0]).save(tmp_path / "Imagenet_fix" / "1.png")
    assert find_set(tmp_path, module.OUTLIERS["ImageNet (FIX)"]).name == "imagenet-fix"


def test_the_checksum_sees_every_byte_and_no_order():
    records = np.random.default_rng(0).integers(0, 256, (11, 7), dtype=np.uint8)
    changed = records.copy()
    changed[3, 2] ^= 1
    assert checksum(records) == checksum(records[::-1])
    assert checksum(records) != checksum(changed)


def test_packing_makes_every_set_of_parquet_files(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    for name in module.PACKED:
        images = [{"bytes": encoded(image, "WEBP"), "path": None} for image in pictures(2)]
        parquet.write_table(
            pa.table({"image": images, "label": ["b", "a"]}), tmp_path / f"{name.replace('-', '_')}.parquet"
        )
    lines = pack(tmp_path, tmp_path / "out")
    assert len(lines) == len(CHUNKS)
    for name in module.PACKED:
        assert load_set(tmp_path / "out", (name,)).classes.tolist() == ["b", "a"]
    (tmp_path / "cifar100_test.parquet").unlink()
    with pytest.raises(UserError, match=r"cifar100_test.parquet"):
        pack(tmp_path, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(not DEVELOPMENT_DATA.is_dir(), reason="needs the development data")
def test_the_development_data_travels_in_parts_of_at_most_64_mib(tmp_path):
    pack(DEVELOPMENT_DATA, tmp_path)
    for chunk in CHUNKS:
        assert sum(path.stat().st_size for path in (tmp_path / chunk).iterdir()) < 60 * 2**20
    assert load_set(tmp_path, ("cifar100-test",)).images.shape == (10_000, 3, 32, 32)
    assert load_set(tmp_path, ("svhn-test-cropped-10k",)).images.shape == (10_000, 3, 32, 32)
    small = load_set(tmp_path, ("imagenette64-val",))
    assert small.images.shape == (3925, 3, 64, 64)
    assert sorted(set(small.classes)) == sorted(IMAGENETTE_CLASSES)
