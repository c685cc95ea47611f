"""A clock that jumps changes what is written beside a label, and nothing that follows from it."""

from pathlib import Path

import pytest

from elsa.workspace import store as stores
from elsa.workspace.events import LabelEvent
from elsa.workspace.store import open_store


def test_the_last_word_counts_though_the_clock_went_back(tmp_path, monkeypatch):
    times = iter(["2030-01-01T00:00:00.000+00:00", "1970-01-01T00:00:00.000+00:00", "1999-01-01T00:00:00.000+00:00"])
    monkeypatch.setattr(stores, "_now", lambda: next(times))
    store = open_store(str(tmp_path))
    for number, word in enumerate(("normal", "anomaly")):
        store.add([LabelEvent(who="a", image="x.png", label=word, request=f"request-{number}")])
    assert store.labels()["x.png"].word == "anomaly"
    assert [event.at[:4] for event in store.events()] == ["2030", "1970"]
    store.undo("a", "request-2")
    assert store.labels()["x.png"].word == "normal"


def test_the_clock_of_the_wall_is_asked_for_nothing_else():
    package = Path(stores.__file__).parents[1]
    asking = ("datetime.now", "time.time()", "utcnow")
    found = {path.name for path in package.rglob("*.py") if any(words in path.read_text() for words in asking)}
    assert found == {"store.py"}


@pytest.fixture(autouse=True)
def close_stores(monkeypatch):
    opened = []
    real = open_store
    monkeypatch.setitem(globals(), "open_store", lambda place: opened.append(real(place)) or opened[-1])
    yield
    for store in opened:
        store.close()
