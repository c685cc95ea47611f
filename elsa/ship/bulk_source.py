"""Sources of any size, read in ranges: folders, Parquet of images and object-store URLs, never held as lists of names.

A folder is walked once, and the walk is written down as a table of names: row i of the table is image i of the job.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elsa.data.images import BrokenImageError, Payload
from elsa.data.packed import PARQUET_ROWS
from elsa.data.sources import IMAGE_SUFFIXES, cifar10_place, image_column, open_source, walk_images
from elsa.data.tables import open_parquet
from elsa.errors import UserError

NAMES_AT_ONCE = 4096
SORTED_NAMES = 200_000  # a folder of up to so many images is taken in the order of their names
STREAM = 1 << 20
TRIES = 3
GO_ON = "add --resume to the same command to go on later"

NAMES = pa.schema([("path", pa.binary())])  # bytes: a file name need not be UTF-8

# A row of a source: its name, and its image, the reason why there is none, or (of an object store) the URL it lies at.
Row = tuple[str, "Payload | BrokenImageError | RemoteFile"]


@dataclass(frozen=True)
class RemoteFile:
    """An image in an object store, fetched where it is decoded."""

    place: str
    name: str

    def fetch(self) -> bytes:
        """The file's bytes. A file that is gone is a broken image; a store that is gone stops the job for a while."""
        files, root = fsspec.url_to_fs(self.place)
        for attempt in range(1, TRIES + 1):
            try:
                return files.cat_file(f"{root.rstrip('/')}/{self.name}")
            except (FileNotFoundError, PermissionError) as error:
                raise BrokenImageError("unreadable", f"cannot be read: {type(error).__name__}") from error
            except OSError as error:
                if attempt == TRIES:
                    raise UserError(f"{self.place} does not answer: {' '.join(str(error).split())}; {GO_ON}") from error
                time.sleep(attempt)
        raise AssertionError


@dataclass(frozen=True)
class Piece:
    """One Parquet file of images."""

    path: str
    column: str
    rows: int
    prefix: str
    """What precedes the names of its rows: its own name where there are several files."""
    named: bool
    """Whether every row has a path of its own."""


