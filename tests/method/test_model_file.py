import errno
import json
import os
from pathlib import Path

import pytest
import torch

from elsa import model_file
from elsa.errors import UserError
from elsa.model_file import read_checkpoint, read_model, write_checkpoint, write_model

TENSORS = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.int64)}


def test_a_model_comes_back_as_it_was_written(tmp_path):
    write_model(tmp_path / "m", TENSORS, {"seed": 3})
    tensors, about = read_model(tmp_path / "m")
    assert torch.equal(tensors["a"], TENSORS["a"])
    assert torch.equal(tensors["b"], TENSORS["b"])
    assert about["seed"] == 3
    assert about["higher_is"] == "anomalous"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["model.json", "model.safetensors"]


def test_tensors_that_share_memory_or_are_strided_are_stored_whole(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    last = x.view(1, 3, 2, 2).to(memory_format=torch.channels_last)
    write_model(tmp_path / "m", {"t": x.T, "channels last": last, "x": x, "x again": x}, {})
    tensors, _ = read_model(tmp_path / "m")
    assert torch.equal(tensors["x"], x)
    assert torch.equal(tensors["x again"], x)
    assert torch.equal(tensors["t"], x.T)
    assert torch.equal(tensors["channels last"], x.view(1, 3, 2, 2))


def test_a_new_model_replaces_the_old_one(tmp_path):
    write_model(tmp_path / "m", TENSORS, {"seed": 3})
    write_model(tmp_path / "m", TENSORS, {"seed": 4})
    assert read_model(tmp_path / "m")[1]["seed"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("position", [10, 60, -1])
@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_changed_byte_is_refused(tmp_path, name, position):
    write_model(tmp_path / "m", TENSORS, {"seed": 3})
    path = tmp_path / "m" / name
    content = bytearray(path.read_bytes())
    content[position if name != "model.json" or position != -1 else -4] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        read_model(tmp_path / "m")


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
@pytest.mark.parametrize("keep", [0, 7, 50])
def test_a_torn_file_is_refused(tmp_path, name, keep):
    write_model(tmp_path / "m", TENSORS, {"seed": 3})
    path = tmp_path / "m" / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError):
        read_model(tmp_path / "m")


def test_a_pair_from_two_models_is_refused(tmp_path):
    write_model(tmp_path / "m", TENSORS, {})
    write_model(tmp_path / "n", {"a": torch.zeros(5)}, {})
    (tmp_path / "n" / "model.safetensors").replace(tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match="does not belong to its"):
        read_model(tmp_path / "m")


def test_a_model_of_a_later_format_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "FORMAT", 99)
    write_model(tmp_path / "m", TENSORS, {})
    monkeypatch.undo()
    with pytest.raises(UserError, match="format 99.*update elsa"):
        read_model(tmp_path / "m")


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", "\xff"])
def test_a_folder_that_is_no_model_is_refused(tmp_path, content):
    (tmp_path / "model.json").write_bytes(content.encode("latin-1"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError):
        read_model(tmp_path)
    with pytest.raises(UserError, match="is not a MODEL folder"):
        read_model(tmp_path / "absent")


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_model_and_no_debris(tmp_path, monkeypatch):
    write_model(tmp_path / "m", TENSORS, {"seed": 3})
    monkeypatch.setattr(model_file, "_write_synced", full_disk)
    with pytest.raises(UserError, match="No space left on device; free some space or choose another --out"):
        write_model(tmp_path / "m", TENSORS, {"seed": 4})
    assert read_model(tmp_path / "m")[1]["seed"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_crash_between_the_two_renames_is_undone(tmp_path, monkeypatch):
    write_model(tmp_path / "m", TENSORS, {"seed": 3})
    os.rename(tmp_path / "m", tmp_path / ".m.previous")  # what kill -9 leaves at the worst moment
    assert read_model(tmp_path / "m")[1]["seed"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_checkpoint_comes_back_and_a_torn_or_edited_one_is_refused(tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, TENSORS, {"epoch": 3, "facts": {"history": [1.5]}})
    tensors, state = read_checkpoint(path)
    assert torch.equal(tensors["a"], TENSORS["a"])
    assert state == {"epoch": 3, "facts": {"history": [1.5]}}
    content = path.read_bytes()
    for damaged in (content[:-1], content[:20], b"", content[:40] + b"x" + content[41:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="incomplete or was changed"):
            read_checkpoint(path)


def test_a_failed_checkpoint_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "c"
    write_checkpoint(path, TENSORS, {"epoch": 3})
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UserError, match="No space left"):
        write_checkpoint(path, TENSORS, {"epoch": 4})
    monkeypatch.undo()
    assert read_checkpoint(path)[1] == {"epoch": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_no_pickle_is_read_or_written():
    source = Path(model_file.__file__).read_text()
    assert "torch.load" not in source
    assert "import pickle" not in source


def test_the_description_is_plain_json(tmp_path):
    write_model(tmp_path / "m", TENSORS, {"settings": {"tau": 0.5}})
    about = json.loads((tmp_path / "m" / "model.json").read_text())
    assert about["settings"] == {"tau": 0.5}
