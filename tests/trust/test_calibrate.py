import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elsa.errors import UserError
from elsa.trust.calibrate import (
    discoveries,
    discovery_threshold,
    false_alarm_range,
    false_alarms_if_polluted,
    least_discoveries,
    lowest_false_alarms,
    p_values,
    score_threshold,
    verdicts,
)

few_levels = st.lists(st.integers(0, 9), min_size=1, max_size=60)


def test_p_value_by_hand():
    calibration = torch.tensor([3.0, 1.0, 2.0, 2.0])
    p = p_values(torch.tensor([4.0, 3.0, 2.5, 2.0, 1.0, 0.0]), calibration)
    assert p.tolist() == [
        1 / 5,
        2 / 5,
        2 / 5,
        4 / 5,
        5 / 5,
        5 / 5,
    ]  # an equal calibration score counts against the alarm


@settings(max_examples=200, deadline=None, derandomize=True)
@given(few_levels, few_levels, st.floats(0.02, 0.98))
def test_a_score_above_the_threshold_is_exactly_a_p_value_within_the_rate(calibration, scores, rate):
    calibration, scores = torch.tensor(calibration).float(), torch.tensor(scores).float()
    if rate < lowest_false_alarms(len(calibration)):
        with pytest.raises(UserError, match="--false-alarms"):
            score_threshold(calibration, rate)
        return
    words = verdicts(scores, score_threshold(calibration, rate))
    assert [word == "anomaly" for word in words] == (p_values(scores, calibration) <= rate).tolist()


@pytest.mark.parametrize("rate", [k / 100 for k in range(1, 100)])
def test_rates_that_floats_cannot_hold_are_met_in_full(rate):
    # .29 * 100 is 28.999...: truncating it would waste one alarm
    calibration = torch.arange(99.0)
    assert score_threshold(calibration, rate) == 99 - round(100 * rate)


@pytest.mark.parametrize("levels", [None, 5])
def test_p_values_of_normal_images_are_super_uniform(levels):
    generator = np.random.default_rng(0)
    p = []
    for _ in range(2000):
        draws = generator.gumbel(size=40)
        draws = draws if levels is None else draws.round().clip(0, levels)  # ties
        p.append(p_values(torch.from_numpy(draws[:1]), torch.from_numpy(draws[1:])).item())
    for rate in (0.025, 0.05, 0.1, 0.3, 0.5, 0.8):
        share = np.mean(np.array(p) <= rate)
        assert share <= rate + 3 * math.sqrt(rate * (1 - rate) / 2000)
        if levels is None:  # and not wastefully so
            assert share >= rate - 3 * math.sqrt(rate * (1 - rate) / 2000)


def test_hidden_anomalies_in_the_calibration_set_make_p_values_larger():
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(90, generator=generator)
    polluted = torch.cat([clean, 3 + torch.randn(10, generator=generator)])
    normal, anomalies = torch.randn(4000, generator=generator), 3 + torch.randn(1000, generator=generator)
    assert (p_values(normal, polluted) <= 0.05).double().mean() < (p_values(normal, clean) <= 0.05).double().mean()
    assert (p_values(normal, polluted) <= 0.05).double().mean() < 0.05
    assert p_values(anomalies, polluted).mean() > p_values(anomalies, clean).mean()


def test_the_range_of_false_alarms_is_what_calibration_sets_give():
    low, high = false_alarm_range(99, 0.05)
    assert (round(low, 3), round(high, 3)) == (0.017, 0.1)
    generator = torch.Generator().manual_seed(0)
    rates = []
    for _ in range(2000):
        uniform = torch.rand(99, generator=generator)  # of which a share of 1 - threshold lies above a threshold
        rates.append(1 - score_threshold(uniform, 0.05))
    inside = np.mean([low <= rate <= high for rate in rates])
    assert inside == pytest.approx(0.95, abs=0.015)
    assert np.mean(rates) == pytest.approx(0.05, abs=0.002)


def test_a_rate_that_the_held_out_images_cannot_support_is_refused_with_one_they_can():
    calibration = torch.arange(30.0)
    message = "--false-alarms 0.01 takes at least 99 images held out for calibration, there are 30: use 0.033 or more"
    with pytest.raises(UserError, match=message):
        score_threshold(calibration, 0.01)
    assert score_threshold(calibration, 0.033) == 29  # the rate the message names
    assert score_threshold(torch.arange(99.0), 0.01) == 98  # the number the message names
    with pytest.raises(UserError):
        score_threshold(torch.arange(98.0), 0.01)


@pytest.mark.parametrize("num_calibration", [1, 2, 6, 30, 98, 99, 100, 4321])
def test_every_refusal_names_a_rate_that_is_then_accepted(num_calibration):
    with pytest.raises(UserError) as refused:
        score_threshold(torch.arange(float(num_calibration)), 1e-9)
    named = float(str(refused.value).split("use ")[1].split(" or more")[0])
    assert lowest_false_alarms(num_calibration) <= named < 1.5 * lowest_false_alarms(num_calibration)
    score_threshold(torch.arange(float(num_calibration)), named)


@pytest.mark.parametrize("rate", [0, 1, -0.1, 5, math.nan])
def test_a_rate_outside_0_to_1_is_refused(rate):
    with pytest.raises(UserError, match="--false-alarms"):
        score_threshold(torch.arange(30.0), rate)


