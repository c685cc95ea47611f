import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom

from elsa.errors import UserError
from elsa.trust.contamination import (
    BENDS,
    Contamination,
    _binned,
    audited_contamination,
    bent,
    estimate_contamination,
    likelihood_of_rates,
    suspects,
)


def polluted(rate, shift, seed, images=2003, normals=53, anomalies=47):
    """Scores of unlabelled images, of labelled normal ones and of labelled anomalies."""
    draw = np.random.default_rng(seed)
    hidden = round(rate * images)
    unlabelled = np.concatenate([draw.standard_normal(images - hidden), shift + draw.standard_normal(hidden)])
    return unlabelled, draw.standard_normal(normals), shift + draw.standard_normal(anomalies)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.2])
def test_kinds_that_do_not_overlap_are_counted(rate):
    found = estimate_contamination(*polluted(rate, 30.0, seed=0))
    assert found.rate == pytest.approx(rate, abs=0.02)
    assert found.low <= rate <= found.high
    assert found.high - found.low < 0.07


@pytest.mark.parametrize(("rate", "most_width"), [(0.0, 0.02), (0.02, 0.06), (0.1, 0.12), (0.4, 0.3)])
def test_the_interval_covers_what_hides(rate, most_width):
    """Six sets here; a hundred in benchmarks/trust.py."""
    found = [estimate_contamination(*polluted(rate, 2.7, seed)) for seed in range(6)]
    assert sum(one.low <= rate <= one.high for one in found) >= 5
    assert np.mean([one.high - one.low for one in found]) < most_width
    assert np.mean([one.rate for one in found]) == pytest.approx(rate, abs=0.02)


def test_scores_that_tell_nothing_apart_leave_everything_possible():
    found = estimate_contamination(*polluted(0.1, 0.0, seed=1))
    assert found.low < 0.02
    assert found.high > 0.9


def by_hand(rate, slope, unlabelled, normals, anomalies):
    """Log-likelihood of one rate and slope, score by score, with the offset found by bisection."""

    def p(a, s):
        return 1 / (1 + math.exp(-(a + slope * s)))

    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        if sum(p(middle, s) for s in unlabelled) / len(unlabelled) < rate:
            low = middle
        else:
            high = middle
    total = sum(math.log(p(low, s) / rate) for s in anomalies)
    return total + sum(math.log((1 - p(low, s)) / (1 - rate)) for s in normals)


def test_the_likelihood_is_that_of_its_definition(monkeypatch):
    """Scores of which the middle 80% spread as a standard normal's do, and the median is 0: as they are inside."""
    monkeypatch.setattr("elsa.trust.contamination.SLOPES", np.array([1.7]))
    monkeypatch.setattr("elsa.trust.contamination.BENDS", (0.0,))
    draw = np.random.default_rng(3)
    unlabelled = draw.standard_normal(31)
    low, middle, high = np.quantile(unlabelled, [0.1, 0.5, 0.9])
    unlabelled = (unlabelled - middle) / ((high - low) / 2.563)
    normals, anomalies = draw.standard_normal(11), 1 + draw.standard_normal(13)
    rates, gains, _ = likelihood_of_rates(unlabelled, normals, anomalies)
    for place in (60, 120, 160, 175):
        expected = by_hand(rates[place], 1.7, unlabelled, normals, anomalies)
        assert gains[place] == pytest.approx(expected, abs=0.15)  # between offsets it is interpolated


def test_scale_and_order_do_not_matter():
    unlabelled, normals, anomalies = polluted(0.07, 2.7, seed=2)
    found = estimate_contamination(unlabelled, normals, anomalies)
    moved = estimate_contamination(*(17 + 3 * scores[::-1] for scores in (unlabelled, normals, anomalies)))
    for name in ("rate", "low", "high"):
        assert getattr(found, name) == pytest.approx(getattr(moved, name), abs=1e-6)


def test_more_labels_make_a_narrower_interval():
    few = estimate_contamination(*polluted(0.1, 2.7, 4, normals=23, anomalies=23))
    many = estimate_contamination(*polluted(0.1, 2.7, 4, normals=503, anomalies=503))
    assert many.high - many.low < 0.6 * (few.high - few.low)


