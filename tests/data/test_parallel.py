import os
import threading
import time

import pytest

from elsa.data.parallel import CHUNK, available_cores, ordered_map


def test_results_keep_the_order_of_the_items():
    def slower_at_first(i):
        time.sleep(0.02 if i < CHUNK else 0)
        return i * i

    assert list(ordered_map(slower_at_first, range(100), workers=3)) == [i * i for i in range(100)]


def test_work_runs_at_the_same_time():
    meeting = threading.Barrier(2, timeout=10)  # broken, with an error, unless two workers arrive
    list(ordered_map(lambda i: meeting.wait() if i % CHUNK == 0 else None, range(2 * CHUNK), workers=2))


def test_few_items_are_taken_in_advance():
    taken = []
    results = ordered_map(lambda i: i, (taken.append(i) or i for i in range(10_000)), workers=2)
    next(results)
    assert len(taken) <= (2 * 2 + 1) * CHUNK
    results.close()


def test_an_error_reaches_the_caller_and_stops_the_work():
    seen = []

    def fail_at_50(i):
        seen.append(i)
        if i == 50:
            raise KeyError("50")
        return i

    with pytest.raises(KeyError, match="50"):
        list(ordered_map(fail_at_50, range(100_000), workers=2))
    assert len(seen) < 1000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("elsa-data")]


def test_cores_are_those_this_process_may_use():
    assert available_cores() in range(1, 1 + (os.cpu_count() or 1))
