"""The store in a PostgreSQL database, for people at several machines; its tables lie in the schema `elsa`."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from elsa.errors import UserError
from elsa.workspace.store import SCHEMA, Execute

LOCK = 0x656C7361  # "elsa": the advisory lock of whoever writes

TABLES = [
    "CREATE SCHEMA elsa",
    "CREATE TABLE elsa.version (version INTEGER NOT NULL)",
    f"INSERT INTO elsa.version VALUES ({SCHEMA})",
    """CREATE TABLE elsa.events (
        who TEXT NOT NULL, image TEXT NOT NULL,
        label TEXT NOT NULL CHECK (label IN ('normal', 'anomaly', 'unsure', '')),
        request TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL, model BIGINT, score DOUBLE PRECISION,
        strategy TEXT NOT NULL, probability DOUBLE PRECISION, undoes BIGINT UNIQUE, at TEXT NOT NULL,
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY)""",
    "ALTER TABLE elsa.events ADD FOREIGN KEY (undoes) REFERENCES elsa.events (id)",
    "CREATE INDEX events_of_a_person ON elsa.events (who, id)",
    """CREATE TABLE elsa.models (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at TEXT NOT NULL, folder TEXT NOT NULL,
        "after" BIGINT NOT NULL, about TEXT NOT NULL)""",
    """CREATE TABLE elsa.uses (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at TEXT NOT NULL,
        model BIGINT NOT NULL REFERENCES elsa.models (id))""",
    """CREATE FUNCTION elsa.refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'rows of % are never changed', TG_TABLE_NAME; END $$""",
    *(
        f"CREATE TRIGGER never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON elsa.{table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION elsa.refuse()"
        for table in ("events", "models", "uses")
    ),
]


class PostgresDatabase:
    """One connection, which the threads of a process take in turn; made again after the server went away."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.name = re.sub(r"(?<=://)([^:@/]*):[^@/]*@|(?<=password=)[^&]*", lambda part: _hidden(part[1]), url)
        self._turn = threading.Lock()
        self._connection: psycopg.Connection | None = None
        with self._turn, _one_line(self.name):
            self._open()

    def _open(self) -> psycopg.Connection:
        if self._connection is not None and not self._connection.closed:
            with suppress(psycopg.OperationalError):  # the server may have gone and come back since
                self._connection.execute("")
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._url, autocommit=True, connect_timeout=10)
            try:
                self._prepare(self._connection)
            except BaseException:
                self._connection.close()
                raise
        return self._connection

    def _prepare(self, connection: psycopg.Connection) -> None:
        connection.execute("SET search_path TO elsa")
        connection.execute("SET synchronous_commit TO on")  # an acknowledged label is on the disk, whatever the default
        if connection.execute("SHOW fsync").fetchone() != ("on",):
            raise UserError(f"{self.name} runs with fsync off and would lose labels with the power: set fsync = on")
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            if connection.execute("SELECT to_regnamespace('elsa')").fetchone() == (None,):
                for statement in TABLES:
                    connection.execute(statement)
            if connection.execute("SELECT to_regclass('elsa.version')").fetchone() == (None,):
                raise UserError(f"{self.name} has a schema `elsa` of another program: choose another database")
            row = connection.execute("SELECT version FROM elsa.version").fetchone()
        if row is None or row[0] > SCHEMA:
            raise UserError(
                f"{self.name} was written by a newer elsa (schema {row and row[0]}, this one reads up to {SCHEMA}): "
                "upgrade elsa"
            )

    @contextmanager
    def write(self) -> Iterator[Execute]:
        """A transaction that excludes every other writer, durable when it ends."""
        with self._turn, _one_line(self.name):
            connection = self._open()
            with connection.transaction():
                # One writer at a time, so that ids become visible in their order: who has read up to an id has read
                # all below it.
                connection.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
                yield self._execute

    @contextmanager
    def read(self) -> Iterator[Execute]:
        """Statements that see what is committed."""
        with self._turn, _one_line(self.name):
            self._open()
            yield self._execute

    def close(self) -> None:
        """Let go of the server."""
        with self._turn:
            if self._connection is not None:
                self._connection.close()

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple]:
        assert self._connection is not None
        cursor = self._connection.execute(statement.replace("?", "%s"), values)
        return cursor.fetchall() if cursor.description else []


def _hidden(user: str | None) -> str:
    return "***" if user is None else f"{user}:***@"


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turns what the server says about itself into a line that tells what to do."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.errors.InsufficientPrivilege) as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"{name}: {said}: nothing was acknowledged; check that the server runs and lets you in, then try again"
        ) from error
