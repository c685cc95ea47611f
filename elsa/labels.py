"""Labels: words in every file and interface, these three codes inside the formulas and nowhere else."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from elsa.errors import UserError

ANOMALY, UNLABELLED, NORMAL = -1, 0, 1
CODES = {"anomaly": ANOMALY, "": UNLABELLED, "normal": NORMAL}


def encode_labels(words: Iterable[str | None], names: Sequence[str] | None = None) -> Tensor:
    """One int8 code per word; None counts as unlabelled. Integers are refused: libraries disagree on their meaning.

    A refusal tells the name of the image where `names` are given, and its position where they are not.
    """
    codes = []
    for position, word in enumerate(words):
        code = CODES.get(word or "") if isinstance(word, str) or word is None else None
        if code is None:
            place = f"at position {position}" if names is None else f"of {names[position]}"
            raise UserError(f"label {word!r} {place}{_why_not(word)}")
        codes.append(code)
    return torch.tensor(codes, dtype=torch.int8)


def _why_not(word: object) -> str:
    if isinstance(word, str):
        return ": use 'normal', 'anomaly' or '' (unlabelled)"
    return (
        " is a number, and numbers mean different things: here and in Deep SAD 1 is normal, in PyOD 1 is an anomaly, "
        "in scikit-learn -1 is an anomaly or unlabelled; use the words 'normal', 'anomaly' or '' (unlabelled)"
    )
