"""What is asked, in which order, and with which chance."""

import dataclasses

import numpy as np
import pytest

from elsa.errors import UserError
from elsa.workspace.queries import ALIKE, AUDIT, MIX, MIXED, STRATEGIES, State, ask

N, PROTOTYPES = 101, 7


def state(labelled=(), seed=0, **more):
    generator = np.random.default_rng(seed)
    mask = np.zeros(N, bool)
    mask[list(labelled)] = True
    given = {
        "scores": generator.standard_normal(N),
        "labelled": mask,
        "threshold": 1.0,
        "prototypes": generator.integers(PROTOTYPES, size=N),
    }
    return State(**given | more)


def rows(asked):
    return [one.index for one in asked]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_asks_for_different_unlabelled_images_and_changes_nothing(strategy):
    given = state(labelled=range(0, N, 3))
    before = {name: np.copy(value) for name, value in dataclasses.asdict(given).items() if value is not None}
    asked = ask(given, strategy, count=13, seed=1)
    assert len(set(rows(asked))) == 13
    assert not given.labelled[rows(asked)].any()
    assert asked == ask(given, strategy, count=13, seed=1)
    assert all(0 < one.probability <= 1 for one in asked)
    assert all((value == getattr(given, name)).all() for name, value in before.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("left", [0, 1, 4])
def test_no_more_is_asked_than_is_left(strategy, left):
    given = state(labelled=range(N - left))
    assert sorted(rows(ask(given, strategy, count=10))) == list(range(N - left, N))
    assert ask(state(), strategy, count=0) == []


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="strategy 'best': use one of 'mix', 'most anomalous'"):
        ask(state(), "best")


def test_the_most_anomalous_come_first():
    given = state(labelled=[5, 7])
    open_ones = np.flatnonzero(~given.labelled)
    assert rows(ask(given, "most anomalous", 5)) == sorted(open_ones, key=lambda i: -given.scores[i])[:5]


def test_the_nearest_to_the_threshold_come_from_both_sides():
    given = state(scores=np.concatenate([[0.9, 1.2, 3.0], np.zeros(N - 3)]))
    assert rows(ask(given, "nearest to the threshold", 2)) == [0, 1]


def test_suspects_follow_suspicion_where_it_is_known():
    given = state()
    assert rows(ask(given, "suspects", 5)) == rows(ask(given, "most anomalous", 5))
    known = state(suspicion=np.arange(N)[::-1].astype(float))
    assert rows(ask(known, "suspects", 3)) == [0, 1, 2]


def test_one_per_prototype_asks_for_the_highest_of_each_before_a_second_of_any():
    given = state(labelled=range(30))
    asked = rows(ask(given, "one per prototype", 2 * PROTOTYPES))
    for part in (asked[:PROTOTYPES], asked[PROTOTYPES:]):
        assert sorted(given.prototypes[part]) == list(range(PROTOTYPES))
    for row in asked[:PROTOTYPES]:
        rivals = (given.prototypes == given.prototypes[row]) & ~given.labelled
        assert given.scores[row] == given.scores[rivals].max()


def test_prototypes_take_turns_at_being_first():
    given = state()
    assert len({ask(given, "one per prototype", 1, seed=seed)[0].index for seed in range(30)}) == PROTOTYPES


def test_the_audit_is_even_and_says_its_chance():
    given = state(labelled=range(20))
    seen = np.zeros(N)
    for seed in range(2000):
        for one in ask(given, AUDIT, 9, seed):
            seen[one.index] += 1
            assert one.probability == 1 / 81
    expected = 2000 * 9 / 81
    assert seen[:20].sum() == 0
    assert (np.abs(seen[20:] - expected) < 5 * np.sqrt(expected)).all()


def test_the_audit_of_the_mix_is_drawn_evenly_from_what_its_certain_part_leaves():
    given = state(labelled=range(20))
    [*_, last] = ask(given, MIX, 10)
    assert last.strategy == AUDIT
    seen = np.zeros(N)
    for seed in range(2000):
        asked = ask(given, MIX, 10, seed)
        certain = [one for one in asked if one.strategy != AUDIT]
        audit = [one for one in asked if one.strategy == AUDIT]
        assert {one.probability for one in certain} == {1.0}
        assert {one.probability for one in audit} == {1 / (81 - len(certain))}
        assert len(audit) == 2
        seen[[one.index for one in audit]] += 1
    never = set(np.flatnonzero(seen == 0))
    assert set(range(20)) <= never
    assert set(rows(ask(given, "most anomalous", 2))) <= never


def test_a_mix_of_few_asks_for_an_audit_now_and_then():
    audits = sum(one.strategy == AUDIT for seed in range(1000) for one in ask(state(), MIX, 1, seed))
    assert 140 < audits < 260  # 200 with a standard deviation of 13


def test_the_mix_uses_several_strategies():
    assert {one.strategy for one in ask(state(), MIX, 20)} == {AUDIT, *MIXED}


def test_of_two_images_that_look_alike_one_is_asked_unless_nothing_else_is_left():
    vectors = np.eye(N)
    vectors[1] = vectors[0]
    given = state(scores=-np.arange(N, dtype=float), embeddings=vectors)
    assert vectors[0] @ vectors[1] > ALIKE
    assert rows(ask(given, "most anomalous", 3)) == [0, 2, 3]
    everything = state(labelled=range(2, N), scores=-np.arange(N, dtype=float), embeddings=vectors)
    assert rows(ask(everything, "most anomalous", 3)) == [0, 1]
