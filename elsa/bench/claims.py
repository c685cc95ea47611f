"""Who works on what when several processes fill one plan: a locked file for each group of cells.

The kernel releases a lock when its process ends, however it ends, so no claim of a dead process is ever left to judge.
POSIX locks also hold between machines that share a file system with locking (NFS from version 4 on).
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def claimed(results: Path, plan: str, work: Any) -> Iterator[bool]:
    """Whether this process has the work to itself, until the end of the block; never waits."""
    folder = results.with_name(f".{results.name}.claims")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    name = hashlib.sha256(repr((plan, work)).encode()).hexdigest()[:24]
    handle = os.open(folder / name, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            # The file stays: a deleted one could be locked by one process and made anew by the next.
            yield True
    finally:
        os.close(handle)
