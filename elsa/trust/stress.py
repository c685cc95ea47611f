"""How the detector fares on a type of anomaly it was never shown, for each type among the labelled anomalies.

For each type a detector is fitted without any of its images and judged on them against labelled normal images it never
saw either. Beside it stands the detector that was shown the type, on the same images: the difference is what labels of
that type are worth, and the lowest figure is what to expect from the next type nobody thought of. Unlabelled images
stay as they are: should some of that type hide there, they are learned from as always, without a label.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from elsa.detectors.inputs import Images
from elsa.errors import UserError
from elsa.labels import ANOMALY, NORMAL, encode_labels
from elsa.progress import Progress, silent
from elsa.trust.crossfit import Build, deal, scores_without
from elsa.trust.learning_curve import MOST_UNLABELLED, thinned
from elsa.trust.metrics import Figure, evaluate

STRESS_FOLDS = 3  # one fit for each fold and type


@dataclass(frozen=True)
class StressRow:
    """One type of anomaly: how well it is found by a detector never shown it, and by one that was."""

    kind: str
    anomalies: int
    never_shown: Figure
    shown: Figure

    def line(self) -> str:
        """One line for people, in percent."""
        never, shown = self.never_shown.line(0.95), self.shown.line(0.95)
        return f"{self.kind} ({self.anomalies:,}): never shown {never}; shown {shown}"


def stress(
    images: Images,
    words: Sequence[str | None],
    kinds: Sequence[str | None],
    build: Build,
    seed: int = 0,
    *,
    folds: int = STRESS_FOLDS,
    most_unlabelled: int = MOST_UNLABELLED,
    progress: Progress = silent,
) -> list[StressRow]:
    """A row for each type among the labelled anomalies, the hardest first; anomalies without a type are only shown."""
    code_N = encode_labels(words)
    if len(kinds) != len(code_N):
        raise UserError(f"{len(kinds):,} kinds and {len(code_N):,} labels: give one kind (or '') for each image")
    kind_N = np.array([kind or "" for kind in kinds])
    counted = {
        str(kind): int((kind_N[(code_N == ANOMALY).numpy()] == kind).sum()) for kind in np.unique(kind_N) if kind
    }
    counted = {kind: count for kind, count in counted.items() if count}
    if not counted:
        raise UserError("no labelled anomaly has a type: give one in a column `kind` or `class` of the table of labels")
    images, code_N, kept = thinned(images, code_N, most_unlabelled, seed)
    kind_N = kind_N[kept.numpy()]
    fold_N = deal(code_N, folds, seed)
    rows = []
    steps = (len(counted) + 1) * folds

    def scores_of(hidden: NDArray, step: int) -> NDArray:
        score_N = np.empty(len(code_N))
        for fold in range(folds):
            inside, train = fold_N == fold, (fold_N != fold) & ~torch.from_numpy(hidden)
            score_N[inside] = scores_without(images, code_N, train, inside, build)
            progress("stress", step * folds + fold + 1, steps, {})
        return score_N

    anomaly_N, normal_N = (code_N == ANOMALY).numpy(), (code_N == NORMAL).numpy()
    shown_N = scores_of(np.zeros(len(code_N), dtype=bool), 0)
    for step, (kind, count) in enumerate(counted.items(), 1):
        of_kind = anomaly_N & (kind_N == kind)
        judged = of_kind | normal_N
        truth = ["anomaly" if is_anomaly else "normal" for is_anomaly in of_kind[judged]]
        never, shown = (
            evaluate(scores[judged], truth, seed=seed).auroc for scores in (scores_of(of_kind, step), shown_N)
        )
        rows.append(StressRow(kind, count, never, shown))
    return sorted(rows, key=lambda row: (row.never_shown.value is None, row.never_shown.value or 0.0))
