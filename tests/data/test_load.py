"""From a source to pixels: what is chosen, what is left out, and that memory and shards agree."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from elsa.data import load, shards
from elsa.data.load import choose_size, load_images
from elsa.data.shards import Shards
from elsa.data.sources import open_source
from elsa.errors import UserError


def save(path, width=64, height=48, colour=(9, 9, 9), kind="PNG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), colour).save(path, kind)


@pytest.fixture
def folder(tmp_path):
    """Nine pictures with their number as brightness, one of them coloured, and three broken files among them."""
    for i in range(9):
        save(
            tmp_path / "photos" / ("normal" if i % 2 else "") / f"{i}.png",
            colour=(i * 20, i * 20, 199 if i == 5 else i * 20),
        )
    (tmp_path / "photos" / "2broken.png").write_bytes(b"no image")
    (tmp_path / "photos" / "0empty.png").write_bytes(b"")
    content = (tmp_path / "photos" / "8.png").read_bytes()
    (tmp_path / "photos" / "9cut.png").write_bytes(content[:-30])
    return tmp_path / "photos"


def test_broken_images_are_listed_and_everything_else_lines_up(folder):
    source = open_source(folder)
    images = load_images(source)
    assert [name for name, _ in images.broken] == ["0empty.png", "2broken.png", "9cut.png"]
    for part, (_, reason) in zip(["0 bytes", "known format", "damaged"], images.broken, strict=True):
        assert part in reason
    assert len(images) == len(images.images) == len(images.labels) == 9
    for name, word, pixels in zip(images.names, images.labels, images.images, strict=True):
        number = int(name[-5])
        assert word == ("normal" if number % 2 else "")
        assert pixels[0].unique().tolist() == [number * 20]


@pytest.mark.parametrize("channels", [None, 1])
def test_shards_hold_what_memory_would(folder, tmp_path, monkeypatch, channels):
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    source = open_source(folder)
    in_memory = load_images(source, channels=channels)
    on_disk = load_images(source, channels=channels, cache=tmp_path / "cache", memory_limit=0)
    assert isinstance(on_disk.images, Shards)
    assert torch.equal(on_disk.images[:], in_memory.images)
    for name in ("labels", "names", "extra", "broken", "decoding"):
        assert getattr(on_disk, name) == getattr(in_memory, name)


def test_a_later_run_takes_all_from_the_cache_and_a_changed_file_renews_it(folder, tmp_path, monkeypatch):
    arguments = {"cache": tmp_path / "cache", "memory_limit": 0}
    first = load_images(open_source(folder), **arguments)
    with monkeypatch.context() as patch:
        for name in ("decode", "is_grey", "open_image"):
            patch.setattr(load, name, None)  # a call would fail
        again = load_images(open_source(folder), **arguments)
    assert again.decoding == first.decoding
    assert again.broken == first.broken
    assert torch.equal(again.images[:], first.images[:])
    save(folder / "0.png", colour=(200, 200, 200))
    assert load_images(open_source(folder), **arguments).images[:1].max() == 200
    assert load_images(open_source(folder), size=96, **arguments).images.shape[2] == 96


def test_channels_follow_the_data(folder):
    assert load_images(open_source(folder)).images.shape[1] == 3
    (folder / "normal" / "5.png").unlink()
    assert load_images(open_source(folder)).images.shape[1] == 1
    assert load_images(open_source(folder), channels=3).images.shape[1] == 3


@pytest.mark.parametrize(("sides", "size"), [
    ([(20, 90)], 32), ([(28, 28)], 32), ([(79, 80)], 64), ([(81, 200)], 96), ([(4000, 3000)], 224),
    ([(64, 64), (64, 64), (640, 480)], 64),
])  # fmt: skip
def test_size_follows_the_median_shorter_side(tmp_path, sides, size):
    for number, (width, height) in enumerate(sides):
        save(tmp_path / f"{number}.png", width, height)
    source = open_source(tmp_path)
    assert choose_size(source) == size
    assert load_images(source).decoding.size == size


def test_size_of_packed_pixels(tmp_path):
    np.savez(tmp_path / "t.npz", images=np.zeros((3, 100, 70), np.uint8))
    assert load_images(open_source(tmp_path / "t.npz")).images.shape == (3, 1, 64, 64)


def test_nothing_left_is_an_error(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(UserError, match=r"none of its 2 images can be decoded; a.png: not an image"):
        load_images(open_source(tmp_path))


def test_too_much_for_memory_without_a_cache_is_an_error(folder):
    with pytest.raises(UserError, match=r"12 images at 64 px need 0.0 GB, more than the memory limit"):
        load_images(open_source(folder), size=64, memory_limit=1000)
    load_images(open_source(folder), size=64, memory_limit=12 * 64 * 64 * 3)  # the limit itself is allowed


def test_wrong_settings_are_refused_before_the_source_is_read(folder, monkeypatch):
    monkeypatch.setattr(load, "is_grey", None)
    for settings in ({"size": 20}, {"channels": 4}, {"resize": "zoom"}):
        with pytest.raises(UserError, match=str(next(iter(settings.values())))):
            load_images(open_source(folder), **settings)


def test_progress_ends_at_the_number_of_images(folder):
    steps = []
    load_images(open_source(folder), progress=lambda *step: steps.append(step))
    assert steps[-1] == ("read images", 12, 12, {})


def test_settings_reach_the_decoder(tmp_path):
    image = Image.new("RGB", (96, 32), "red")
    file = io.BytesIO()
    image.save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    padded = load_images(open_source(tmp_path), size=32, resize="pad")
    assert padded.images[0, 0, 0].max() == 0
    assert padded.decoding.resize == "pad"
    with pytest.raises(UserError, match="pixel limit of 100"):
        load_images(open_source(tmp_path), size=32, channels=3, pixel_limit=100)
