"""Models of every format that was ever written are read, and score as they did."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from stored import HERE, PICTURES, VECTORS, rebuild

from elsa.model_file import FORMAT
from elsa.saved import load

KEPT = sorted(HERE.glob("*.json"))


def test_the_present_format_is_among_those_kept():
    assert {path.name.split("-")[1] for path in KEPT} >= {str(FORMAT)}
    assert len(KEPT) >= 3


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.stem)
def test_a_kept_model_is_read_and_scores_as_it_did(kept, tmp_path):
    told = json.loads(kept.read_text())
    model = load(rebuild(told["about"], told["shapes"], tmp_path / "model"))
    new = VECTORS if told["about"]["class"] == "ElsaHead" else PICTURES
    torch.testing.assert_close(
        model.anomaly_score(new).double(), torch.tensor(told["scores"]).double(), rtol=1e-4, atol=1e-4
    )
