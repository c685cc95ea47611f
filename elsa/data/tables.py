"""Manifests and label files: CSV, TSV, JSONL or Parquet as columns of plain values."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from elsa.errors import UserError
from elsa.labels import encode_labels

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
# What reading a Parquet file raises where it is damaged, or holds text that is no UTF-8 or times that Python lacks.
PARQUET_ERRORS = (
    pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, NotImplementedError,
    MemoryError,
)  # fmt: skip
Columns = dict[str, list[Any]]
MOST_DIGITS = 100  # Python refuses to read an int of more than 4,300


def read_table(path: Path) -> Columns:
    """The columns of a table, all of one length; the kind of file follows from its suffix."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: tables end in {', '.join(SUFFIXES)}; this one ends in {suffix or 'nothing'}")
    if suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # Excel writes a byte order mark
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return _read_jsonl(path, text) if suffix in (".jsonl", ".ndjson") else _read_csv(path, text)


def open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    """A Parquet file that is read piece by piece: pages stream through a small buffer, whatever its row groups hold."""
    try:
        return pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except PARQUET_ERRORS as error:
        raise UserError(f"{path} is not a Parquet file, or is incomplete: {_one_line(error)}") from error


def check_label_words(words: list[Any], where: str, names: list[str]) -> list[str]:
    """The words with None as ''; anything else than the three words is refused, naming the table and the image."""
    words = [_as_number(word) if isinstance(word, str) else word for word in words]
    try:
        encode_labels(words, names)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return [word or "" for word in words]


def _as_number(word: str) -> str | int:
    """A CSV has no types: digits are turned back into a number, so that the reason why numbers are refused is told."""
    digits = word.removeprefix("-")
    return int(word) if digits.isdecimal() and len(digits) < MOST_DIGITS else word


def _read_parquet(path: Path) -> Columns:
    file = open_parquet(path)
    try:
        columns = file.read().to_pydict()
    except PARQUET_ERRORS as error:
        raise UserError(f"{path} is damaged: {_one_line(error)}") from error
    if len({len(values) for values in columns.values()}) > 1:
        raise UserError(f"{path} is damaged: its columns differ in length; write it again")
    return columns


def _read_csv(path: Path, text: str) -> Columns:
    header_line = text.partition("\n")[0]
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=header_line.count)
    reader = csv.reader(text.splitlines(keepends=True), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) != len(header):
            raise UserError(f"{path}, line 1: a column name occurs twice in {header}; rename one")
        columns: Columns = {name: [] for name in header}
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(row)} values for the {len(header)} columns {header}; "
                    f'put values that contain "{delimiter}" in double quotes'
                )
            for name, value in zip(header, row, strict=True):
                columns[name].append(value)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from error
    return columns


def _read_jsonl(path: Path, text: str) -> Columns:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}") from error
        except (RecursionError, ValueError) as error:  # brackets within brackets, or an int of thousands of digits
            raise UserError(f"{path}, line {number} is no row of a table: {_one_line(error)}") from error
        if not isinstance(row, dict):
            raise UserError(f'{path}, line {number}: expected one JSON object per line, like {{"path": "a.png"}}')
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
