"""MODEL folders among crashes and other processes: what a kill leaves behind hinders nobody."""

import os
import shutil

import pytest
import torch

from elsa.errors import UserError
from elsa.model_file import read_checkpoint, read_model, write_model

TENSORS = {"a": torch.arange(5.0)}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_replaced_model_that_a_kill_left_behind_does_not_stop_the_next_one(tmp_path):
    write_model(tmp_path / "m", TENSORS, {"seed": 3})
    shutil.copytree(tmp_path / "m", tmp_path / ".m.previous")  # killed when the new one stood, the old one not yet gone
    write_model(tmp_path / "m", TENSORS, {"seed": 4})
    assert read_model(tmp_path / "m")[1]["seed"] == 4
    assert names_in(tmp_path) == ["m"]


def test_a_reader_leaves_alone_what_another_process_is_writing(tmp_path):
    write_model(tmp_path / "m", TENSORS, {"seed": 3})
    (tmp_path / ".m.partial").mkdir()
    assert read_model(tmp_path / "m")[1]["seed"] == 3
    assert names_in(tmp_path) == [".m.partial", "m"]
    write_model(tmp_path / "m", TENSORS, {"seed": 4})  # and a writer clears what a kill has left
    assert names_in(tmp_path) == ["m"]


def test_what_is_missing_is_named_in_words(tmp_path):
    write_model(tmp_path / "m", TENSORS, {})
    os.unlink(tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match=r"m is not a MODEL folder .*: model\.safetensors: No such file or directory; "):
        read_model(tmp_path / "m")


def test_a_checkpoint_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "m.checkpoint").mkdir()
    with pytest.raises(UserError, match=r"m\.checkpoint cannot be read: "):
        read_checkpoint(tmp_path / "m.checkpoint")
