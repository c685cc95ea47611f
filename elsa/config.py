"""The settings of Elsa and Elsa+: defaults are the paper's, presets change them by name.

Every field is an int, a float or a str, so that `--set NAME=VALUE` can check its type.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elsa.errors import UserError

ENCODERS = ("resnet18", "tiny")
CHOICES = {
    "encoder": ENCODERS,
    "stem": ("auto", "small", "large"),
    "pretrain_optimizer": ("lars", "sgd", "adam", "muon"),
    "finetune_batchnorm": ("eval", "train"),
    "ensemble": ("projections", "scores"),
    "precision": ("auto", "bf16", "fp32"),
}


@dataclass(frozen=True)
class ElsaConfig:
    """Elsa+ as in the paper; `METHODS["elsa"]` turns it into plain Elsa."""

    encoder: str = "resnet18"
    """Network learned from scratch: resnet18, or tiny for a CPU."""
    stem: str = "auto"
    """First layers of resnet18: small (3x3, keeps the resolution), large (7x7 and pooling), auto (large from 96 px)."""
    shifts: int = 4
    """Rotations that count as shifts: 4 is Elsa+, 1 is Elsa."""
    tau: float = 0.5
    """Temperature of the energy in fine-tuning."""
    score_tau: float = 0.5
    """Temperature of the energy in scoring; the official code uses 1, which moves the AUROC by 0.2 at most."""
    num_prototypes: int = 100
    """K of the spherical k-means."""
    views: int = 10
    """Weak augmentations averaged in a score."""
    ensemble: str = "projections"
    """Average the views' projections (pseudo-code, official code) or their scores (the paper's formula)."""
    crop_area_min: float = 0.54
    """Smallest share of the image that a weak augmentation keeps; CSI's own recipe has 0.08."""
    crop_area_max: float = 0.54
    """Largest share of the image that a weak augmentation keeps; CSI's own recipe has 1."""

    pretrain_epochs: int = 1000
    """Passes over the unlabelled and normal images in contrastive pre-training."""
    pretrain_batch: int = 128
    """Images per pre-training step; each gives 2 views of every rotation."""
    pretrain_optimizer: str = "lars"
    """lars, sgd (both with momentum 0.9), adam, or muon (orthogonalised momentum, fewest epochs)."""
    pretrain_lr: float = 0.1
    """Highest learning rate of pre-training, reached after the warm-up and lowered along a cosine."""
    pretrain_weight_decay: float = 1e-6
    """Weight decay of pre-training."""
    pretrain_warmup: int = 10
    """Epochs over which the learning rate rises."""
    pretrain_tau: float = 0.5
    """Temperature of the contrastive loss."""

    finetune_epochs: int = 50
    """Passes over all training images in energy-based fine-tuning."""
    finetune_batch: int = 64
    """Images per fine-tuning step; each gives 2 views of every rotation."""
    finetune_lr: float = 1e-4
    """Learning rate of Adam in fine-tuning."""
    finetune_batchnorm: str = "eval"
    """Whether batch norm keeps its statistics in fine-tuning (eval, Elsa+) or follows the batch (train, Elsa)."""
    prototypes_every: int = 3
    """Epochs of fine-tuning between two computations of the prototypes."""
    early_stop_share: float = 0.05
    """Share of the unlabelled images held back from fine-tuning for the early-stop score."""

    precision: str = "auto"
    """auto is bf16 on a GPU and fp32 on a CPU."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r} is unknown: use {' or '.join(allowed)}")
        if self.shifts not in (1, 4):
            raise UserError(f"shifts={self.shifts} is not possible: use 4 (Elsa+, the rotations) or 1 (Elsa)")
        for name in ("views", "pretrain_batch", "finetune_batch", "prototypes_every", "num_prototypes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("pretrain_epochs", "finetune_epochs", "pretrain_warmup", "pretrain_weight_decay"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("tau", "score_tau", "pretrain_tau", "pretrain_lr", "finetune_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name)} must be a positive number")
        if not 0 < self.crop_area_min <= self.crop_area_max <= 1:
            raise UserError(
                f"crop_area_min={self.crop_area_min} and crop_area_max={self.crop_area_max} must satisfy "
                f"0 < crop_area_min <= crop_area_max <= 1"
            )
        if not 0 < self.early_stop_share < 1:
            raise UserError(f"early_stop_share={self.early_stop_share} must lie between 0 and 1")
        if not self.tau * math.log(self.num_prototypes) > 1:  # also refuses nan and a single prototype
            raise UserError(
                f"tau={self.tau} with {self.num_prototypes} prototypes lets the energy reach zero, where the loss "
                f"1/E is unbounded: tau * log(num_prototypes) must exceed 1; use a larger tau or more prototypes"
            )


METHODS: dict[str, dict[str, Any]] = {
    "elsa+": {},
    "elsa": {
        "shifts": 1,
        "num_prototypes": 50,
        "pretrain_epochs": 500,
        "pretrain_batch": 512,
        "finetune_batchnorm": "train",
        "prototypes_every": 1,
    },
}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # a fifth of the epochs: Muon learns more in each than LARS, SGD and AdamW (docs/speed.md, the recipe)
    "fast": {"pretrain_epochs": 200, "pretrain_optimizer": "muon", "pretrain_lr": 0.05},
    # for 2 CPU cores: minutes, not hours
    "cpu": {
        "encoder": "tiny",
        "pretrain_epochs": 30,
        "pretrain_batch": 64,
        "pretrain_optimizer": "adam",
        "pretrain_lr": 1e-3,
        "pretrain_warmup": 1,
        "finetune_epochs": 10,
        "num_prototypes": 20,
        "views": 4,
    },
}


def method_config(method: str = "elsa+", preset: str = "paper", **settings: Any) -> ElsaConfig:
    """The settings of a method under a preset, with single settings changed by name."""
    for given, allowed, what in ((method, METHODS, "method"), (preset, PRESETS, "preset")):
        if given not in allowed:
            raise UserError(f"{what}={given!r} is unknown: use {', '.join(allowed)}")
    unknown = set(settings) - {field.name for field in dataclasses.fields(ElsaConfig)}
    if unknown:
        raise UserError(_unknown_setting(ElsaConfig, sorted(unknown)[0]))
    chosen = {**METHODS[method], **PRESETS[preset], **settings}
    for name, value in settings.items():
        chosen[name] = _typed(ElsaConfig, name, value)
    return ElsaConfig(**chosen)


def parse_settings(config_class: type, assignments: Iterable[str]) -> dict[str, Any]:
    """The settings in NAME=VALUE strings, each of the type of its field; unknown names and wrong types are refused."""
    settings = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment}: write NAME=VALUE, e.g. --set tau=0.3")
        settings[name] = _typed(config_class, name, value)
    return settings


def override(config: Any, assignments: Iterable[str]) -> Any:
    """A copy of any frozen settings dataclass with NAME=VALUE strings applied."""
    return dataclasses.replace(config, **parse_settings(type(config), assignments))


def _typed(config_class: type, name: str, value: Any) -> Any:
    kinds = {field.name: field.type for field in dataclasses.fields(config_class)}
    if name not in kinds:
        raise UserError(_unknown_setting(config_class, name))
    kind = kinds[name]
    assert kind in (int, float, str), f"settings are int, float or str, not {kind}"
    right = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
    if isinstance(value, bool) or not (right or isinstance(value, str)):
        raise UserError(f"{name} must be {kind.__name__}, got {value!r}")
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"{name} must be {kind.__name__}, got {value!r}") from None


def _unknown_setting(config_class: type, name: str) -> str:
    known = ", ".join(field.name for field in dataclasses.fields(config_class))
    return f"there is no setting {name!r}; settings are: {known}"
