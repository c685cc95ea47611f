"""Work on many images at once, in order and with few of them in memory."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Large enough to make the cost of handing over (50 us) small, small enough to keep 16 photos of 10 MB in memory.
CHUNK = 16


def available_cores() -> int:
    """Cores this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ordered_map(work: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None) -> Iterator[Result]:
    """work(item) for each item, in the order of the items; at most a few chunks per worker are under way.

    Threads, because Pillow lets go of Python's lock while it decodes: as fast as processes (docs/data.md), one copy of
    the code in memory, and nothing to pickle.
    """
    workers = workers or available_cores()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="elsa-data")
    under_way: deque[Future[list[Result]]] = deque()
    try:
        for chunk in _chunks(items):
            under_way.append(pool.submit(lambda chunk: [work(item) for item in chunk], chunk))
            if len(under_way) > 2 * workers:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
