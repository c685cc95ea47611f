"""Plain vectors as a source: an .npz with an array `vectors` [N, D], or a Parquet with a column of lists of floats."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from elsa.data.packed import NPZ_ERRORS
from elsa.data.tables import PARQUET_ERRORS, open_parquet
from elsa.errors import UserError


def holds_vectors(path: Path) -> bool:
    """Whether the file is one of vectors; says nothing of whether they can be read."""
    if path.suffix.lower() == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                return "vectors.npy" in archive.namelist() and "images.npy" not in archive.namelist()
        except NPZ_ERRORS:
            return False
    if path.suffix.lower() != ".parquet":
        return False
    # with a column `path` the rows are images, and lists of floats what is known about them, such as boxes
    return "path" not in open_parquet(path).schema_arrow.names and bool(_vector_columns(path))


def vector_columns(path: Path) -> tuple[list[str], list[Any], dict[str, list[Any]]]:
    """Names, labels and further columns; names come from a column `name`, or are numbers."""
    if path.suffix.lower() == ".npz":
        try:
            with np.load(path, allow_pickle=False) as stored:
                columns = {name: stored[name].tolist() for name in stored.files if name != "vectors"}
        except NPZ_ERRORS as error:
            raise UserError(f"{path} is not an .npz of plain arrays, or is damaged: {_one_line(error)}") from error
    else:
        file = open_parquet(path)
        vectors = _the_column(path)
        try:
            columns = file.read(columns=[name for name in file.schema_arrow.names if name != vectors]).to_pydict()
        except PARQUET_ERRORS as error:
            raise UserError(f"{path} is damaged: {_one_line(error)}") from error
    count = len(read_vectors(path))
    labels = columns.pop("labels", None) or columns.pop("label", None)
    if labels is not None and len(labels) != count:
        raise UserError(f"{path} has {len(labels)} labels for {count} vectors; give one word for each")
    extra = {name: values for name, values in columns.items() if isinstance(values, list) and len(values) == count}
    given = extra.pop("name", None)
    if given is None:
        given = [f"vector-{i:0{max(5, len(str(count)))}d}" for i in range(count)]
    names = [str(name) for name in given]
    if len(set(names)) != count:
        raise UserError(f"{path}: two vectors have one name; make the column `name` unique, or leave it out")
    return names, labels or [None] * count, extra


def read_vectors(path: Path, records: Sequence[int] | None = None) -> NDArray[np.float32]:
    """The vectors [N, D], or those of the given records."""
    matrix = _npz_matrix(path) if path.suffix.lower() == ".npz" else _parquet_matrix(path)
    if matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.floating) or 0 in matrix.shape:
        raise UserError(f"{path}: vectors are {matrix.dtype} {list(matrix.shape)}; use floats [N, D]")
    matrix = matrix.astype(np.float32, copy=False)
    if not np.isfinite(matrix).all():
        row = int(np.flatnonzero(~np.isfinite(matrix).all(axis=1))[0])
        raise UserError(f"{path}: vector {row} holds NaN or infinite numbers; embed it again or leave it out")
    return matrix if records is None else matrix[list(records)]


def _npz_matrix(path: Path) -> NDArray[Any]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return stored["vectors"]
    except NPZ_ERRORS as error:
        raise UserError(f"{path} is not an .npz of plain arrays, or is damaged: {_one_line(error)}") from error


def _parquet_matrix(path: Path) -> NDArray[Any]:
    name = _the_column(path)
    try:
        column = open_parquet(path).read(columns=[name]).column(0).combine_chunks()
    except PARQUET_ERRORS as error:
        raise UserError(f"{path} is damaged: {_one_line(error)}") from error
    lengths = pyarrow.compute.list_value_length(column)
    shortest, longest = pyarrow.compute.min_max(lengths).values()
    numbers = column.flatten()
    if column.null_count or numbers.null_count or shortest.as_py() != longest.as_py():
        raise UserError(f"{path}: `{name}` holds missing vectors or vectors of different lengths; all need one length")
    return numbers.to_numpy().reshape(len(column), -1)


def _the_column(path: Path) -> str:
    names = _vector_columns(path)
    if len(names) != 1:
        raise UserError(f"{path} has several columns of vectors, {', '.join(names)}; leave one of them")
    return names[0]


def _vector_columns(path: Path) -> list[str]:
    def is_vector(kind: pyarrow.DataType) -> bool:
        types = pyarrow.types
        lists = types.is_list(kind) or types.is_fixed_size_list(kind) or types.is_large_list(kind)
        return lists and types.is_floating(kind.value_type)

    return [field.name for field in open_parquet(path).schema_arrow if is_vector(field.type)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
