"""The contract that both stores keep."""

import doctest
import threading
from pathlib import Path

import pytest
from said import say

from elsa.errors import UserError
from elsa.workspace.events import SETTLE, LabelEvent, Labels
from elsa.workspace.store import open_store


@pytest.fixture
def store(place):
    with open_store(place) as store:
        yield store


def words(store):
    return {name: label.word for name, label in store.labels().items()}


def test_an_event_comes_back_as_it_was_given(store):
    given = say(
        "Ünï/<b>x</b> '\"%s?;--.png", "anomaly", who="Ann O'Hara", sha256="ab" * 32, model=3, score=-1.25e-7,
        strategy="random audit", probability=0.125,
    )  # fmt: skip
    assert store.add([given]) == [1]
    [event] = store.events()
    assert event.at.endswith("+00:00")
    assert event == LabelEvent(**{**vars(given), "id": 1, "at": event.at})


def test_ids_ascend_and_events_can_be_read_from_any_of_them(store):
    ids = store.add([say(f"{i}.png", "normal") for i in range(5)])
    assert ids == sorted(set(ids))
    assert [event.id for event in store.events(since=ids[2])] == ids[3:]


def test_a_token_sent_twice_is_stored_once_and_answers_the_same(store):
    event = say("a.png", "normal")
    first = store.add([event])
    assert store.add([event]) == first
    assert store.add([say("b.png", "normal"), event])[1:] == first
    assert len(store.events()) == 2


