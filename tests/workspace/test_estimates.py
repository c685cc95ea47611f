"""Estimates from asked labels: by hand, unbiased by enumeration, and with intervals that hold."""

import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest
from said import say
from scipy.stats import beta

from elsa.errors import UserError
from elsa.trust.metrics import auroc
from elsa.workspace.estimates import LEAST_AUDITS, LEAST_AUDITS_OF_PAIRS, estimate, sample_of
from elsa.workspace.events import Labels
from elsa.workspace.queries import AUDIT

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "label_coverage.py"


def stored(events):
    """Events with the ids a store would give, and the labels that follow."""
    events = [type(event)(**{**vars(event), "id": number}) for number, event in enumerate(events, start=1)]
    labels = Labels()
    labels.take(events)
    return events, labels.of


def name(row):
    return f"{row}.png"


def audit(row, word, others):
    return say(name(row), word, strategy=AUDIT, probability=1 / others)


def sure(row, word):
    return say(name(row), word, strategy="most anomalous", probability=1.0)


def test_each_draw_counts_what_was_known_before_it_and_stands_for_the_rest():
    # 13 images; 0 and 1 asked, 2 and 3 drawn from the other 11, answered in turn; 4 asked, 5 drawn from the 8 left.
    said = [
        audit(2, "normal", 11), sure(0, "anomaly"), audit(3, "anomaly", 11), sure(1, "normal"),
        sure(4, "anomaly"), audit(5, "normal", 8),
    ]  # fmt: skip
    events, labels = stored(said)
    sample = sample_of([name(row) for row in range(13)], np.arange(13.0), 2.5, events, labels)
    assert sample.known.tolist() == [[0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert sample.others.tolist() == [11, 11, 8]
    thirds = np.full((1, 3), 1 / 3)
    np.testing.assert_allclose(sample.weights(thirds), [[4, 1, 4, 1, 1 / 3, 8 / 3]])
    assert sample.weights(thirds).sum() == pytest.approx(13)
    assert sample.above.tolist() == [False, False, True, False, True, True]


def test_words_of_the_source_count_as_known_from_the_start_and_strangers_not_at_all():
    events, labels = stored([audit(2, "normal", 5), say("elsewhere.png", "anomaly")])
    given = ["anomaly", "normal", "", "", "", "", ""]
    sample = sample_of([name(row) for row in range(7)], np.arange(7.0), 0.0, events, labels, given)
    assert sample.kind.tolist() == [1, 0, 0]
    assert sample.known.tolist() == [[1, 1, 0]]


def test_only_a_first_word_makes_a_draw_and_a_withdrawn_one_makes_none():
    said = [sure(0, "anomaly"), audit(0, "anomaly", 9), audit(1, "normal", 8), audit(1, "", 8), audit(2, "unsure", 8)]
    events, labels = stored(said)
    sample = sample_of([name(row) for row in range(9)], np.zeros(9), 0.0, events, labels)
    assert sample.drawn.tolist() == [1]
    assert sample.kind.tolist() == [1, -1]


def test_the_weights_are_unbiased_whatever_is_asked_between():
    """All ways the audit may fall, each as likely: two rounds of one sure question and one draw.

    The second question depends on what the first draw found, as a refitted model's would.
    """
    anomaly = [True, False, True, False, False, True, False]
    num = len(anomaly)
    words = ["anomaly" if one else "normal" for one in anomaly]
    scores = np.arange(num)[::-1].astype(float)
    totals, tops = [], []
    for first, second in itertools.product(range(num - 1), range(num - 3)):
        said = [sure(0, words[0])]
        left = [row for row in range(num) if row != 0]
        drawn = left.pop(first)
        said.append(audit(drawn, words[drawn], num - 1))
        asked = left.pop(-1 if anomaly[drawn] else 0)
        said.append(sure(asked, words[asked]))
        said.append(audit(left[second], words[left[second]], num - 3))
        events, labels = stored(said)
        sample = sample_of([name(row) for row in range(num)], scores, 3.5, events, labels)
        [weights] = sample.weights(np.full((1, 2), 0.5))
        totals.append(weights[sample.kind == 1].sum())
        tops.append(weights[sample.above].sum())
    assert np.mean(totals) == pytest.approx(sum(anomaly))
    assert np.mean(tops) == pytest.approx((scores > 3.5).sum())
    assert np.std(totals) > 0


def all_labelled(num=60, seed=0):
    generator = np.random.default_rng(seed)
    anomaly = np.arange(num) % 3 == 0
    scores = generator.normal(size=num) + 1.5 * anomaly
    order = generator.permutation(num)
    return anomaly, scores, [(row, "anomaly" if anomaly[row] else "normal") for row in order.tolist()]


def test_with_every_image_audited_the_figures_are_those_of_all_images():
    anomaly, scores, said = all_labelled()
    events, labels = stored([audit(row, word, 60) for row, word in said])
    found = estimate([name(row) for row in range(60)], scores, 0.5, events, labels)
    assert found.share.value == pytest.approx(1 / 3)
    assert found.auroc.value == pytest.approx(auroc(scores, anomaly))
    assert found.false_alarms.value == pytest.approx((scores[~anomaly] > 0.5).mean())
    assert found.misses.value == pytest.approx((scores[anomaly] <= 0.5).mean())
    for figure in (found.share, found.auroc, found.false_alarms, found.misses):
        assert figure.low <= figure.value <= figure.high


def test_ties_count_half():
    _, _, said = all_labelled()
    events, labels = stored([audit(row, word, 60) for row, word in said])
    assert estimate([name(row) for row in range(60)], np.zeros(60), 0, events, labels).auroc.value == pytest.approx(0.5)


def test_the_interval_of_a_plain_audit_is_that_of_clopper_and_pearson():
    num, drawn, found = 5000, 40, 3
    said = [audit(row, "anomaly" if row < found else "normal", num) for row in range(drawn)]
    events, labels = stored(said)
    share = estimate([name(row) for row in range(num)], np.zeros(num), 0.0, events, labels).share
    exact = beta.ppf(0.025, found, drawn - found + 1), beta.ppf(0.975, found + 1, drawn - found)
    assert share.value == pytest.approx(found / drawn)
    np.testing.assert_allclose([share.low, share.high], exact, atol=0.012)  # 1,000 replicates


def test_what_is_known_counts_for_itself_alone_and_leaves_the_rest_to_the_audit():
    """200 of 1,000 are known anomalies, and of 20 draws from the other 800 none is one."""
    said = [sure(row, "anomaly") for row in range(200)] + [audit(row, "normal", 800) for row in range(200, 220)]
    events, labels = stored(said)
    found = estimate([name(row) for row in range(1000)], np.arange(1000.0), 0.0, events, labels)
    assert found.share.value == pytest.approx(0.2)
    assert found.share.low == pytest.approx(0.2)
    assert found.gamma_p.value == 0
    assert 0.05 < found.gamma_p.high < 0.25


def test_a_perfect_ranking_reaches_to_the_top_and_a_useless_one_to_the_bottom():
    def interval(sign):
        said = [audit(row, "anomaly" if row < 20 else "normal", 900) for row in range(60)]
        events, labels = stored(said)
        return estimate([name(row) for row in range(900)], sign * np.arange(900.0), 0.0, events, labels).auroc

    assert (interval(-1).value, interval(-1).high) == pytest.approx((1, 1))
    assert (interval(1).value, interval(1).low) == pytest.approx((0, 0))
    assert interval(-1).low > 0.7
    assert interval(1).high < 0.3


def test_intervals_shrink_as_labels_come():
    def widths(draws):
        said = [audit(row, "anomaly" if row % 4 == 0 else "normal", 4000) for row in range(draws)]
        events, labels = stored(said)
        found = estimate([name(row) for row in range(4000)], np.arange(4000.0) % 7, 3.0, events, labels)
        figures = (found.share, found.gamma_p, found.auroc, found.false_alarms, found.misses)
        return np.array([figure.high - figure.low for figure in figures])

    assert (widths(400) < 0.7 * widths(100)).all()
    assert (widths(100) < 0.8 * widths(40)).all()


def test_too_few_labels_keep_silent_and_say_what_is_missing():
    said = [audit(row, "normal", 500) for row in range(LEAST_AUDITS - 1)]
    events, labels = stored(said)
    found = estimate([name(row) for row in range(500)], np.zeros(500), 0.0, events, labels)
    assert found.share.value is None
    assert found.share.reason == "it takes 10 words from the random audit, there are 9"
    assert "it takes 10 known anomalies, there are 0" in found.auroc.reason
    assert found.auroc.missing_anomalies == 10
    events, labels = stored([*said, audit(LEAST_AUDITS, "normal", 500)])
    found = estimate([name(row) for row in range(500)], np.zeros(500), 0.0, events, labels)
    assert found.share.value == 0
    assert found.false_alarms.value == 0
    assert found.misses.value is None
    assert f"{LEAST_AUDITS_OF_PAIRS} words from the random audit" in found.misses.reason
    assert found.lines()[2].startswith("gamma_p, anomalies among the unlabelled: 0.0% (95% interval 0.0 to ")


def test_without_an_audit_nothing_is_stated():
    events, labels = stored([sure(row, "anomaly" if row < 20 else "normal") for row in range(40)])
    found = estimate([name(row) for row in range(500)], np.zeros(500), 0.0, events, labels)
    assert all("random audit" in line for line in found.lines()[1:])


@pytest.mark.parametrize("confidence", [0, 1, float("nan")])
def test_a_wrong_confidence_is_refused(confidence):
    with pytest.raises(UserError, match="confidence"):
        estimate([], [], 0.0, [], {}, confidence=confidence)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [12])
def test_intervals_contain_the_truth_although_most_labels_were_asked_for(rounds):
    benchmark = runpy.run_path(str(BENCHMARK))
    found = benchmark["coverage"](0.1, 2.0, rounds, trials=50)
    for name in benchmark["FIGURES"]:
        assert found[name]["stated"] > 0.9
        assert found[name]["above"] + found[name]["below"] <= 0.12, name  # .05 and two standard errors of 50 trials
    assert abs(found["share"]["error"]) < 0.02
    assert found["taken as random"]["error"] > 0.1  # what the weights correct
