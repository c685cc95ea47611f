"""With a detector of one number, so that what it was fitted on can be read off its scores."""

from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch

from elsa.detectors.vectors import LogisticDetector
from elsa.errors import UserError
from elsa.labels import ANOMALY, NORMAL, UNLABELLED, encode_labels
from elsa.trust.contamination import estimate_contamination, suspects
from elsa.trust.crossfit import by_kind, crossfit_scores, deal, standardised
from elsa.trust.learning_curve import (
    CurvePoint,
    label_counts,
    learned_from,
    learning_curve,
    paired_gain,
    thinned,
    will_more_labels_help,
    wins,
)
from elsa.trust.metrics import Figure, auroc
from elsa.trust.stress import stress

KINDS = ("ring", "spot", "crack")


class Means:
    """Distance to the mean of normal and unlabelled vectors, less that to the mean of labelled anomalies."""

    fits: ClassVar[list[tuple[torch.Tensor, list[str]]]] = []

    def fit(self, vectors, words):
        Means.fits.append((vectors, words))
        code = encode_labels(words)
        self.normal = vectors[code != ANOMALY].mean(dim=0)
        self.anomaly = vectors[code == ANOMALY].mean(dim=0) if (code == ANOMALY).any() else None
        return self

    def anomaly_score(self, vectors):
        far = (vectors - self.normal).norm(dim=1)
        return far if self.anomaly is None else far - (vectors - self.anomaly).norm(dim=1)


class Memory(Means):
    """Zero for images it was fitted on, one for all others."""

    def anomaly_score(self, vectors):
        return 1 - torch.cdist(vectors, Means.fits[-1][0]).min(dim=1).values.lt(1e-6).double()


@pytest.fixture(autouse=True)
def _forget():
    Means.fits.clear()


def pile(unlabelled=307, hidden=31, normals=43, per_kind=13, far=3.0, axes=3):
    """Vectors of 7 numbers, words and kinds; each kind of anomaly lies along its own axis."""
    draw = torch.Generator().manual_seed(0)

    def vectors(count):
        return torch.randn(count, 7, generator=draw)

    anomalies = len(KINDS) * per_kind
    z = vectors(unlabelled + hidden + normals + anomalies)
    axis = torch.cat([torch.arange(hidden), torch.arange(anomalies)]) % axes
    rows = torch.cat([torch.arange(unlabelled, unlabelled + hidden), torch.arange(len(z) - anomalies, len(z))])
    z[rows, axis] += far
    words = [""] * (unlabelled + hidden) + ["normal"] * normals + ["anomaly"] * anomalies
    kinds = [""] * (len(z) - anomalies) + [KINDS[k % len(KINDS)] for k in range(anomalies)]
    return z, words, kinds


def test_no_image_is_scored_by_a_detector_that_saw_it():
    z, words, _ = pile()
    scores = crossfit_scores(z, words, Memory, folds=3)
    assert len(Means.fits) == 3
    assert (scores == 0).all()  # all are one, and the median of each fold becomes zero


def test_every_kind_of_label_is_dealt_evenly():
    code = encode_labels(pile()[1])
    fold = deal(code, 5, seed=0)
    for kind in (ANOMALY, UNLABELLED, NORMAL):
        counts = torch.bincount(fold[code == kind], minlength=5)
        assert counts.max() - counts.min() <= 1
    assert torch.bincount(fold).max() - torch.bincount(fold).min() <= 1
    assert not torch.equal(fold, deal(code, 5, seed=1))
    assert torch.equal(fold, deal(code, 5, seed=0))


def test_too_few_images_for_the_folds_are_refused():
    with pytest.raises(UserError, match="19 normal or unlabelled images in 5 folds"):
        deal(encode_labels(["normal"] * 19 + ["anomaly"] * 30), 5, seed=0)
    with pytest.raises(UserError, match="at least 2 folds"):
        deal(encode_labels(["normal"] * 19), 1, seed=0)


def test_scores_are_brought_to_one_scale():
    reference = np.random.default_rng(0).standard_normal(100_003)
    assert standardised(5 + 3 * reference, 5 + 3 * reference).std() == pytest.approx(1, abs=0.01)
    assert standardised(np.array([5.0, 8.0]), 5 + 3 * reference) == pytest.approx([0, 1], abs=0.02)
    assert np.isfinite(standardised(np.array([1.0, 2.0]), np.ones(7))).all()


