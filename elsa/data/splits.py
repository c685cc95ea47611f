"""The contaminated one-class split of the paper's protocols, as a pure function of (classes, normal class, seed)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsa.errors import UserError


@dataclass(frozen=True)
class Split:
    """The training set of one run: X_n, X_u with its hidden anomalies, then X_a."""

    index: NDArray[np.int64]
    """Positions in the data set; none occurs twice."""
    labels: list[str]
    """'normal', '' or 'anomaly' for each position."""
    hidden: NDArray[np.bool_]
    """True where an unlabelled image is an anomaly; for evaluation only, a detector must never see it."""


@dataclass(frozen=True)
class GroupSizes:
    labelled_normals: int
    labelled_anomalies: int
    hidden_anomalies: int


def group_sizes(normals: int, gamma_l: float, gamma_p: float) -> GroupSizes:
    """Sizes that use every normal image, with gamma_l of the whole set labelled and gamma_p of X_u hidden anomalies."""
    total = normals / (gamma_l + (1 - 2 * gamma_l) * (1 - gamma_p))
    labelled = round(gamma_l * total)
    return GroupSizes(labelled, labelled, round(gamma_p * (1 - 2 * gamma_l) * total))


def one_class_split(
    class_ids: Sequence[int] | NDArray[np.integer],
    normal: int,
    labelled: int | None,
    gamma_l: float,
    gamma_p: float,
    seed: int,
) -> Split:
    """X_n and X_u with its hidden anomalies, drawn without a look at `labelled`; X_a from what is left of that class.

    A larger gamma_l hides a prefix of the anomalies that gamma_l 0 hides and X_a avoids all of those, so that one
    pre-training on the gamma_l 0 set serves every gamma_l and every labelled class without having seen X_a.
    """
    classes = np.asarray(class_ids)
    _check(classes, normal, labelled, gamma_l, gamma_p)
    rng = np.random.default_rng([seed, normal])
    normals = rng.permutation(np.flatnonzero(classes == normal))
    anomalies = rng.permutation(np.flatnonzero(classes != normal))

    sizes = group_sizes(len(normals), gamma_l, gamma_p)
    most_hidden = group_sizes(len(normals), 0.0, gamma_p).hidden_anomalies
    if most_hidden > len(anomalies):
        raise UserError(
            f"gamma_p={gamma_p} hides {most_hidden} anomalies among {len(normals)} normals, and the data set has "
            f"{len(anomalies)}; use a smaller gamma_p"
        )
    # From the end of the permutation: X_a then hardly changes with gamma_p, and pollutions are compared like with like.
    left = anomalies[most_hidden:][::-1]
    known = left[classes[left] == labelled] if labelled is not None else left[:0]
    if sizes.labelled_anomalies > len(known):
        raise UserError(
            f"gamma_l={gamma_l} needs {sizes.labelled_anomalies} labelled anomalies of class {labelled}, and "
            f"{len(known)} are left beside the hidden ones; use a smaller gamma_l"
        )
    hidden, known = anomalies[: sizes.hidden_anomalies], known[: sizes.labelled_anomalies]
    num_unlabelled = len(normals) - sizes.labelled_normals
    return Split(
        index=np.concatenate([normals, hidden, known]),
        labels=["normal"] * sizes.labelled_normals + [""] * (num_unlabelled + len(hidden)) + ["anomaly"] * len(known),
        hidden=np.repeat([False, True, False], [len(normals), len(hidden), len(known)]),
    )


def _check(classes: NDArray, normal: int, labelled: int | None, gamma_l: float, gamma_p: float) -> None:
    if not 0 <= gamma_l < 0.5:
        raise UserError(f"gamma_l={gamma_l}: the share of each kind of label must lie in [0, 0.5)")
    if not 0 <= gamma_p < 1:
        raise UserError(f"gamma_p={gamma_p}: the share of hidden anomalies must lie in [0, 1)")
    if (labelled is None) != (gamma_l == 0):
        raise UserError(
            f"labelled={labelled} with gamma_l={gamma_l}: give a labelled class if, and only if, gamma_l > 0"
        )
    if labelled == normal:
        raise UserError(f"labelled={labelled} is the normal class; labelled anomalies come from another class")
    for role, wanted in (("normal", normal), ("labelled", labelled)):
        if wanted is not None and not (classes == wanted).any():
            raise UserError(f"{role}={wanted} does not occur among the classes {np.unique(classes).tolist()}")
