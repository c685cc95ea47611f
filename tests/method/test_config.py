import ast
import dataclasses
import itertools
from pathlib import Path

import pytest

import elsa
from elsa.config import METHODS, PRESETS, ElsaConfig, method_config, override, parse_settings
from elsa.errors import UserError

PACKAGE = Path(elsa.__file__).parent


def test_defaults_are_the_papers():
    plus, plain = method_config("elsa+"), method_config("elsa")
    assert (plus.shifts, plus.num_prototypes, plus.prototypes_every, plus.views) == (4, 100, 3, 10)
    assert (plain.shifts, plain.num_prototypes, plain.prototypes_every) == (1, 50, 1)
    assert (plus.pretrain_epochs, plus.pretrain_batch, plain.pretrain_epochs, plain.pretrain_batch) == (
        1000,
        128,
        500,
        512,
    )
    for config in (plus, plain):
        assert (config.pretrain_optimizer, config.pretrain_lr, config.pretrain_weight_decay) == ("lars", 0.1, 1e-6)
        assert (config.finetune_epochs, config.finetune_batch, config.finetune_lr, config.tau) == (50, 64, 1e-4, 0.5)
        assert (config.early_stop_share, config.crop_area_min, config.crop_area_max) == (0.05, 0.54, 0.54)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_method_has_every_preset(method, preset):
    assert method_config(method, preset).shifts == (4 if method == "elsa+" else 1)


def test_every_field_is_read_outside_the_config_and_documented():
    read = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        if path.name != "config.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute))
    }
    fields = [field.name for field in dataclasses.fields(ElsaConfig)]
    assert [name for name in fields if name not in read] == []
    body = next(
        node
        for node in ast.parse((PACKAGE / "config.py").read_text()).body
        if getattr(node, "name", "") == "ElsaConfig"
    ).body
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(following, ast.Expr), f"{ast.unparse(statement)} has no docstring"


def test_settings_are_changed_by_name_over_preset_and_method():
    config = method_config("elsa+", "cpu", views=3, tau=1)
    assert (config.views, config.tau, config.encoder) == (3, 1.0, "tiny")
    assert isinstance(config.tau, float)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("tua=0.4", "there is no setting 'tua'; settings are: encoder, "),
        ("tau=hot", "tau must be float, got 'hot'"),
        ("views=2.5", "views must be int, got '2.5'"),
        ("views", "write NAME=VALUE"),
        ("views=0", "views=0 must be at least 1"),
        ("pretrain_epochs=-1", "pretrain_epochs=-1 must not be negative"),
        ("pretrain_lr=0", "pretrain_lr=0.0 must be a positive number"),
        ("finetune_lr=nan", "finetune_lr=nan must be a positive number"),
        ("pretrain_optimizer=sdg", "use lars or sgd or adam"),
        ("shifts=2", "use 4 .* or 1"),
        ("crop_area_min=0.9", "crop_area_min <= crop_area_max"),
        ("early_stop_share=1", "early_stop_share=1.0 must lie between 0 and 1"),
        ("tau=0.1", "tau=0.1 with 100 prototypes lets the energy reach zero"),
        ("num_prototypes=7", "use a larger tau or more prototypes"),
        ("num_prototypes=1", "lets the energy reach zero"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_do(assignment, message):
    with pytest.raises(UserError, match=message):
        override(ElsaConfig(), [assignment])


def test_eight_prototypes_are_enough_at_the_papers_temperature():
    assert override(ElsaConfig(), ["num_prototypes=8"]).num_prototypes == 8


def test_a_setting_of_the_wrong_type_is_refused_in_python_too():
    with pytest.raises(UserError, match="views must be int, got True"):
        method_config(views=True)
    with pytest.raises(UserError, match="views must be int, got 2.5"):
        method_config(views=2.5)


def test_unknown_methods_and_presets_are_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"method='elza' is unknown: use elsa\+, elsa"):
        method_config("elza")
    with pytest.raises(UserError, match="preset='slow' is unknown: use paper, fast, cpu"):
        method_config(preset="slow")


def test_parsed_settings_have_the_type_of_their_field():
    assert parse_settings(ElsaConfig, ["tau=1", "views=2", "ensemble=scores"]) == {
        "tau": 1.0,
        "views": 2,
        "ensemble": "scores",
    }
