import doctest
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from elsa.errors import UserError
from elsa.trust import metrics
from elsa.trust.metrics import (
    anomalies_for_recall,
    auroc,
    average_precision,
    bootstrap_intervals,
    evaluate,
    fpr_at_recall,
)


def problem(anomalies: int, normals: int, shift: float = 1.0, decimals: int = 8, seed: int = 0):
    generator = np.random.default_rng(seed)
    a, n = shift + generator.standard_normal(anomalies), generator.standard_normal(normals)
    return a.round(decimals), n.round(decimals)


def labelled(a, n):
    return np.concatenate([a, n]), ["anomaly"] * len(a) + ["normal"] * len(n)


few_levels = st.lists(st.integers(0, 6), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(few_levels, few_levels)
def test_figures_agree_with_scikit_learn_however_many_ties(a, n):
    scores, truth = np.array(a + n, dtype=float), np.array([True] * len(a) + [False] * len(n))
    a, n = np.array(a, dtype=float), np.array(n, dtype=float)
    assert auroc(scores, truth) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert average_precision(a, n) == pytest.approx(average_precision_score(truth, scores), abs=1e-12)
    false, found, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert fpr_at_recall(a, n) == pytest.approx(false[found >= 0.95 - 1e-9].min(), abs=1e-12)


def test_a_higher_score_means_more_anomalous():
    assert auroc([0.1, 0.2, 0.9], np.array([False, False, True])) == 1
    assert auroc([0.1, 0.2, 0.9], np.array([True, True, False])) == 0
    assert auroc([5, 5, 5], np.array([True, False, False])) == 0.5


def test_auroc_refuses_label_codes_in_place_of_a_mask():
    with pytest.raises(AssertionError, match="mask"):
        auroc([1.0, 2.0], np.array([1, -1]))


def test_recall_of_95_percent_of_20_anomalies_is_19_of_them():
    a, n = np.arange(20.0), np.array([0.5, 1.0, 1.5])
    assert fpr_at_recall(a, n) == pytest.approx(2 / 3)  # threshold 1.0: the second lowest anomaly
    # .07 * 100 is 7.000000000000001, which must ask for 7
    assert fpr_at_recall(np.arange(100.0), np.array([92.5, 93.5]), recall=0.07) == 0.5


def test_evaluate_states_the_figures_and_leaves_unlabelled_images_out():
    a, n = problem(83, 211)
    scores, words = labelled(a, n)
    evaluation = evaluate(np.append(scores, [99.0, -99.0]), [*words, "", None])
    assert (evaluation.anomalies, evaluation.normals, evaluation.unlabelled) == (83, 211, 2)
    truth = np.array(words) == "anomaly"
    assert evaluation.auroc.value == pytest.approx(roc_auc_score(truth, scores))
    assert evaluation.aupr.value == pytest.approx(average_precision_score(truth, scores))
    assert evaluation.fpr_at_95_recall.value == fpr_at_recall(a, n)
    for figure in (evaluation.auroc, evaluation.aupr, evaluation.fpr_at_95_recall):
        assert 0 <= figure.low < figure.value < figure.high <= 1


def test_what_evaluate_prints():
    scores, words = labelled(np.arange(100.0, 130.0), np.arange(50.0))
    counted, auroc_line, aupr_line, fpr_line = evaluate(scores, words).lines()
    assert counted == "30 anomalies and 50 normal images (0 unlabelled left out)"
    assert auroc_line.startswith("AUROC: 100.0% (95% interval 8")
    assert auroc_line.endswith("to 100.0)")
    assert aupr_line.endswith("chance is 37.5%")
    assert fpr_line == (
        "FPR at 95% recall: not stated: it takes at least 72 labelled anomalies and 10 labelled normal images, "
        "there are 30 and 50; label 42 more labelled anomalies"
    )


@pytest.mark.parametrize(
    ("anomalies", "normals", "stated", "missing"),
    [
        (10, 10, {"auroc", "aupr"}, (62, 0)),
        (9, 10, set(), (63, 0)),
        (10, 9, set(), (62, 1)),
        (71, 10, {"auroc", "aupr"}, (1, 0)),
        (72, 10, {"auroc", "aupr", "fpr_at_95_recall"}, (0, 0)),
        (72, 9, set(), (0, 1)),
        (0, 5, set(), (72, 5)),
        (0, 0, set(), (72, 10)),
    ],
)
def test_figures_are_withheld_where_labels_are_too_few(anomalies, normals, stated, missing):
    figures = evaluate(*labelled(*problem(anomalies, normals))).to_dict()
    names = ("auroc", "aupr", "fpr_at_95_recall")
    assert {name for name in names if figures[name]["value"] is not None} == stated
    for name in set(names) - stated:
        assert figures[name]["low"] is None
        assert figures[name]["high"] is None
        assert f"there are {anomalies} and {normals}" in figures[name]["reason"]
    withheld = figures["fpr_at_95_recall"]
    assert (withheld["missing_anomalies"], withheld["missing_normals"]) == missing


def test_ten_of_each_kind_can_tell_a_perfect_ranking_from_a_coin_and_eight_cannot():
    lows = {k: bootstrap_intervals(np.ones(k), np.zeros(k), replicates=20_000)["auroc"][0] for k in (8, 10)}
    assert lows[8] < 0.5 < lows[10]


def test_the_least_number_of_anomalies_for_95_percent_recall():
    assert anomalies_for_recall(0.95) == 72
    for confidence in (0.8, 0.95, 0.99):
        n = anomalies_for_recall(confidence)
        assert 0.95**n <= (1 - confidence) / 2 < 0.95 ** (n - 1)


def test_below_that_number_the_interval_of_fpr_must_reach_100_percent():
    high = {n: bootstrap_intervals(np.ones(n), np.zeros(500), replicates=20_000)["fpr"][1] for n in (66, 80)}
    assert high[66] == 1
    assert high[80] < 0.05


@pytest.mark.parametrize(("above", "normals"), [(30, 30), (23, 30), (0, 30)])
def test_auroc_against_one_score_level_is_the_exact_interval_of_a_share(above, normals):
    # One anomaly level with so many copies that only the normals vary: AUROC is the share of normals below it.
    a, n = np.zeros(10**7), np.repeat([1.0, -1.0], [above, normals - above])
    low, high = bootstrap_intervals(a, n, replicates=20_000)["auroc"]
    below = normals - above
    exact = [
        beta.ppf(0.025, below, normals - below + 1) if below else 0,
        beta.ppf(0.975, below + 1, normals - below) if above else 1,
    ]
    np.testing.assert_allclose([low, high], exact, atol=4e-3)


def slow_replicate(a, n, wa, wn, unseen_anomaly, unseen_normal, worst):
    """AUROC, AUPR and FPR of weighted images, the unseen pair at the ends, summed image by image."""
    a, n = list(a), list(n)
    a.append(-math.inf if worst else math.inf)
    n.append(math.inf if worst else -math.inf)
    wa, wn = [*wa, unseen_anomaly], [*wn, unseen_normal]
    share = (len(a) - 1) / (len(a) + len(n) - 2)
    auroc = sum(
        x * y * ((s > t) + (s == t) / 2) for s, x in zip(a, wa, strict=True) for t, y in zip(n, wn, strict=True)
    )
    aupr, fpr = 0.0, 1.0
    for level in sorted(set(a), reverse=True):
        recall = sum(x for s, x in zip(a, wa, strict=True) if s >= level)
        before = sum(x for s, x in zip(a, wa, strict=True) if s > level)
        false = sum(y for t, y in zip(n, wn, strict=True) if t >= level)
        if level == -math.inf:
            aupr += (recall - before) * share
        elif worst:
            steps = before + (recall - before) * (np.arange(20_000) + 0.5) / 20_000
            aupr += (recall - before) * float((share * steps / (share * steps + (1 - share) * false)).mean())
        else:
            aupr += (recall - before) * share * recall / (share * recall + (1 - share) * false)
        if recall >= 0.95 and level > -math.inf:
            fpr = min(fpr, false)
    return auroc, aupr, fpr


@pytest.mark.parametrize("seed", range(6))
def test_replicates_match_their_definition_written_out_image_by_image(seed):
    a, n = problem(7, 11, decimals=seed % 3, seed=seed)
    counts_G, counts_B = metrics._bins(a, n)
    worst, best = metrics._replicates(counts_G, counts_B, 7 / 18, 3, np.random.default_rng(seed))
    generator = np.random.default_rng(seed)
    w_RG, unseen_anomaly = metrics._weights(counts_G, 3, generator)
    v_RB, unseen_normal = metrics._weights(counts_B, 3, generator)
    levels = np.unique(a)[::-1]
    for r in range(3):
        wa = [w_RG[r, g] / counts_G[g] for g in (np.searchsorted(-levels, -s) for s in a)]
        bins = [2 * np.searchsorted(-levels, -s) + (s in levels) for s in n]
        wn = [v_RB[r, b] / counts_B[b] for b in bins]
        for replicate, is_worst in ((worst[r], True), (best[r], False)):
            expected = slow_replicate(a, n, wa, wn, unseen_anomaly[r], unseen_normal[r], is_worst)
            np.testing.assert_allclose(replicate, expected, atol=1e-6)


def test_bins_count_every_image_once():
    counts_G, counts_B = metrics._bins(np.array([2.0, 5, 5]), np.array([9.0, 5, 5, 3, 2, 1, 0]))
    assert counts_G.tolist() == [2, 1]
    assert counts_B.tolist() == [1, 2, 1, 1, 2]  # above 5, at 5, between, at 2, below 2


def test_weights_are_a_bootstrap_of_all_images_and_one_unseen():
    weights, unseen = metrics._weights(np.array([3, 0, 1]), 50_000, np.random.default_rng(0))
    np.testing.assert_allclose(weights.sum(axis=1) + unseen, 1)
    np.testing.assert_allclose(weights.mean(axis=0), [3 / 5, 0, 1 / 5], atol=3e-3)
    assert weights[:, 0].var() == pytest.approx(3 * 2 / (25 * 6), rel=0.03)  # Beta(3, 2)


def test_intervals_depend_on_the_seed_alone_and_not_on_order():
    a, n = problem(41, 97)
    first = bootstrap_intervals(a, n, seed=3)
    assert first == bootstrap_intervals(a[::-1], np.roll(n, 7), seed=3)
    assert first != bootstrap_intervals(a, n, seed=4)


def test_chunks_of_replicates_are_all_counted(monkeypatch):
    a, n = problem(41, 97)
    whole = bootstrap_intervals(a, n, replicates=4000)
    drawn, replicates = [], metrics._replicates
    monkeypatch.setattr(metrics, "NUMBERS_PER_CHUNK", 83 * 7)
    monkeypatch.setattr(metrics, "_replicates", lambda *given: drawn.append(given[3]) or replicates(*given))
    for name, interval in bootstrap_intervals(a, n, replicates=4000).items():
        np.testing.assert_allclose(interval, whole[name], atol=0.02)
    assert max(drawn) == 7
    assert sum(drawn) == 4000


def test_more_confidence_is_a_wider_interval_and_more_images_a_narrower_one():
    a, n = problem(100, 100)
    narrow, wide = (bootstrap_intervals(a, n, confidence)["auroc"] for confidence in (0.8, 0.99))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    low, high = bootstrap_intervals(*problem(1600, 1600))["auroc"]
    assert 3 < (wide[1] - wide[0]) / (high - low) < 8  # 4 for the counts, and 99% against 95%


def test_snapping_a_large_set_to_5000_levels_leaves_its_intervals_alone(monkeypatch):
    a, n = problem(12_000, 9_000)
    snapped = bootstrap_intervals(a, n, replicates=200)
    levels_a, levels_n = metrics._snapped(a, n)
    monkeypatch.setattr(metrics, "MOST_LEVELS", 10**9)
    exact = bootstrap_intervals(a, n, replicates=200)
    for name in exact:
        # two Monte Carlo runs of 200 replicates differ by about a tenth of the width
        assert np.abs(np.subtract(exact[name], snapped[name])).max() < 0.25 * np.ptp(exact[name])
    assert len(np.unique(levels_a)) <= 5000
    for formula in (average_precision, fpr_at_recall, metrics._auroc):
        assert formula(levels_a, levels_n) == pytest.approx(formula(a, n), abs=5e-4)


def test_the_example_in_the_documentation_is_true():
    failed, tried = doctest.testfile(str(Path(__file__).parents[2] / "docs" / "metrics.md"), module_relative=False)
    assert failed == 0
    assert tried == 4


def test_bad_input_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"score nan at position 1 \(1 of 2 are not finite\)"):
        evaluate([1.0, math.nan], ["normal", "anomaly"])
    with pytest.raises(UserError, match="3 scores and 2 labels"):
        evaluate([1.0, 2.0, 3.0], ["normal", "anomaly"])
    with pytest.raises(UserError, match="label 1 at position 0 is a number"):
        evaluate([1.0], [1])
    for confidence in (0.2, 1.0, 95):
        with pytest.raises(UserError, match=f"confidence={confidence}"):
            evaluate([1.0], ["normal"], confidence=confidence)
