"""Both stores, each on its real database: an SQLite file and a PostgreSQL server of our own."""

import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda place: int(place.parent.name))


class Server:
    """A PostgreSQL server in a folder of its own, on a socket; the server refuses to run as root."""

    def __init__(self, programs: Path, folder: Path, user: str) -> None:
        self.programs, self.data, self.folder, self.user = programs, folder / "data", folder, user
        self.call("initdb", "-U", "elsa", "-A", "trust", "--no-sync", "-D", self.data)
        self.start()

    def call(self, program: str, *arguments: object) -> None:
        as_user = {"user": self.user, "group": pwd.getpwnam(self.user).pw_gid} if os.geteuid() == 0 else {}
        subprocess.run(
            [self.programs / program, *map(str, arguments)],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            **as_user,  # type: ignore[call-overload]
        )

    def start(self, *settings: str) -> None:
        options = f"-k {self.folder} -c listen_addresses= " + " ".join(f"-c {setting}" for setting in settings)
        self.call("pg_ctl", "-D", self.data, "-w", "-l", self.folder / "log", "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        self.call("pg_ctl", "-D", self.data, "-w", "-m", mode, "stop")

    def url(self, database: str) -> str:
        return f"postgresql://elsa:secret@/{database}?host={self.folder}"

    def empty_database(self) -> str:
        import psycopg

        with closing(psycopg.connect(self.url("postgres"), autocommit=True)) as connection:
            connection.execute("SET client_min_messages TO warning")
            connection.execute("DROP SCHEMA IF EXISTS elsa CASCADE")  # ten times faster than a new database
        return self.url("postgres")


@pytest.fixture(scope="session")
def postgres():
    pytest.importorskip("psycopg")
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    if not PROGRAMS or user not in {entry.pw_name for entry in pwd.getpwall()}:
        pytest.skip("PostgreSQL's server programs are not installed")
    folder = Path(tempfile.mkdtemp(prefix="elsa-pg"))  # a socket's path may have 107 characters, tmp_path is longer
    if os.geteuid() == 0:
        shutil.chown(folder, user)
    server = Server(PROGRAMS[-1], folder, user)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Where a store may be opened: a new file or a new database."""
    return tmp_path / "elsa.db" if request.param == "sqlite" else request.getfixturevalue("postgres").empty_database()
