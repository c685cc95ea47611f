"""Replays the kept inputs of every fuzzing target: each is taken or refused in one line, and quickly."""

import time
from pathlib import Path

import pytest

from fuzz.seeds import seeds
from fuzz.targets import TARGETS

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"


@pytest.fixture(scope="module")
def valid():
    return seeds()


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_breaks_nothing(name, valid):
    inputs = [*valid[name], *[path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]]
    assert inputs
    TARGETS[name](inputs[0])  # imports and caches are no input's fault
    for content in inputs:
        began = time.process_time()
        TARGETS[name](content)
        assert time.process_time() - began < 5


def test_every_target_has_valid_inputs_to_start_from(valid):
    assert set(valid) == set(TARGETS)
