"""The store of a labelling workspace: one set of statements, on SQLite for a folder or PostgreSQL for a team.

Rows are added and never changed: the databases themselves refuse updates and deletions. What `add`, `undo`,
`add_model` and `use_model` have returned survives a killed process and a loss of power.
"""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

from elsa.errors import UserError
from elsa.workspace.events import UNDO, Label, LabelEvent, Labels, check_event

SCHEMA = 1
DATABASE = "elsa.db"

Execute = Callable[[str, Sequence[Any]], list[tuple]]
"""Runs one statement with ? for its values and returns its rows."""


class Database(Protocol):
    """What differs between SQLite and PostgreSQL."""

    name: str
    """For messages; without a password."""

    def write(self) -> AbstractContextManager[Execute]:
        """A transaction that excludes every other writer, durable when it ends; undone if it raises."""

    def read(self) -> AbstractContextManager[Execute]:
        """Statements that see what is committed."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Model:
    """One refit: where it lies and which events it has learned from."""

    id: int
    at: str
    folder: str
    after: int
    """The id of the last event it knows."""
    about: dict[str, Any] = field(default_factory=dict)
    """Whatever else belongs to it and JSON can hold, such as the file of its scores."""


COLUMNS = "who, image, label, request, sha256, model, score, strategy, probability, undoes, at"
MARKS = ", ".join("?" * (COLUMNS.count(",") + 1))


class Store:
    """Labels and models of a workspace; one object may be used by many threads, one database by many processes."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._labels = Labels()
        self._folding = threading.Lock()

    def add(self, events: Sequence[LabelEvent]) -> list[int]:
        """Store all events or none; returns their ids when they are durable. A token met before keeps its first id."""
        for event in events:
            check_event(event)
            if event.undoes is not None:
                raise UserError(f"label of {event.image!r} undoes {event.undoes}: only undo() takes an event back")
        with self.database.write() as execute:
            return [_insert(execute, event).id for event in events]

    def undo(self, who: str, request: str) -> LabelEvent | None:
        """Take back the last event of a person that still counts; returns the event that does so, None if none is left.

        The event carries the word the person's label falls back to.
        """
        check_event(LabelEvent(who=who, image="any", label="", request=request))
        with self.database.write() as execute:
            if done := _by_request(execute, request):
                if done.undoes is None or done.who != who:
                    raise UserError(f"request {request!r} was used for another label: make a new token for each")
                return done
            standing = "undoes IS NULL AND NOT EXISTS (SELECT 1 FROM events AS u WHERE u.undoes = e.id)"
            last = execute(
                f"SELECT id, image, sha256 FROM events AS e WHERE who = ? AND {standing} ORDER BY id DESC LIMIT 1",
                [who],
            )
            if not last:
                return None
            [(undone, image, sha256)] = last
            before = execute(
                f"SELECT label FROM events AS e WHERE who = ? AND image = ? AND id < ? AND {standing} "
                "ORDER BY id DESC LIMIT 1",
                [who, image, undone],
            )
            label = before[0][0] if before else ""
            event = LabelEvent(
                who=who, image=image, label=label, request=request, sha256=sha256, strategy=UNDO, undoes=undone
            )
            return _insert(execute, event)

    def events(self, since: int = 0) -> list[LabelEvent]:
        """All events with a higher id than `since`, in the order in which they were stored."""
        with self.database.read() as execute:
            rows = execute(f"SELECT {COLUMNS}, id FROM events WHERE id > ? ORDER BY id", [since])
        return [LabelEvent(*row) for row in rows]

    def labels(self) -> dict[str, Label]:
        """What stands about each image somebody has a word for; reads only what is new since the last call."""
        with self._folding:
            self._labels.take(self.events(self._labels.last))
            return dict(self._labels.of)

    def add_model(self, folder: str, after: int, about: dict[str, Any] | None = None) -> Model:
        """Note a model that lies in `folder` and has learned from the events up to `after`."""
        text = json.dumps(about or {}, allow_nan=False)
        with self.database.write() as execute:
            at = _now()
            [(number,)] = execute(
                'INSERT INTO models (at, folder, "after", about) VALUES (?, ?, ?, ?) RETURNING id',
                [at, folder, after, text],
            )
        return Model(number, at, folder, after, json.loads(text))

    def models(self) -> list[Model]:
        """All models, oldest first."""
        with self.database.read() as execute:
            rows = execute('SELECT id, at, folder, "after", about FROM models ORDER BY id', [])
        return [_model(row) for row in rows]

    def use_model(self, number: int) -> Model:
        """Make a model the current one; going back to an earlier one is the same."""
        with self.database.write() as execute:
            rows = execute('SELECT id, at, folder, "after", about FROM models WHERE id = ?', [number])
            if not rows:
                raise UserError(f"model {number} is not in {self.database.name}: use one that models() lists")
            execute("INSERT INTO uses (at, model) VALUES (?, ?)", [_now(), number])
        return _model(rows[0])

    def current_model(self) -> Model | None:
        """The model used last, None before the first."""
        with self.database.read() as execute:
            rows = execute(
                'SELECT models.id, models.at, folder, "after", about FROM uses JOIN models ON models.id = uses.model '
                "ORDER BY uses.id DESC LIMIT 1",
                [],
            )
        return _model(rows[0]) if rows else None

    def close(self) -> None:
        """Let go of the database."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def open_store(where: str | Path) -> Store:
    """The store in a workspace folder or an SQLite file, made if it is not there, or at postgresql://... ."""
    text = str(where)
    if text.startswith(("postgresql://", "postgres://")):
        try:
            from elsa.workspace.postgres import PostgresDatabase
        except ImportError as error:
            raise UserError(
                f"--store {text.split('://')[0]}://... needs psycopg: pip install elsa[postgres]"
            ) from error
        return Store(PostgresDatabase(text))
    if "://" in text:
        raise UserError(f"--store {text}: give a folder, an SQLite file or postgresql://USER@HOST/DATABASE")
    from elsa.workspace.sqlite import SqliteDatabase

    path = Path(where)
    return Store(SqliteDatabase(path / DATABASE if path.is_dir() or not path.suffix else path))


def open_existing(workspace: Path, store: str | None = None) -> Store:
    """The store of a workspace that is there already: a mistyped folder does not become an empty one."""
    if store is None and not (workspace / DATABASE).is_file():
        raise UserError(f"WORKSPACE {workspace} holds no {DATABASE}: give the folder of `elsa label`, or its --store")
    return open_store(store or workspace)


def _insert(execute: Execute, event: LabelEvent) -> LabelEvent:
    """The event as stored: a new one, or the first that came with its token."""
    score, chance = (None if number is None else float(number) for number in (event.score, event.probability))
    given = replace(event, at=event.at or _now(), score=score, probability=chance)
    values = [getattr(given, name) for name in COLUMNS.split(", ")]
    rows = execute(
        f"INSERT INTO events ({COLUMNS}) VALUES ({MARKS}) ON CONFLICT (request) DO NOTHING RETURNING id", values
    )
    if rows:
        return replace(given, id=rows[0][0])
    first = _by_request(execute, event.request)
    assert first is not None
    if (first.who, first.image, first.label) != (event.who, event.image, event.label):
        raise UserError(f"request {event.request!r} was used for another label: make a new token for each")
    return first


def _by_request(execute: Execute, request: str) -> LabelEvent | None:
    rows = execute(f"SELECT {COLUMNS}, id FROM events WHERE request = ?", [request])
    return LabelEvent(*rows[0]) if rows else None


def _model(row: tuple) -> Model:
    number, at, folder, after, about = row
    return Model(number, at, folder, after, json.loads(about))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
