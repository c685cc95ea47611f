"""The shallow rows as published: tuned with labels of a tenth of the test set. They explain figures and are not to use.

Deep SAD's experiments, from which the paper takes these rows, choose the width of the RBF kernel by the AUROC on a
tenth of the test images (stratified) and then report the AUROC on all of them. This file alone in the project does so.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import IsolationForest
from sklearn.svm import OneClassSVM
from torch import Tensor

from elsa.bench.plans import AS_PUBLISHED
from elsa.detectors.shallow import log_density, squared_distances
from elsa.detectors.ssad import SSADConfig, solve_dual
from elsa.errors import UserError
from elsa.trust.metrics import auroc

SHARE_SEEN = 0.1
GAMMAS = [2.0**power for power in range(-7, 3)]
BANDWIDTHS = [2 ** (0.5 + 0.5 * step) for step in range(10)]
FOLDS = 5
SELECTED_BY = "labels of a tenth of the test set"
BATCH = 2000  # test images whose distances to all training images are held at once


def score_as_published(
    detector: str,
    images: Tensor,
    labels: list[str],
    test_images: Tensor,
    is_anomaly: np.ndarray,
    seed: int,
    device: str,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Scores of the test images and what was chosen how; `is_anomaly` are the test labels that are looked at."""
    if detector not in SHALLOW:
        raise UserError(f"detector {detector} has no variant {AS_PUBLISHED!r}: use one of {', '.join(SHALLOW)}")
    rows, test = (x.flatten(1).to(device).double() / 255 for x in (images, test_images))
    seen = stratified_tenth(is_anomaly, seed)
    return SHALLOW[detector](rows, labels, test, is_anomaly, seen, seed)


def stratified_tenth(is_anomaly: np.ndarray, seed: int) -> np.ndarray:
    """Positions of a tenth of the normal and a tenth of the anomalous test images."""
    order = np.random.default_rng([seed, 1]).permutation(len(is_anomaly))
    parts = [order[is_anomaly[order] == kind] for kind in (False, True)]
    return np.concatenate([part[: int(SHARE_SEEN * len(part))] for part in parts])


def best_by_seen(
    candidates: list[float], score: Callable[[float], np.ndarray], is_anomaly: np.ndarray, seen: np.ndarray
) -> tuple[float, np.ndarray]:
    """The candidate with the highest AUROC on the seen test images (the first of equals), and its scores of all."""
    scored = [(candidate, score(candidate)) for candidate in candidates]
    return max(scored, key=lambda pair: auroc(pair[1][seen], is_anomaly[seen]))


def _oc_svm(
    rows: Tensor, labels: list[str], test: Tensor, is_anomaly: np.ndarray, seen: np.ndarray, seed: int
) -> tuple[np.ndarray, dict[str, Any]]:
    rows = rows[_may_be_normal(labels)]
    distances, to_test = squared_distances(rows, rows), _to_test(test, rows)

    def score(gamma: float) -> np.ndarray:
        svm = OneClassSVM(kernel="precomputed", nu=0.1, cache_size=500).fit(torch.exp(-gamma * distances).cpu().numpy())
        return -svm.decision_function(torch.exp(-gamma * to_test).cpu().numpy())

    gamma, scores = best_by_seen(GAMMAS, score, is_anomaly, seen)
    return scores, {"nu": 0.1, "gamma": gamma, "selected by": SELECTED_BY}


def _ssad(
    rows: Tensor, labels: list[str], test: Tensor, is_anomaly: np.ndarray, seen: np.ndarray, seed: int
) -> tuple[np.ndarray, dict[str, Any]]:
    kinds = np.array(labels)
    y = torch.from_numpy(np.where(kinds == "anomaly", -1.0, 1.0)).to(rows.device)
    is_labelled = torch.from_numpy(kinds != "").to(rows.device)
    upper = torch.ones_like(y)  # the published code leaves every C at 1, so nu has no part in it
    distances, to_test = squared_distances(rows, rows), _to_test(test, rows)
    kappa = SSADConfig().kappa

    def score(gamma: float) -> np.ndarray:
        alpha, rho = solve_dual(torch.exp(-gamma * distances), y, is_labelled, upper, kappa)
        return (rho - torch.exp(-gamma * to_test) @ (alpha * y)).cpu().numpy()

    gamma, scores = best_by_seen(GAMMAS, score, is_anomaly, seen)
    return scores, {"kappa": kappa, "C": 1.0, "gamma": gamma, "selected by": SELECTED_BY}


def _isolation_forest(
    rows: Tensor, labels: list[str], test: Tensor, is_anomaly: np.ndarray, seen: np.ndarray, seed: int
) -> tuple[np.ndarray, dict[str, Any]]:
    forest = IsolationForest(n_estimators=100, random_state=seed)
    forest.fit(rows[_may_be_normal(labels)].float().cpu().numpy())
    return -forest.score_samples(test.float().cpu().numpy()), {"num_trees": 100, "selected by": "nothing to select"}


def _kde(
    rows: Tensor, labels: list[str], test: Tensor, is_anomaly: np.ndarray, seen: np.ndarray, seed: int
) -> tuple[np.ndarray, dict[str, Any]]:
    rows = rows[_may_be_normal(labels)]
    distances = squared_distances(rows, rows)
    bandwidth = max(BANDWIDTHS, key=lambda width: cross_validated(distances, width, rows.shape[1], seed))
    scores = -log_density(_to_test(test, rows), bandwidth, len(rows), rows.shape[1])
    return scores.cpu().numpy(), {"bandwidth": bandwidth, "selected by": f"{FOLDS}-fold cross-validation"}


def cross_validated(distances_NN: Tensor, bandwidth: float, num_features: int, seed: int) -> float:
    """Mean log density of each of five parts given the other four."""
    order = torch.from_numpy(np.random.default_rng([seed, 2]).permutation(len(distances_NN))).to(distances_NN.device)
    total = 0.0
    for part in order.chunk(FOLDS):
        rest = order[~torch.isin(order, part)]
        total += float(log_density(distances_NN[part][:, rest], bandwidth, len(rest), num_features).sum())
    return total / len(distances_NN)


def _may_be_normal(labels: list[str]) -> Tensor:
    return torch.tensor([word != "anomaly" for word in labels])


def _to_test(test: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([squared_distances(part, rows) for part in test.split(BATCH)])


SHALLOW: dict[str, Callable[..., tuple[np.ndarray, dict[str, Any]]]] = {
    "oc-svm": _oc_svm,
    "isolation-forest": _isolation_forest,
    "kde": _kde,
    "ssad": _ssad,
}