def test_training_on_an_image_makes_it_look_tamer_and_cross_fitting_does_not():
    z, words, _ = pile(normals=17, per_kind=5, far=1.0)
    anomaly, labelled = np.array(words) == "anomaly", np.array(words) != ""
    flattered = LogisticDetector().fit(z, words).anomaly_score(z).numpy()
    honest = crossfit_scores(z, words, LogisticDetector)
    assert auroc(flattered[labelled], anomaly[labelled]) > auroc(honest[labelled], anomaly[labelled]) + 0.05


def test_contamination_and_suspects_from_vectors():
    z, words, _ = pile(unlabelled=903, hidden=97, normals=43, per_kind=13, far=6.0)
    scores = crossfit_scores(z, words, Means)
    found = estimate_contamination(*by_kind(scores, words))
    assert found.low <= 0.097 <= found.high
    assert found.high - found.low < 0.15
    named = suspects(scores, words, found.rate)
    assert np.mean((named >= 903) & (named < 1000)) > 0.6


def test_by_kind_sorts_scores_by_their_words():
    unlabelled, normal, anomaly = by_kind(np.arange(4.0), ["anomaly", "", "normal", None])
    assert (unlabelled.tolist(), normal.tolist(), anomaly.tolist()) == ([1, 3], [2], [0])


def test_a_curve_rises_where_labels_teach_and_says_by_how_much():
    z, words, _ = pile(far=2.5, axes=1)
    curve = learning_curve(z, words, [0, 12, 60], Means)
    assert [point.labels for point in curve] == [0, 12, 60]
    assert curve[0].gain is None
    for before, after in pairwise(curve):
        assert after.gain == pytest.approx(after.auroc.value - before.auroc.value)
        assert after.gain_low < after.gain < after.gain_high
    assert curve[-1].auroc.value > curve[0].auroc.value
    assert "60 labels: AUROC" in curve[-1].line()


def test_more_labels_lie_around_fewer_and_none_of_the_fold_is_among_them():
    code = encode_labels(pile()[1])
    fold = deal(code, 5, seed=0)
    some, more = (learned_from(code, fold, 2, count, seed=0) for count in (10, 37))
    assert (some <= more).all()
    assert not more[fold == 2].any()
    labelled = code != UNLABELLED
    assert (more & labelled).sum() == 37
    assert (more & ~labelled).sum() == ((fold != 2) & ~labelled).sum()
    share = (code == ANOMALY).sum() / labelled.sum()
    assert (more & (code == ANOMALY)).sum() == pytest.approx(37 * share, abs=1)


def test_labels_not_yet_used_are_not_taken_for_unlabelled_images():
    z, words, _ = pile()
    learning_curve(z, words, [0], Means, folds=2)
    assert all(set(given) == {""} for _, given in Means.fits)
    hidden_and_normal = 307 + 31
    assert all(len(given) <= hidden_and_normal / 2 + 1 for _, given in Means.fits)


def test_a_curve_without_enough_labels_says_what_is_missing():
    z, words, _ = pile(per_kind=2)
    curve = learning_curve(z, words, None, Means, folds=2)
    assert curve[-1].auroc.value is None
    assert curve[-1].gain is None
    assert "4 more labelled anomalies" in will_more_labels_help(curve)


def test_counts_beyond_the_labels_are_refused():
    z, words, _ = pile()
    with pytest.raises(UserError, match="from 0 to 65 are allowed"):
        learning_curve(z, words, [70], Means)
    assert label_counts(65) == [0, 16, 32, 65]
    assert label_counts(1) == [0, 1]


def test_thinning_keeps_every_label():
    z, words, _ = pile()
    kept_z, kept_code, kept = thinned(z, encode_labels(words), 50, seed=0)
    assert (kept_code == UNLABELLED).sum() == 50
    assert (kept_code != UNLABELLED).sum() == 43 + 39
    assert torch.equal(kept_z, z[kept])
    assert torch.equal(kept_code, encode_labels(words)[kept])