def test_an_empty_calibration_set_is_refused():
    with pytest.raises(UserError, match="no held-out images"):
        p_values(torch.zeros(1), torch.zeros(0))


def test_a_score_that_is_not_a_number_never_passes_for_an_alarm():
    with pytest.raises(AssertionError, match="NaN"):
        p_values(torch.tensor([math.nan]), torch.zeros(3))


def by_hand(p, fdr):
    """Step up from the largest p-value, as Benjamini and Hochberg wrote it."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    for k in range(len(p), 0, -1):
        if p[order[k - 1]] <= fdr * k / len(p) + 1e-12:
            return {i for i in range(len(p)) if p[i] <= p[order[k - 1]]}
    return set()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.9]))
def test_discoveries_are_those_of_benjamini_and_hochberg(hundredths, fdr):
    p = torch.tensor(hundredths, dtype=torch.float64) / 100
    assert set(discoveries(p, fdr).nonzero().flatten().tolist()) == by_hand(p.tolist(), fdr)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(few_levels, few_levels, st.sampled_from([0.02, 0.1, 0.5, 0.9]), st.integers(1, 7))
def test_a_threshold_over_batches_calls_what_discoveries_calls(calibration, scores, fdr, batch):
    calibration, scores = torch.tensor(calibration).float(), torch.tensor(scores).float()
    threshold = discovery_threshold(scores.split(batch), calibration, fdr)
    assert torch.equal(scores > threshold, discoveries(p_values(scores, calibration), fdr))


def test_no_scores_give_no_discoveries():
    assert discovery_threshold([], torch.arange(3.0), 0.1) == math.inf


def test_discoveries_by_hand():
    p = torch.tensor([0.9, 0.01, 0.04, 0.02, 0.03], dtype=torch.float64)
    assert discoveries(p, 0.05).tolist() == [False, True, True, True, True]
    assert discoveries(p, 0.0375).sum() == 0  # .01 > .0075, and so on up to .04 > .03
    assert not discoveries(torch.ones(7), 0.1).any()
    assert discoveries(torch.zeros(0), 0.1).tolist() == []


def test_a_p_value_exactly_at_its_limit_counts():
    p = torch.tensor([3 / 1000, *[1.0] * 99], dtype=torch.float64)
    assert discoveries(p, 0.3).sum() == 1  # .3 * 1 / 100 is 3 / 1000, in floats a little less


@pytest.mark.parametrize("polluted", [0.0, 0.1])
def test_false_discoveries_stay_within_the_rate(polluted):
    generator = torch.Generator().manual_seed(0)
    shares, found = [], []
    for _ in range(300):
        hidden = round(polluted * 199)
        calibration = torch.randn(199, generator=generator)
        calibration[:hidden] += 4
        scores = torch.randn(100, generator=generator)
        scores[:30] += 4
        called = discoveries(p_values(scores, calibration), 0.2)
        shares.append(called[30:].sum().item() / max(1, called.sum().item()))
        found.append(called[:30].double().mean().item())
    error = np.std(shares) / math.sqrt(300)
    assert np.mean(shares) <= 0.2 * 0.7 + 3 * error  # times the share of normal images in the batch
    if not polluted:
        assert np.mean(shares) >= 0.2 * 0.7 - 3 * error - 0.02  # and not wastefully so
        assert np.mean(found) > 0.8


def test_fewer_alarms_than_the_held_out_images_can_support_are_none():
    """19 of them: no p-value is below .05, so among 100 images at a rate of .1 at least 50 must reach it."""
    assert least_discoveries(19, 100, 0.1) == 50
    p = torch.cat([torch.full((50,), 1 / 20, dtype=torch.float64), torch.ones(50)])
    assert discoveries(p, 0.1).sum() == 50
    assert discoveries(torch.cat([p[1:], torch.ones(1)]), 0.1).sum() == 0


@pytest.mark.parametrize("rate", [0, 1, -0.1, math.nan])
def test_a_rate_of_false_discoveries_outside_0_to_1_is_refused(rate):
    with pytest.raises(UserError, match="--fdr"):
        discoveries(torch.ones(3), rate)


def test_false_alarms_with_a_polluted_calibration_set_lie_in_the_stated_range():
    assert false_alarms_if_polluted(0.05, 0.0, 0.0) == (0.05, 0.05)
    low, high = false_alarms_if_polluted(0.05, 0.0, 0.02)
    assert (low, high) == (pytest.approx(0.03 / 0.98), 0.05)
    assert false_alarms_if_polluted(0.05, 0.0, 0.3) == (0.0, 0.05)
    assert false_alarms_if_polluted(0.05, 1.0, 1.0) == (0.0, 0.05)
    with pytest.raises(UserError, match="low <= high"):
        false_alarms_if_polluted(0.05, 0.3, 0.1)
    uniform = (torch.arange(9800) + 0.5) / 9800  # of normal images; 200 anomalies lie above them all
    limit = score_threshold(torch.cat([uniform, torch.full((199,), 2.0)]), 0.05)
    assert (uniform > limit).double().mean() == pytest.approx(low, abs=2e-4)
