"""Shards: any way of reading gives what memory would, and a kill costs no finished shard."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elsa.data import shards
from elsa.data.images import Decoding
from elsa.data.shards import Shards, build_shards, cache_folder, read_manifest
from elsa.errors import UserError

HOW = Decoding(size=32, channels=3)
N = 23
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 3, 32, 32), np.uint8)
NAMES = [f"{i}.png" for i in range(N)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 5 * 3 * 32 * 32)


def build(folder, fingerprint="f", broken=(), asked=None, progress=lambda done: None):
    def decoded(records):
        for record in records:
            if asked is not None:
                asked.append(record)
            yield f"reason {record}" if record in broken else PIXELS[record]

    return build_shards(folder, fingerprint, NAMES, HOW, decoded, progress)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    before, shards.SHARD_BYTES = shards.SHARD_BYTES, 5 * 3 * 32 * 32
    yield build(folder).shards
    shards.SHARD_BYTES = before


def test_shape_and_length(stored):
    assert len(stored) == N
    assert stored.shape == (N, 3, 32, 32)
    assert sorted(path.name for path in stored.folder.glob("*.u8")) == [f"0000{k}.u8" for k in range(5)]


@settings(max_examples=60, deadline=None)
@given(index=st.lists(st.integers(-N, N - 1), max_size=40))
def test_positions_in_any_order_repeated_and_negative(stored, index):
    chosen = torch.tensor(index, dtype=torch.int64)
    images = stored[chosen]
    assert images.dtype == torch.uint8
    assert torch.equal(images, torch.from_numpy(PIXELS)[chosen])


@settings(max_examples=60, deadline=None)
@given(chosen=st.slices(N))
def test_slices(stored, chosen):
    if chosen.step is not None and chosen.step < 0:
        chosen = slice(chosen.start, chosen.stop, -chosen.step)  # torch has no negative steps
    assert torch.equal(stored[chosen], torch.from_numpy(PIXELS)[chosen])


def test_masks_and_positions_out_of_range(stored):
    mask = torch.arange(N) % 3 == 1
    assert torch.equal(stored[mask], torch.from_numpy(PIXELS)[mask])
    with pytest.raises(IndexError):
        stored[torch.tensor([N])]


def test_a_batch_is_a_copy(stored):
    stored[0:3].zero_()
    assert torch.equal(stored[0:3], torch.from_numpy(PIXELS[:3]))


def test_broken_images_leave_no_gap(tmp_path):
    result = build(tmp_path, broken={0, 4, 5, 6, 7, 8, 9, 22})  # the second shard holds nothing
    kept = [i for i in range(N) if i not in {0, 4, 5, 6, 7, 8, 9, 22}]
    assert torch.equal(result.shards[:], torch.from_numpy(PIXELS[kept]))
    assert torch.equal(result.shards[torch.tensor([3, 4, 14])], torch.from_numpy(PIXELS[[kept[3], kept[4], kept[14]]]))
    assert result.broken == [(i, f"reason {i}") for i in (0, 4, 5, 6, 7, 8, 9, 22)]
    assert build(tmp_path, broken={1}).broken == result.broken  # remembered, not decoded again


def test_a_finished_cache_is_not_decoded_again(tmp_path):
    build(tmp_path)
    asked, steps = [], []
    again = build(tmp_path, asked=asked, progress=steps.append)
    assert asked == []
    assert steps == [N]
    assert torch.equal(again.shards[:], torch.from_numpy(PIXELS))


def test_another_fingerprint_rebuilds_and_leaves_foreign_files_alone(tmp_path):
    build(tmp_path)
    (tmp_path / "readme.md").write_text("mine")
    asked = []
    build(tmp_path, fingerprint="g", asked=asked)
    assert asked == list(range(N))
    assert (tmp_path / "readme.md").read_text() == "mine"
    assert read_manifest(tmp_path, "f") is None
    about = read_manifest(tmp_path, "g")
    assert about is not None
    assert about["names"] == NAMES
    assert about["decoding"] == {"size": 32, "channels": 3, "resize": "stretch", "pixel_limit": 200_000_000}


@pytest.mark.parametrize("damage", ["cut", "unlink", "sidecar", "manifest"])
def test_only_damaged_shards_are_decoded_again(tmp_path, damage):
    build(tmp_path)
    path = tmp_path / "00002.u8"
    if damage == "cut":
        os.truncate(path, 100)
    elif damage == "unlink":
        path.unlink()
    elif damage == "sidecar":
        path.with_suffix(".json").write_text('{"count": ')
    else:
        (tmp_path / "manifest.json").write_text("{")
    asked = []
    again = build(tmp_path, asked=asked)
    assert asked == (list(range(N)) if damage == "manifest" else [10, 11, 12, 13, 14])
    assert torch.equal(again.shards[:], torch.from_numpy(PIXELS))


def test_a_shard_cut_while_in_use_is_noticed(tmp_path):
    images = build(tmp_path).shards
    os.truncate(tmp_path / "00001.u8", 100)
    with pytest.raises(UserError, match=r"00001.u8 is shorter than its manifest says"):
        images[7:8]


SLOW_BUILD = """
import sys, time
from pathlib import Path
import numpy as np
from elsa.data import shards
from elsa.data.images import Decoding
shards.SHARD_BYTES = 5 * 3 * 32 * 32
def decoded(records):
    for record in records:
        time.sleep(0.05)
        yield np.full((3, 32, 32), record, np.uint8)
names = [f"{i}.png" for i in range(23)]
shards.build_shards(Path(sys.argv[1]), "f", names, Decoding(32, 3), decoded, lambda done: print(done, flush=True))
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_a_killed_build_goes_on_where_it_was(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if int(line) == 12:
                process.send_signal(signal.SIGKILL)
                break
    asked = []
    result = build(tmp_path, asked=asked)
    assert asked[0] == 10  # two shards of five had been finished
    assert torch.equal(result.shards[10:], torch.from_numpy(PIXELS[10:]))
    assert result.shards[:10].flatten(1).float().mean(1).tolist() == list(range(10))  # the killed run's own pixels
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk_is_said_before_and_during_the_work(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 10))
        with pytest.raises(UserError, match=r"needs 0.0 GB and its disk has 0.0 GB free"):
            build(tmp_path)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        build(tmp_path)
    assert not list(tmp_path.glob("*.partial"))


def test_an_unusable_cache_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache .*file.* cannot be written: Not a directory"):
        build(tmp_path / "file" / "cache")


def test_sources_have_folders_of_their_own():
    a, b = (cache_folder(Path("cache"), Path(where, "photos")) for where in ("/x", "/y"))
    assert a.parent == b.parent == Path("cache")
    assert a != b
    assert a.name.startswith("photos-")
    assert ":" not in a.name


def test_a_random_batch_takes_well_under_ten_milliseconds(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 4 << 20)
    count = 20_000
    for number in range(15):
        (tmp_path / f"{number:05d}.u8").write_bytes(bytes(1365 * 3072))
    images = Shards(tmp_path, [1365] * 14 + [count - 14 * 1365], (3, 32, 32))
    index = torch.randint(count, (512,), generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(20):
        begin = time.thread_time()
        images[index]
        times.append(time.thread_time() - begin)
    assert sorted(times)[10] < 0.010


def test_manifest_is_plain_json(tmp_path):
    build(tmp_path)
    about = json.loads((tmp_path / "manifest.json").read_text())
    assert set(about) == {"fingerprint", "decoding", "image_shape", "names"}
    assert about["image_shape"] == [3, 32, 32]