def test_a_token_of_another_label_is_refused_and_the_whole_request_with_it(store):
    event = say("a.png", "normal")
    store.add([event])
    with pytest.raises(UserError, match="was used for another label"):
        store.add([say("b.png", "normal"), say("a.png", "anomaly", request=event.request)])
    assert len(store.events()) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (say("a.png", "Normal"), "'normal', 'anomaly', 'unsure' or ''"),
        (say("", "normal"), "empty `image`"),
        (say("a.png", "normal", who=""), "empty `who`"),
        (say("a.png", "normal", request=""), "empty `request`"),
        (say("a.png", "normal", score=float("nan")), "finite"),
        (say("a.png", "normal", probability=0.0), "above 0"),
        (say("a.png", "normal", probability=1.5), "at most 1"),
        (say("a\0.png", "normal"), "UTF-8"),
        (say("a\udce9.png", "normal"), "UTF-8"),
        (say("a.png", "normal", undoes=1), "only undo"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line_and_nothing_is_stored(store, wrong, said):
    with pytest.raises(UserError, match=said) as refused:
        store.add([say("fine.png", "normal"), wrong])
    assert "\n" not in str(refused.value)
    assert store.events() == []


def test_undo_takes_back_the_last_word_step_by_step_and_says_what_is_left(store):
    store.add([say("a.png", "normal"), say("b.png", "normal"), say("a.png", "anomaly"), say("b.png", "unsure", "bob")])
    undone = [store.undo("ann", f"undo{i}") for i in range(3)]
    assert [(event.image, event.label, event.undoes) for event in undone] == [
        ("a.png", "normal", 3), ("b.png", "", 2), ("a.png", "", 1),
    ]  # fmt: skip
    assert store.undo("ann", "undo3") is None
    assert words(store) == {"b.png": "unsure"}
    assert len(store.events()) == 7  # nothing is taken out


def test_an_undo_sent_twice_takes_back_one_word(store):
    store.add([say("a.png", "normal"), say("a.png", "anomaly")])
    assert store.undo("ann", "once") == store.undo("ann", "once")
    assert words(store) == {"a.png": "normal"}
    with pytest.raises(UserError, match="another label"):
        store.undo("bob", "once")


def test_undo_works_on_after_new_words(store):
    store.add([say("a.png", "normal")])
    store.undo("ann", "u0")
    store.add([say("a.png", "anomaly")])
    assert words(store) == {"a.png": "anomaly"}
    assert store.undo("ann", "u1").undoes == 3
    assert words(store) == {}


def test_people_who_disagree_are_a_conflict_until_somebody_settles_it(store):
    store.add([say("a.png", "normal"), say("a.png", "anomaly", "bob"), say("a.png", "unsure", "cy")])
    label = store.labels()["a.png"]
    assert (label.word, label.training_word, label.conflict) == ("", "", True)
    assert label.people == {"ann": "normal", "bob": "anomaly", "cy": "unsure"}
    store.add([say("a.png", "anomaly", "cy", strategy=SETTLE)])
    assert store.labels()["a.png"].word == "anomaly"
    assert not store.labels()["a.png"].conflict
    store.undo("cy", "no, not so fast")
    assert store.labels()["a.png"].conflict
    store.add([say("a.png", "normal", "bob")])
    assert words(store) == {"a.png": "normal"}


def test_a_word_against_a_settled_one_is_a_conflict_again(store):
    store.add([say("a.png", "normal"), say("a.png", "anomaly", "bob", strategy=SETTLE)])
    assert words(store) == {"a.png": "anomaly"}
    store.add([say("a.png", "normal")])
    assert store.labels()["a.png"].conflict


def test_unsure_is_no_training_word_and_gives_way_to_somebody_who_is_sure(store):
    store.add([say("a.png", "unsure"), say("b.png", "unsure"), say("b.png", "anomaly", "bob")])
    labels = store.labels()
    assert (labels["a.png"].word, labels["a.png"].training_word) == ("unsure", "")
    assert labels["b.png"].training_word == "anomaly"


def test_a_withdrawn_word_leaves_nothing(store):
    store.add([say("a.png", "normal"), say("a.png", "")])
    assert words(store) == {}


def test_what_was_said_about_other_bytes_of_that_name_no_longer_counts(store):
    store.add([say("a.png", "normal", sha256="old"), say("a.png", "anomaly", "bob", sha256="new")])
    assert store.labels()["a.png"].people == {"bob": "anomaly"}
    store.add([say("a.png", "normal", "cy")])  # an import that never saw the bytes
    assert store.labels()["a.png"].conflict


def test_labels_follow_what_another_opening_of_the_store_adds(place):
    with open_store(place) as here, open_store(place) as there:
        assert here.labels() == {}
        there.add([say("a.png", "normal")])
        assert words(here) == {"a.png": "normal"}
        here.add([say("a.png", "anomaly")])
        assert words(there) == words(here) == {"a.png": "anomaly"}


def test_events_taken_twice_count_once(store):
    store.add([say("a.png", "normal")])
    store.undo("ann", "u")
    labels = Labels()
    for _ in range(2):
        labels.take(store.events())
    assert labels.of == {}
    assert labels.last == 2


def test_all_is_there_after_closing(place):
    with open_store(place) as store:
        store.add([say("a.png", "normal")])
        store.use_model(store.add_model("models/1", after=1, about={"auroc": 0.5}).id)
    with open_store(place) as store:
        assert words(store) == {"a.png": "normal"}
        assert store.current_model().about == {"auroc": 0.5}


def test_models_are_listed_and_any_of_them_can_be_gone_back_to(store):
    assert store.current_model() is None
    first, second = store.add_model("models/1", after=0), store.add_model("models/2", after=30, about={"n": [1, None]})
    assert store.models() == [first, second]
    assert store.current_model() is None  # noted is not used
    for model in (first, second, first):
        store.use_model(model.id)
        assert store.current_model() == model
    with pytest.raises(UserError, match="model 99 is not in"):
        store.use_model(99)


@pytest.mark.parametrize("table", ["events", "models", "uses"])
@pytest.mark.parametrize("change", ["UPDATE {} SET at = 'x'", "DELETE FROM {}"])
def test_the_database_itself_refuses_to_change_the_past(store, table, change):
    store.add([say("a.png", "normal")])
    store.use_model(store.add_model("models/1", after=1).id)
    with pytest.raises(Exception, match="never changed"), store.database.write() as execute:
        execute(change.format(table), [])
    assert len(store.events()) == 1


def test_threads_and_openings_at_once_lose_nothing_and_double_nothing(place):
    """Two browsers at two servers, and impatient clients: every event is sent by two threads."""
    with open_store(place) as one, open_store(place) as two:
        batches = [[say(f"{t}/{i}", "normal", who=f"p{t}") for i in range(10)] for t in range(4)]
        answers: dict[str, set[int]] = {}

        def work(store, batch):
            for event in batch:
                answers.setdefault(event.request, set()).update(store.add([event]))

        threads = [threading.Thread(target=work, args=(s, batch)) for batch in batches for s in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stored = {event.request: {event.id} for event in one.events()}
        assert stored == answers
        assert len(stored) == 40
        assert len(one.labels()) == len(two.labels()) == 40


def test_the_examples_of_the_docs_work():
    page = Path(__file__).parents[2] / "docs" / "labels_store.md"
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert (failed, tried > 5) == (0, True)