def test_a_higher_confidence_is_a_wider_interval():
    scores = polluted(0.1, 2.7, 5)
    narrow, wide = (estimate_contamination(*scores, confidence=c) for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.rate < narrow.high < wide.high


def test_bins_hold_every_score_once_and_the_highest_alone():
    scores = np.random.default_rng(0).gumbel(size=5003)
    means, weights = _binned(scores)
    assert weights.sum() == pytest.approx(1)
    assert means @ weights == pytest.approx(scores.mean())
    assert (np.diff(means) > 0).all()
    assert means[-1] == scores.max()
    assert weights[-20:] == pytest.approx(np.full(20, 1 / 5003))
    assert len(means) < 400


@pytest.mark.parametrize("bend", BENDS)
def test_a_bend_keeps_the_order_and_the_slope_at_zero(bend):
    scores = np.linspace(-19, 19, 77)
    assert (np.diff(bent(scores, bend)) > 0).all()
    assert bent(np.array([0.0]), bend)[0] == 0
    assert bent(np.array([1e-5]), bend)[0] == pytest.approx(1e-5, rel=1e-4)


def test_too_few_labels_say_what_is_missing_and_claim_no_upper_limit():
    unlabelled, normals, anomalies = polluted(0.2, 6.0, seed=8)
    nothing = estimate_contamination(unlabelled, normals[:7], anomalies)
    assert (nothing.rate, nothing.low, nothing.high) == (None, 0.0, 1.0)
    assert "3 more normal" in nothing.how
    assert "not known" in nothing.line()
    lower = estimate_contamination(unlabelled, normals, anomalies[:4])
    assert 0.1 < lower.low <= 0.2 < lower.high == 1.0
    assert "6 more labelled anomalies" in lower.how
    assert estimate_contamination(unlabelled, normals, anomalies, representative=False).low == lower.low


def test_the_lower_limit_without_anomalies_holds_whatever_normal_scores_look_like():
    draw = np.random.default_rng(7)
    low = [estimate_contamination(scores[100:], scores[:100], []).low for scores in draw.standard_cauchy((400, 1100))]
    assert np.mean(np.array(low) > 0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert np.mean(np.array(low) > 0) > 0.01  # and is not merely zero


def test_an_empty_pile_and_scores_that_are_no_numbers_are_refused():
    with pytest.raises(UserError, match="no unlabelled images"):
        estimate_contamination([], [1.0] * 20, [2.0] * 20)
    with pytest.raises(AssertionError, match="not finite"):
        estimate_contamination([math.nan], [1.0] * 20, [2.0] * 20)


def test_the_line_says_rate_interval_and_what_it_rests_on():
    line = Contamination(0.05, 0.021, 0.083, "from 50 labels").line()
    assert line == "hidden anomalies: 5.0% of the unlabelled images (95% interval 2.1% to 8.3%); from 50 labels"


def test_an_audit_of_everything_leaves_no_doubt():
    found = audited_contamination(7, 41, 41)
    assert (found.rate, found.low, found.high) == (7 / 41, 7 / 41, 7 / 41)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.data())
def test_the_audit_interval_covers_every_number_of_hidden_anomalies(unlabelled, data):
    """Exactly, from the chances of each outcome."""
    hidden = data.draw(st.integers(0, unlabelled))
    audited = data.draw(st.integers(1, unlabelled))
    covered = 0.0
    for seen in range(max(0, audited - (unlabelled - hidden)), min(audited, hidden) + 1):
        found = audited_contamination(seen, audited, unlabelled)
        if found.low <= hidden / unlabelled <= found.high:
            covered += hypergeom.pmf(seen, unlabelled, hidden, audited)
    assert covered >= 0.95 - 1e-9


def test_an_audit_by_hand():
    """No anomaly in 10 of 100: 30 hidden ones would all be missed with a chance of 2.3%, 29 with one of 2.6%."""
    assert audited_contamination(0, 10, 100).high == 0.29
    assert audited_contamination(0, 10, 100).low == 0
    assert audited_contamination(0, 0, 100).high == 1


@pytest.mark.parametrize("numbers", [(3, 2, 10), (-1, 5, 10), (1, 11, 10), (0, 0, 0)])
def test_an_audit_that_cannot_be_is_refused(numbers):
    with pytest.raises(UserError, match="audited"):
        audited_contamination(*numbers)


def test_suspects_are_the_highest_unlabelled_scores_as_many_as_the_rate_says():
    scores = [5.0, 9.0, 1.0, 7.0, 8.0, 7.0, 0.0]
    words = ["", "anomaly", "", "", "normal", None, ""]
    assert suspects(scores, words, 0.4).tolist() == [3, 5]  # of a tie the earlier one
    assert suspects(scores, words, 1.0).tolist() == [3, 5, 0, 2, 6]
    assert suspects(scores, words, 0.0).tolist() == []
    with pytest.raises(UserError, match="rate=5"):
        suspects(scores, words, 5)
    with pytest.raises(UserError, match="6 labels"):
        suspects(scores, words[1:], 0.1)