def test_wins_average_to_the_auroc():
    scores = np.array([3.0, 1.0, 2.0, 2.0, 0.0, 5.0])
    is_anomaly = np.array([True, False, True, False, False, False])
    assert wins(scores, is_anomaly).shape == (2, 4)
    assert wins(scores, is_anomaly).mean() == auroc(scores, is_anomaly)


def test_a_gain_is_paired_so_that_what_both_share_does_not_blur_it():
    draw = np.random.default_rng(0)
    is_anomaly = np.arange(101) < 41
    before = draw.standard_normal(101) + is_anomaly
    gain, low, high = paired_gain(before, before + 0.8 * is_anomaly, is_anomaly, seed=0)
    expected = auroc(before + 0.8 * is_anomaly, is_anomaly) - auroc(before, is_anomaly)
    assert gain == pytest.approx(expected)
    assert 0 < low < gain < high
    assert paired_gain(before, before, is_anomaly, seed=0) == (0, 0, 0)
    backwards = paired_gain(before + 0.8 * is_anomaly, before, is_anomaly, seed=0)
    assert backwards == pytest.approx((-gain, -high, -low), abs=0.01)


def test_the_interval_of_a_gain_covers_the_true_gain():
    draw = np.random.default_rng(1)
    is_anomaly = np.arange(60) < 30
    covered = 0
    for trial in range(200):
        before = draw.standard_normal(60) + is_anomaly
        after = before + draw.standard_normal(60)  # AUROC falls from .760 to .691
        _, low, high = paired_gain(before, after, is_anomaly, seed=trial)
        covered += low <= 0.6915 - 0.7602 <= high
    assert covered >= 180


def point(value, gain=None, low=None, high=None):
    auroc = Figure("AUROC", value, 0.5, 0.9, None if value else "too few")
    return CurvePoint(30, auroc, gain, low, high)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (point(0.8, 0.05, 0.01, 0.09), "It still rises: from 30 to 30 labels the AUROC changed by +5.0"),
        (point(0.8, 0.05, -0.01, 0.09), "No rise can be shown"),
        (point(0.8, -0.05, -0.09, -0.01), "It falls"),
        (point(0.8), "at least two numbers"),
        (point(None), "Not known: too few"),
    ],
)
def test_the_answer_claims_no_more_than_the_last_step(last, said):
    assert said in will_more_labels_help([point(0.7), last])


def test_a_type_never_shown_is_found_worse_than_one_that_was():
    z, words, kinds = pile(far=3.0)
    rows = stress(z, words, kinds, Means)
    assert sorted(row.kind for row in rows) == sorted(KINDS)
    assert [row.never_shown.value for row in rows] == sorted(row.never_shown.value for row in rows)
    for row in rows:
        assert row.anomalies == 13
        assert row.never_shown.low < row.never_shown.value < row.never_shown.high
        assert row.shown.value > row.never_shown.value
        assert f"{row.kind} (13): never shown AUROC" in row.line()


def test_a_type_is_hidden_from_every_fit_that_judges_it():
    z, words, kinds = pile()
    stress(z, words, kinds, Means, folds=2)
    assert len(Means.fits) == 2 * (1 + len(KINDS))
    anomalies = [len([w for w in given if w == "anomaly"]) for _, given in Means.fits]
    assert sum(anomalies[:2]) == 39
    for step in (2, 4, 6):
        assert sum(anomalies[step : step + 2]) == 26


def test_kinds_of_the_unlabelled_and_of_normal_images_make_no_row():
    z, words, kinds = pile()
    kinds = ["bolt" if word != "anomaly" else kind for word, kind in zip(words, kinds, strict=True)]
    assert {row.kind for row in stress(z, words, kinds, Means, folds=2)} == set(KINDS)


def test_types_with_few_images_state_no_figure():
    z, words, kinds = pile(per_kind=5)
    for row in stress(z, words, kinds, Means, folds=2):
        assert row.never_shown.value is None
        assert row.never_shown.missing_anomalies == 5


def test_stress_without_types_is_refused():
    z, words, kinds = pile()
    with pytest.raises(UserError, match="column `kind`"):
        stress(z, words, [""] * len(words), Means)
    with pytest.raises(UserError, match="3 kinds"):
        stress(z, words, kinds[:3], Means)