@dataclass(frozen=True)
class Origin:
    """All that a worker, here or on another machine, needs to read any range of a source."""

    kind: str
    """files, parquet or packed"""
    place: str
    """The folder, file or URL."""
    count: int
    fingerprint: str
    pieces: tuple[Piece, ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether the place is a URL."""
        return "://" in self.place

    def rows(self, start: int, stop: int, listing: Path) -> Iterator[Row]:
        """Names and images from row `start` up to `stop`."""
        if self.kind == "parquet":
            return _parquet_rows(self.pieces, start, stop)
        if self.kind == "packed":
            source = open_source(Path(self.place))
            return zip(source.names[start:stop], source.payloads(range(start, stop)), strict=True)
        names = _read_names(listing, start, stop)
        if self.is_remote:
            return ((name, RemoteFile(self.place, name)) for name in names)
        return ((name, Path(self.place, name)) for name in names)


def survey(source: str | Path, listing: Path | None) -> Origin:
    """Count and fingerprint the images of a source; write their names to `listing`, if given, where they are files."""
    if "://" in str(source):
        return _survey_remote(str(source), listing)
    path = Path(os.path.abspath(source))
    if path.is_dir() and cifar10_place(path) is None:
        return _survey_folder(path, listing)
    if path.suffix.lower() == ".parquet" and image_column(open_parquet(path).schema_arrow) is not None:
        return _survey_parquet(str(path), [(str(path), "", _stamp(path))])
    return _survey_small(path, listing)


def _survey_folder(folder: Path, listing: Path | None) -> Origin:
    def stamped() -> Iterator[tuple[str, str]]:
        return ((name, _stamp(folder / name)) for name in walk_images(folder))

    first = next(stamped(), None)
    if first is not None:
        count, fingerprint = _note_names(stamped(), listing)
        return Origin("files", str(folder), count, fingerprint)
    tables = sorted(path for path in folder.rglob("*.parquet") if not path.name.startswith("."))
    if not tables:
        raise UserError(f"SOURCE {folder} holds no images and no Parquet files of images; give a folder that does")
    files = [(str(path), f"{path.relative_to(folder).as_posix()}/", _stamp(path)) for path in tables]
    return _survey_parquet(str(folder), files)


def _survey_small(path: Path, listing: Path | None) -> Origin:
    """Tables of paths and packed files, whose names open_source holds in memory."""
    source = open_source(path)
    if source.kind != "manifest":
        return Origin("packed", str(path), len(source), source.fingerprint())
    stamps = ((name, f"{size} {changed}") for name, size, changed in source.stamps())
    count, fingerprint = _note_names(stamps, listing)
    return Origin("files", str(path.parent), count, fingerprint)


def _survey_remote(url: str, listing: Path | None) -> Origin:
    try:
        files, root = fsspec.url_to_fs(url)
        about = files.info(root)
    except (ImportError, ValueError) as error:
        raise UserError(f"SOURCE {url}: {error}") from error
    except OSError as error:
        raise UserError(f"SOURCE {url} cannot be opened: {error or type(error).__name__}") from error
    if about["type"] == "file":
        if not root.endswith(".parquet"):
            raise UserError(f"SOURCE {url}: give the URL of a folder of images, or of Parquet files of images")
        return _survey_parquet(url, [(url, "", _remote_stamp(about))])

    def found(suffixes: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for folder, _, inside in files.walk(root, detail=True):
            inner = folder.removeprefix(root).strip("/")
            for name, facts in sorted(inside.items()):
                if PurePosixPath(name).suffix.lower() in suffixes and not name.startswith("."):
                    yield (f"{inner}/{name}" if inner else name), facts

    stamped = ((name, _remote_stamp(facts)) for name, facts in found(IMAGE_SUFFIXES))
    first = next(stamped, None)
    if first is not None:
        count, fingerprint = _note_names(chain([first], stamped), listing)
        return Origin("files", url, count, fingerprint)
    base = url.rstrip("/")
    tables = sorted((f"{base}/{name}", f"{name}/", _remote_stamp(facts)) for name, facts in found({".parquet"}))
    if not tables:
        raise UserError(f"SOURCE {url} holds no images and no Parquet files of images; give a folder that does")
    return _survey_parquet(url, tables)


def _survey_parquet(place: str, files: list[tuple[str, str, str]]) -> Origin:
    pieces, digest = [], hashlib.sha256()
    for path, prefix, stamp in files:
        try:
            with _open_parquet(path) as table:
                column = image_column(table.schema_arrow)
                if column is None:
                    raise UserError(
                        f"{path} has no column of images (structs of bytes and path); take it out of SOURCE"
                    )
                rows = table.metadata.num_rows
                pieces.append(Piece(path, column, rows, prefix, _has_own_paths(table, column)))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}; mend it") from error
        digest.update(f"{prefix}\0{stamp}\0{rows}\n".encode(errors="surrogateescape"))
    return Origin("parquet", place, sum(piece.rows for piece in pieces), digest.hexdigest(), tuple(pieces))


def _has_own_paths(table: pq.ParquetFile, column: str) -> bool:
    paths = pc.struct_field(table.read(columns=[f"{column}.path"]).column(0), "path")
    return not paths.null_count and pc.count_distinct(paths).as_py() == len(paths) and pc.all(pc.not_equal(paths, ""))


def _parquet_rows(pieces: tuple[Piece, ...], start: int, stop: int) -> Iterator[Row]:
    first = 0
    for piece in pieces:
        begin, end = max(start - first, 0), min(stop - first, piece.rows)
        if begin < end:
            yield from _piece_rows(piece, begin, end)
        first += piece.rows


def _piece_rows(piece: Piece, begin: int, end: int) -> Iterator[Row]:
    """Rows of one file; where its pages are damaged, the rows that cannot be reached say so."""
    row = begin
    try:
        with _open_parquet(piece.path) as table:
            for path, content in _structs(table, piece.column, begin, end):
                yield piece.prefix + (path.replace("\\", "/") if piece.named else _row_name(piece, row)), content
                row += 1
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        if "://" in piece.path and not isinstance(error, pa.ArrowException):
            raise UserError(f"{piece.path} does not answer: {reason}; {GO_ON}") from error
        for missing in range(row, end):
            broken = BrokenImageError("unreadable", f"cannot be read from {piece.path}: {reason}")
            yield piece.prefix + _row_name(piece, missing), broken


def _structs(table: pq.ParquetFile, column: str, begin: int, end: int) -> Iterator[tuple[str, bytes | None]]:
    first = 0
    for group in range(table.num_row_groups):
        last = first + table.metadata.row_group(group).num_rows
        if first < end and begin < last:
            at = first
            fields = [f"{column}.bytes", f"{column}.path"]
            for batch in table.iter_batches(PARQUET_ROWS, row_groups=[group], columns=fields):
                low, high = max(begin - at, 0), min(end - at, len(batch))
                at += len(batch)
                if low < high:
                    structs = batch.column(0).slice(low, high - low)
                    yield from zip(pc.struct_field(structs, "path").to_pylist(), _contents(structs), strict=True)
                if at >= end:
                    return
        first = last


def _contents(structs: pa.StructArray) -> list[bytes | None]:
    return pc.struct_field(structs, "bytes").to_pylist()


def _row_name(piece: Piece, row: int) -> str:
    return f"row-{row:0{max(5, len(str(piece.rows)))}d}"


def _open_parquet(path: str) -> pq.ParquetFile:
    if "://" in path:
        files, inner = fsspec.url_to_fs(path)
        return pq.ParquetFile(files.open(inner), pre_buffer=False)
    return pq.ParquetFile(path, buffer_size=STREAM, pre_buffer=False)


def _note_names(stamped: Iterator[tuple[str, str]], listing: Path | None) -> tuple[int, str]:
    """How many files there are, and a fingerprint that does not depend on the order in which they were met."""
    total, count = 0, 0
    writer = pq.ParquetWriter(listing, NAMES) if listing is not None else None
    try:
        held = sorted(islice(stamped, SORTED_NAMES))
        for part in _parts(chain(held, stamped)):
            for name, stamp in part:
                said = hashlib.blake2b(os.fsencode(f"{name}\0{stamp}"), digest_size=16).digest()
                total = (total + int.from_bytes(said)) % (1 << 128)
            count += len(part)
            if writer is not None:
                writer.write_table(pa.table([[os.fsencode(name) for name, _ in part]], NAMES))
    finally:
        if writer is not None:
            writer.close()
    return count, f"{total:032x}"


def _parts(items: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    while part := list(islice(items, NAMES_AT_ONCE)):
        yield part


def _read_names(listing: Path, start: int, stop: int) -> Iterator[str]:
    with pq.ParquetFile(listing) as table:
        for group in range(start // NAMES_AT_ONCE, -(-stop // NAMES_AT_ONCE)):
            first = group * NAMES_AT_ONCE
            names = table.read_row_group(group).column(0)[max(start - first, 0) : stop - first]
            yield from (os.fsdecode(name) for name in names.to_pylist())


def _stamp(path: Path) -> str:
    try:
        about = path.stat()
    except OSError as error:  # a link to nowhere, say: its row will tell
        return str(error.strerror)
    return f"{about.st_size} {about.st_mtime_ns}"


def _remote_stamp(about: dict[str, Any]) -> str:
    """Size and whatever this kind of store says of a file's version."""
    told = [str(about[key]) for key in ("ETag", "etag", "mtime", "LastModified", "created") if key in about]
    return f"{about.get('size')} {' '.join(told)}"
