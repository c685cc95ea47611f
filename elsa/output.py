"""Files a command writes: checked before the work, whole or not there after it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elsa.errors import UserError


def check_writable(path: Path, option: str = "--out") -> None:
    """Refuse a place that cannot be written now, before hours of work end there. Leaves nothing behind."""
    folder = Path(path).absolute().parent
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"elsa")
            probe.flush()
    except OSError as error:
        raise UserError(
            f"cannot write {option} {path}: {error.strerror} in {existing}; choose another {option}"
        ) from error


def write_whole(path: Path, payload: bytes, option: str = "--out") -> None:
    """Write a file under a temporary name and rename it: a reader finds the old one or the new one, never a half."""
    with whole_file(path, option) as partial:
        partial.write_bytes(payload)


@contextmanager
def whole_file(path: Path, option: str = "--out") -> Iterator[Path]:
    """A temporary name to write a file of any size to; it takes the place of `path` when the block ends well."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise UserError(
            f"cannot write {option} {path}: {error.strerror or error}; free some space or choose another {option}"
        ) from error
    finally:
        with suppress(OSError):  # on a read-only disk there is nothing to delete and no way to
            partial.unlink()


def storable(name: str) -> str:
    r"""A file name as UTF-8 can hold it: bytes of another encoding, which Linux allows, become \\udcxx."""
    return name.encode(errors="backslashreplace").decode()
