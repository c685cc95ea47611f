"""What can be wrong with the place of a store, told in one line."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from said import say

from elsa.errors import UserError
from elsa.workspace.store import open_store


def refused(place, match):
    with pytest.raises(UserError, match=match) as found:
        open_store(place)
    assert "\n" not in str(found.value)
    return str(found.value)


@contextmanager
def as_somebody(user=65534):
    """Root may write anywhere; somebody else may not."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(user)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_workspace_is_a_folder_or_a_file_in_it(tmp_path):
    for place in (tmp_path / "new" / "workspace", tmp_path / "new" / "workspace", tmp_path / "other.db"):
        with open_store(place) as store:
            store.add([say("a.png", "normal")])
    assert (tmp_path / "new" / "workspace" / "elsa.db").is_file()
    with open_store(tmp_path / "new" / "workspace") as store:
        assert len(store.events()) == 2
    assert (tmp_path / "other.db").is_file()


def test_every_commit_goes_to_the_disk(tmp_path):
    """Less than FULL (2) syncs the log at checkpoints alone, and a loss of power takes what came after the last."""
    with open_store(tmp_path) as store, store.database.read() as execute:
        assert execute("PRAGMA journal_mode", []) == [("wal",)]
        assert execute("PRAGMA synchronous", []) == [(2,)]


def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "elsa.db"
    path.write_bytes(b"not a database at all " * 100)
    refused(path, "is not a store of elsa, or is damaged")
    assert path.read_bytes() == b"not a database at all " * 100


def test_the_file_of_another_program_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "photos.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE events (id INTEGER)")
    other.close()
    before = path.read_bytes()
    refused(path, "is an SQLite file of another program")
    assert path.read_bytes() == before


def test_a_newer_file_is_refused(tmp_path):
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "elsa.db") as newer:
        newer.execute("PRAGMA user_version = 2")
    newer.close()
    refused(tmp_path, "newer elsa .schema 2, this one reads up to 1.: upgrade elsa")


def test_a_damaged_file_is_refused(tmp_path):
    with open_store(tmp_path) as store:
        store.add([say(f"{i}.png", "normal") for i in range(2000)])
    path = tmp_path / "elsa.db"
    whole = bytearray(path.read_bytes())
    whole[4096 * 6 : 4096 * 30] = os.urandom(4096 * 24)
    path.write_bytes(whole)
    refused(tmp_path, "damaged")


def test_a_truncated_file_is_refused(tmp_path):
    with open_store(tmp_path) as store:
        store.add([say(f"{i}.png", "normal") for i in range(500)])
    path = tmp_path / "elsa.db"
    path.write_bytes(path.read_bytes()[:20_000])
    refused(tmp_path, "damaged")


@pytest.mark.parametrize("place", ["mysql://host/db", "http://host"])
def test_another_kind_of_database_is_refused(place):
    refused(place, "--store .*give a folder, an SQLite file or postgresql://")


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "photo").write_bytes(b"x")
    refused(tmp_path / "photo" / "workspace", "cannot make the folder")


def test_a_place_that_cannot_be_written_is_told_in_one_line():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        with as_somebody():
            refused(Path(folder) / "elsa.db", "cannot be opened; change the folder's permissions")
        Path(folder).chmod(0o755)
        open_store(folder).close()
        (Path(folder) / "elsa.db").chmod(0o444)
        Path(folder).chmod(0o555)
        with as_somebody():
            refused(folder, "permissions or choose another workspace")
        Path(folder).chmod(0o755)


def test_another_program_that_does_not_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr("elsa.workspace.sqlite.PATIENCE", 0.1)
    with open_store(tmp_path) as store:
        other = sqlite3.connect(tmp_path / "elsa.db")
        other.execute("BEGIN IMMEDIATE")
        event = say("a.png", "normal")
        with pytest.raises(UserError, match=r"another program has been writing to it for 0.1 s; close that program"):
            store.add([event])
        other.close()
        assert store.add([event]) == [1]


FILL = """
import resource, sys
from pathlib import Path
from elsa.errors import UserError
from elsa.workspace.events import LabelEvent
from elsa.workspace.store import open_store
store = open_store(sys.argv[1])
store.add([LabelEvent("ann", "a.png", "normal", "first")])
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # a write beyond fails as on a full disk
for number in range(1000):
    try:
        store.add([LabelEvent("ann", "x" * 1000, "normal", str(number))])
    except UserError as error:
        print(number, error)
        break
"""


def test_a_full_disk_is_told_in_one_line_and_keeps_what_was_acknowledged(tmp_path):
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # Python turns the signal into an error, as a disk does
    assert resource.RLIMIT_FSIZE
    done = subprocess.run([sys.executable, "-c", FILL, tmp_path], capture_output=True, text=True, check=True)
    number, _, line = done.stdout.partition(" ")
    assert "disk" in line
    assert line.count("\n") == 1
    with open_store(tmp_path) as store:
        assert [event.request for event in store.events()] == ["first", *map(str, range(int(number)))]


def test_without_psycopg_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "elsa.workspace.postgres", raising=False)
    refused("postgresql://host/db", r"pip install elsa\[postgres\]")


def test_sqlite_alone_loads_no_psycopg(tmp_path):
    code = (
        "import sys; from elsa.workspace.store import open_store\n"
        "open_store(sys.argv[1]); print('psycopg' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
