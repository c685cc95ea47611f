"""Guards that mutants of Elsa.fit, of its scores and of its files had survived."""

import json

import pytest
import torch

from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.labels import ANOMALY, NORMAL, UNLABELLED
from elsa.model_file import read_model, write_model

QUICK = {"preset": "cpu", "pretrain_epochs": 0, "finetune_epochs": 0, "num_prototypes": 13, "views": 1}
IMAGES = torch.randint(0, 256, (40, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_only_unlabelled_images_are_held_back_while_there_are_any():
    model = Elsa(method="elsa", early_stop_share=0.5, **QUICK)
    label = torch.tensor([NORMAL] * 20 + [UNLABELLED] * 10 + [ANOMALY] * 10, dtype=torch.int8)
    held_back = model._held_back(label)
    assert len(held_back) == 5
    assert (label[held_back] == UNLABELLED).all()


def test_the_views_of_a_score_follow_from_the_seed():
    model = Elsa(method="elsa", seed=1, **QUICK).fit(IMAGES, [""] * 40)
    first = model.anomaly_score(IMAGES[:5])
    assert torch.equal(model.anomaly_score(IMAGES[:5]), first)
    model.seed = 2
    assert not torch.equal(model.anomaly_score(IMAGES[:5]), first)


def test_an_edited_description_is_refused_though_it_is_good_json(tmp_path):
    write_model(tmp_path / "m", {"x": torch.ones(2)}, {"seed": 1})
    path = tmp_path / "m" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seed": 2}))
    with pytest.raises(UserError, match="was changed after writing"):
        read_model(tmp_path / "m")
