"""What only a server can do wrong."""

import threading
from contextlib import closing

import pytest
from said import say

from elsa.errors import UserError
from elsa.workspace.store import open_store

psycopg = pytest.importorskip("psycopg")


def refused(place, match):
    with pytest.raises(UserError, match=match) as found:
        open_store(place)
    assert "\n" not in str(found.value)
    assert "secret" not in str(found.value)


def run(url, *statements):
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        for statement in statements:
            connection.execute(statement)


def test_a_server_that_is_not_there_is_told_in_one_line_without_the_password(tmp_path):
    refused(f"postgresql://ann:secret@/labels?host={tmp_path}", "postgresql://ann:\\*\\*\\*@/labels.*try again")
    refused(f"postgresql:///labels?password=secret&host={tmp_path}", "try again")


def test_a_database_that_does_not_exist(postgres):
    refused(postgres.url("nowhere"), 'database "nowhere" does not exist')


def test_a_schema_of_another_program_is_refused(postgres):
    url = postgres.empty_database()
    run(url, "CREATE SCHEMA elsa", "CREATE TABLE elsa.queen (name TEXT)")
    refused(url, "schema `elsa` of another program")


def test_a_newer_store_is_refused(postgres):
    url = postgres.empty_database()
    open_store(url).close()
    run(url, "UPDATE elsa.version SET version = 2")
    refused(url, "newer elsa .schema 2, this one reads up to 1.: upgrade elsa")


def test_somebody_who_may_not_write_is_told(postgres):
    url = postgres.empty_database()
    run(url, "DROP ROLE IF EXISTS guest", "CREATE ROLE guest LOGIN")
    refused(url.replace("elsa:secret", "guest:secret"), "permission denied")


@pytest.mark.slow
def test_a_killed_server_comes_back_with_all_it_acknowledged_and_the_same_store_goes_on(postgres):
    with open_store(postgres.empty_database()) as store:
        ids = store.add([say(f"{i}.png", "normal") for i in range(3)])
        postgres.stop("immediate")  # no checkpoint: it comes up again from its log
        late = say("late.png", "anomaly")
        with pytest.raises(UserError, match="nothing was acknowledged"):
            store.add([late])
        postgres.start("fsync=off")
        try:
            with pytest.raises(UserError, match="fsync off and would lose labels with the power"):
                store.add([late])
        finally:
            postgres.stop()
            postgres.start()
        assert [event.id for event in store.events()] == ids
        store.add([late])
        assert store.labels()["late.png"].word == "anomaly"


def test_a_connection_lost_in_between_is_made_again(postgres):
    with open_store(postgres.empty_database()) as store:
        ours = "FROM pg_stat_activity WHERE pid != pg_backend_pid() AND backend_type = 'client backend'"
        run(postgres.url("postgres"), f"SELECT pg_terminate_backend(pid, 5000) {ours}")
        assert store.add([say("a.png", "normal")]) == [1]


def test_ids_become_visible_in_their_order(postgres):
    """Otherwise a reader that asks for what is new since the last id would miss a label for ever."""
    url = postgres.empty_database()
    with open_store(url) as store, closing(psycopg.connect(url)) as slow:
        slow.execute("SELECT pg_advisory_xact_lock(%s)", [0x656C7361])  # as a writer does first
        with closing(psycopg.connect(url, autocommit=True)) as other:
            other.execute("SET lock_timeout = '50ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                other.execute("SELECT pg_advisory_xact_lock(%s)", [0x656C7361])
        waiting = threading.Thread(target=store.add, args=([say("a.png", "normal")],))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        slow.rollback()
        waiting.join()
        assert len(store.events()) == 1
