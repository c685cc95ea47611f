"""Scores of training images by detectors that never saw them: what labelled images can honestly be judged by.

A detector knows the images it was trained on: its labelled normal images score lower and its labelled anomalies higher
than others of their kind. Here the images are dealt into folds, and each fold is scored by a detector fitted on the
others. Folds come from detectors whose scales differ a little, so each is brought to one scale by what most of its
images are: those not labelled anomalies have median 0 and spread 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa.detectors.inputs import Images
from elsa.errors import UserError
from elsa.labels import ANOMALY, CODES, UNLABELLED, encode_labels
from elsa.progress import Progress, silent
from elsa.seeds import generator

FOLDS = 5
LEAST_PER_FOLD = 4  # not labelled anomalies, so that a median and a spread mean something
WORDS = {code: word for word, code in CODES.items()}

Build = Callable[[], Any]
"""Makes a detector that is not fitted yet, the same each time: `lambda: ElsaHead(seed=0)`."""


def crossfit_scores(
    images: Images,
    words: Sequence[str | None],
    build: Build,
    folds: int = FOLDS,
    seed: int = 0,
    progress: Progress = silent,
) -> NDArray[np.float64]:
    """One score per image by a detector fitted without it; higher is more anomalous."""
    code_N = encode_labels(words)
    fold_N = deal(code_N, folds, seed)
    score_N = np.empty(len(code_N))
    for fold in range(folds):
        inside = fold_N == fold
        score_N[inside] = scores_without(images, code_N, ~inside, inside, build)
        progress("cross-fit", fold + 1, folds, {})
    return score_N


def deal(code_N: Tensor, folds: int, seed: int) -> Tensor:
    """The fold of each image: drawn at random, and of every kind of label as many in one fold as in another."""
    least = folds * LEAST_PER_FOLD
    rest = int((code_N != ANOMALY).sum())
    if folds < 2 or rest < least:
        raise UserError(
            f"{rest} normal or unlabelled images in {folds} folds: at least 2 folds and {LEAST_PER_FOLD} images in "
            f"each are needed; use more images or fewer folds"
        )
    fold_N = torch.empty(len(code_N), dtype=torch.long)
    dealt = 0
    for code in sorted(WORDS):
        of_kind = (code_N == code).nonzero().flatten()
        shuffled = of_kind[torch.randperm(len(of_kind), generator=generator(seed, "crossfit", code + 1))]
        fold_N[shuffled] = (torch.arange(len(of_kind)) + dealt) % folds
        dealt += len(of_kind)  # the next kind goes on where this one ended: no fold is twice the larger one
    return fold_N


def scores_without(
    images: Images, code_N: Tensor, train_N: Tensor, scored_N: Tensor, build: Build
) -> NDArray[np.float64]:
    """Scores of some images by a detector fitted on others, on the scale of those scored that are not anomalies."""
    train, scored = train_N.nonzero().flatten(), scored_N.nonzero().flatten()
    detector = build().fit(images[train], [WORDS[code] for code in code_N[train].tolist()])
    score_B = detector.anomaly_score(images[scored]).double().cpu().numpy()
    return standardised(score_B, score_B[(code_N[scored] != ANOMALY).numpy()])


def standardised(scores: NDArray, reference: NDArray) -> NDArray[np.float64]:
    """Scores with the median of the reference at 0 and the middle 80% of it as wide as a standard normal's."""
    low, middle, high = np.quantile(reference, [0.1, 0.5, 0.9])
    return (scores - middle) / max(float(high - low) / 2.563, 1e-12)


def by_kind(scores: NDArray, words: Sequence[str | None]) -> tuple[NDArray, NDArray, NDArray]:
    """The scores of unlabelled images, labelled normal ones and labelled anomalies."""
    codes = encode_labels(words).numpy()
    return scores[codes == UNLABELLED], scores[codes == CODES["normal"]], scores[codes == ANOMALY]
