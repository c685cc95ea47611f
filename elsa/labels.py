"""Labels: words in every file and interface, these three codes inside the formulas and nowhere else."""

from collections.abc import Iterable

import torch
from torch import Tensor

from elsa.errors import UserError

ANOMALY, UNLABELLED, NORMAL = -1, 0, 1
CODES = {"anomaly": ANOMALY, "": UNLABELLED, "normal": NORMAL}


def encode_labels(words: Iterable[str | None]) -> Tensor:
    """One int8 code per word; None counts as unlabelled. Integers are refused: libraries disagree on their meaning."""
    codes = []
    for position, word in enumerate(words):
        if isinstance(word, str) or word is None:
            code = CODES.get(word or "")
            if code is None:
                raise UserError(f"label {word!r} at position {position}: use 'normal', 'anomaly' or '' (unlabelled)")
            codes.append(code)
        else:
            raise UserError(
                f"label {word!r} at position {position} is a number, and numbers mean different things: here and in "
                f"Deep SAD 1 is normal, in PyOD 1 is an anomaly, in scikit-learn -1 is an anomaly or unlabelled; "
                f"use the words 'normal', 'anomaly' or '' (unlabelled)"
            )
    return torch.tensor(codes, dtype=torch.int8)
