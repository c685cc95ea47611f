"""Writers killed with -9 at any moment: what was acknowledged is there, exactly once."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from elsa.workspace.store import open_store

WRITER = """
import os, sys, time
from elsa.workspace.events import LabelEvent
from elsa.workspace.store import open_store
store, name = open_store(sys.argv[1]), sys.argv[2]
number = 0
while True:
    requests = [f"{name}-{number}-{part}" for part in range(3)]
    events = [LabelEvent(name, f"{request}.png", "normal", request, sha256="0" * 64) for request in requests]
    ids = store.add(events)
    if number % 5 == 4:
        ids = store.add(events)  # an impatient client
    # Straight to the pipe, whole: the parent reads it whatever happens to this process.
    os.write(1, "".join(f"{request} {id}\\n" for request, id in zip(requests, ids, strict=True)).encode())
    number += 1
    time.sleep(0.002)  # SQLite lets whoever asks first go first: without a pause one process would keep the turn
"""


def write_until_killed(place, writers, rounds, seed):
    """request -> ids acknowledged, by `writers` processes at once, killed and started again `rounds` times."""
    random.seed(seed)
    acknowledged: dict[str, set[int]] = {}
    for turn in range(rounds):
        command = [sys.executable, "-c", WRITER, str(place)]
        running = [
            subprocess.Popen([*command, f"w{turn}-{i}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for i in range(writers)
        ]
        lines = [process.stdout.readline() for process in running]  # all are writing
        time.sleep(random.uniform(0, 0.15))
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
        for first, process in zip(lines, running, strict=True):
            rest, problem = process.stdout.read(), process.stderr.read()
            assert (process.wait(), problem) == (-signal.SIGKILL, b"")
            process.stdout.close()
            process.stderr.close()
            for line in (first + rest).decode().splitlines():
                request, _, number = line.partition(" ")
                acknowledged.setdefault(request, set()).add(int(number))
    return acknowledged


@pytest.mark.slow
def test_every_acknowledged_label_is_there_exactly_once_after_kill_9(place):
    acknowledged = write_until_killed(place, writers=3, rounds=4, seed=0)
    assert len(acknowledged) >= 3 * 4 * 3  # each writer of each round at least once, however busy the machine
    with open_store(place) as store:
        stored: dict[str, list[int]] = {}
        for event in store.events():
            stored.setdefault(event.request, []).append(event.id)
        assert all(len(ids) == 1 for ids in stored.values())
        assert {request: {*stored[request]} for request in acknowledged} == acknowledged
        # A request is stored whole or not at all.
        parts: dict[str, int] = {}
        for request in stored:
            parts[request.rpartition("-")[0]] = parts.get(request.rpartition("-")[0], 0) + 1
        assert set(parts.values()) == {3}
