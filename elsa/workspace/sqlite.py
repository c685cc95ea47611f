"""The store in one SQLite file: write-ahead log, every commit synced to the disk."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elsa.errors import UserError
from elsa.workspace.store import SCHEMA, Execute

APPLICATION = 0x656C7361  # "elsa"
PATIENCE = 30.0  # seconds to wait for another process that writes; a commit takes milliseconds

TABLES = [
    """CREATE TABLE events (
        who TEXT NOT NULL, image TEXT NOT NULL,
        label TEXT NOT NULL CHECK (label IN ('normal', 'anomaly', 'unsure', '')),
        request TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL, model INTEGER, score REAL, strategy TEXT NOT NULL,
        probability REAL, undoes INTEGER UNIQUE REFERENCES events (id), at TEXT NOT NULL,
        id INTEGER PRIMARY KEY AUTOINCREMENT)""",
    "CREATE INDEX events_of_a_person ON events (who, id)",
    """CREATE TABLE models (
        id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, folder TEXT NOT NULL, "after" INTEGER NOT NULL,
        about TEXT NOT NULL)""",
    """CREATE TABLE uses (
        id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, model INTEGER NOT NULL REFERENCES models (id))""",
    *(
        f"CREATE TRIGGER {table}_{verb} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'rows of {table} are never changed'); END"
        for table in ("events", "models", "uses")
        for verb in ("UPDATE", "DELETE")
    ),
]


class SqliteDatabase:
    """One connection, which the threads of a process take in turn; processes wait for each other."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._turn = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder of {path}: {error.strerror}; choose another workspace") from error
        with _one_line(self.name):
            self._connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            with _one_line(self.name):
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        self._refuse_foreign_file()  # before the first byte is written to it
        [(mode,)] = self._execute("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise UserError(f"{self.name} lies on a disk without a write-ahead log ({mode}): choose a local disk")
        self._execute("PRAGMA synchronous = FULL")  # in WAL mode less may lose the last commits with the power
        self._execute("PRAGMA foreign_keys = ON")
        if self._version() == 0:
            with self.write() as execute:
                if self._version() == 0:  # another process may have been first
                    for statement in TABLES:
                        execute(statement, [])
                    execute(f"PRAGMA application_id = {APPLICATION}", [])
                    execute(f"PRAGMA user_version = {SCHEMA}", [])

    def _version(self) -> int:
        return self._execute("PRAGMA user_version")[0][0]

    def _refuse_foreign_file(self) -> None:
        version = self._version()
        [(application,)] = self._execute("PRAGMA application_id")
        [(tables,)] = self._execute("SELECT count(*) FROM sqlite_master")
        if tables and application != APPLICATION:
            raise UserError(f"{self.name} is an SQLite file of another program: choose another workspace")
        if version > SCHEMA:
            raise UserError(
                f"{self.name} was written by a newer elsa (schema {version}, this one reads up to {SCHEMA}): "
                "upgrade elsa"
            )
        [(found,)] = self._execute("PRAGMA quick_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))

    @contextmanager
    def write(self) -> Iterator[Execute]:
        """A transaction that excludes every other writer, durable when it ends."""
        with self._turn, _one_line(self.name):
            self._execute("BEGIN IMMEDIATE")
            try:
                yield self._execute
                self._execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has already rolled it back
                    self._execute("ROLLBACK")
                raise

    @contextmanager
    def read(self) -> Iterator[Execute]:
        """Statements that see what is committed."""
        with self._turn, _one_line(self.name):
            yield self._execute

    def close(self) -> None:
        """Let go of the file."""
        with self._turn:
            self._connection.close()

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple]:
        return self._connection.execute(statement, values).fetchall()


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turns what SQLite says about a file, a disk or another program into a line that tells what to do."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # our mistake, not the file's
    except sqlite3.OperationalError as error:
        code = error.sqlite_errorcode & 0xFF
        advice = {
            sqlite3.SQLITE_BUSY: f"another program has been writing to it for {PATIENCE:g} s; close that program",
            sqlite3.SQLITE_READONLY: "it cannot be written; change its permissions or choose another workspace",
            sqlite3.SQLITE_CANTOPEN: "it cannot be opened; change the folder's permissions or choose another workspace",
            sqlite3.SQLITE_FULL: "the disk is full; free some space, the label was not stored",
            sqlite3.SQLITE_IOERR: "the disk failed or is full; nothing was stored",
        }
        if code not in advice:
            raise
        raise UserError(f"{name}: {error}: {advice[code]}") from error
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.IntegrityError):
            raise
        raise UserError(
            f"{name} is not a store of elsa, or is damaged ({error}): choose another or a backup"
        ) from error
