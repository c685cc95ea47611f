"""What is asked, in which order, and with which chance."""

import dataclasses
import time

import numpy as np
import pytest

from elsa.errors import UserError
from elsa.prototypes import spherical_kmeans
from elsa.workspace import queries
from elsa.workspace.queries import AUDIT, DIVERSE, MIX, STRATEGIES, State, ask

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
    assert all(one.probability is None or 0 < one.probability <= 1 for one in asked)
    assert all((value == getattr(given, name)).all() for name, value in before.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("left", [0, 1, 4])
def test_no_more_is_asked_than_is_left(strategy, left):
    given = state(labelled=range(N - left))
    assert sorted(rows(ask(given, strategy, count=10))) == list(range(N - left, N))
    assert ask(state(), strategy, count=0) == []


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(
        UserError, match="strategy 'best': use one of 'mix', 'anomalous and different', 'most anomalous'"
    ):
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
    for seed in range(1000):
        for one in ask(given, AUDIT, 9, seed):
            seen[one.index] += 1
            assert one.probability == 1 / 81
    expected = 1000 * 9 / 81
    assert seen[:20].sum() == 0
    assert (np.abs(seen[20:] - expected) < 5 * np.sqrt(expected)).all()


def test_the_audit_of_the_mix_is_drawn_evenly_from_what_the_others_leave():
    """Whatever the others took: each of the 81 images is drawn by the audit as often as it was left to it."""
    given = state(labelled=range(20))
    expected, seen = np.zeros(N), np.zeros(N)
    for seed in range(300):
        asked = ask(given, MIX, 10, seed)
        others = [one.index for one in asked[:8]]
        audit = asked[8:]
        assert [one.strategy for one in asked] == [DIVERSE] * 8 + [AUDIT] * 2
        assert [one.probability for one in asked] == [None] * 8 + [1 / 73] * 2
        left = ~given.labelled
        left[others] = False
        expected[left] += 2 / 73
        seen[[one.index for one in audit]] += 1
    assert (np.abs(seen - expected) <= 5 * np.sqrt(expected)).all()


def test_a_mix_of_few_asks_for_an_audit_now_and_then():
    audits = sum(one.strategy == AUDIT for seed in range(300) for one in ask(state(), MIX, 1, seed))
    assert 30 < audits < 95  # 60 with a standard deviation of 7


def test_the_mix_of_a_few_images_takes_each_once():
    for count in range(6):
        asked = rows(ask(state(labelled=range(N - 5)), MIX, count, seed=count))
        assert len(set(asked)) == count


def test_what_is_anomalous_and_different_is_among_the_highest_fifth_as_long_as_that_is_four_for_each_question():
    given = state(scores=-np.arange(N, dtype=float), embeddings=np.random.default_rng(3).standard_normal((N, 5)))
    seen = {row for seed in range(60) for row in rows(ask(given, DIVERSE, 5, seed))}
    assert seen <= set(range(20))
    assert len(seen) > 10
    unseen = {row for seed in range(60) for row in rows(ask(state(scores=given.scores), DIVERSE, 5, seed))}
    assert unseen == set(range(20))  # where nobody can tell what is different
    more = {row for seed in range(60) for row in rows(ask(given, DIVERSE, 11, seed))}
    assert 30 < max(more) < 44


def test_labelled_images_of_the_highest_fifth_make_room_for_no_others_while_enough_are_left():
    given = state(labelled=range(15), scores=-np.arange(N, dtype=float))
    assert sorted(rows(ask(given, DIVERSE, 5))) == [15, 16, 17, 18, 19]
    assert sorted(rows(ask(state(labelled=range(18), scores=given.scores), DIVERSE, 3))) == [18, 19, 20]


def test_each_group_of_high_scores_is_asked_about_by_its_most_typical_image():
    sizes, generator = [5, 4, 5, 2], np.random.default_rng(0)
    group = np.repeat(range(4), sizes)
    vectors = 50 * np.eye(4)[group]
    first = np.cumsum([0, *sizes[:-1]])  # in the middle of its group
    for start, size in zip(first, sizes, strict=True):
        noise = generator.standard_normal((size - 1, 4))
        vectors[start + 1 : start + size] += noise - noise.mean(axis=0) if size > 2 else 0
    given = State(np.zeros(16), np.zeros(16, bool), 0.0, np.zeros(16, int), embeddings=vectors + 1e6)
    for seed in range(20):
        asked = sorted(rows(ask(given, DIVERSE, 4, seed)))
        assert asked[:3] == list(first[:3])
        assert group[asked[3]] == 3  # of two alike either


def test_images_that_all_look_alike_are_asked_for_once_each():
    given = state(embeddings=np.ones((N, 3)))
    assert len(set(rows(ask(given, DIVERSE, 13)))) == 13


def test_a_question_about_a_hundred_thousand_images_takes_milliseconds(monkeypatch):
    grouped = []
    monkeypatch.setattr(
        queries, "spherical_kmeans", lambda z, *rest: grouped.append(len(z)) or spherical_kmeans(z, *rest)
    )
    num, generator = 100_000, np.random.default_rng(0)
    vectors = generator.standard_normal((num, 32)).astype(np.float32)
    given = State(
        generator.standard_normal(num), generator.random(num) < 0.1, 1.0, generator.integers(20, size=num),
        embeddings=vectors / np.linalg.norm(vectors, axis=1, keepdims=True),
    )  # fmt: skip
    began = time.thread_time()
    asked = ask(given, MIX, 10)
    assert time.thread_time() - began < 0.3
    assert grouped == [queries.CANDIDATES]
    lowest = np.sort(given.scores)[-num // 5]
    assert all(given.scores[one.index] >= lowest for one in asked if one.strategy == DIVERSE)
