"""Vectors as a source: both files, their names and labels, what is refused, and the whole way through the commands."""

import csv

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elsa.cli import run
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.errors import UserError

N, D = 61, 13


def numbers(seed=0, count=N):
    x = np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)
    x[:, 0] += 4
    x[: count // 8, 1] += 9
    return x


def words(count=N):
    return ["anomaly"] * (count // 8) + ["normal"] * 5 + [""] * (count - count // 8 - 5)


def write(path, x, **columns):
    if path.suffix == ".npz":
        np.savez(path, vectors=x, **{name: np.array(values) for name, values in columns.items()})
    else:
        kind = pa.list_(pa.float64()) if path.stem == "lists" else pa.list_(pa.float32(), x.shape[1])
        pq.write_table(pa.table({"embedding": pa.array(list(x), kind), **columns}), path, row_group_size=17)
    return path


@pytest.mark.parametrize("name", ["v.npz", "fixed.parquet", "lists.parquet"])
def test_vectors_names_labels_and_further_columns_are_read(tmp_path, name):
    path = write(tmp_path / name, numbers(), name=[f"n{i}" for i in range(N)], label=words(), batch=list(range(N)))
    opened = open_source(path)
    assert (opened.kind, len(opened), opened.names[3]) == ("vectors", N, "n3")
    assert opened.labels == words()
    assert opened.extra == {"batch": list(range(N))}
    loaded = load_images(opened)
    assert loaded.decoding is None
    assert torch.equal(loaded.images, torch.from_numpy(numbers()))
    some = load_images(opened.subset([2, 5, 60]))
    assert torch.equal(some.images, torch.from_numpy(numbers()[[2, 5, 60]]))


def test_without_names_and_labels_rows_are_numbered(tmp_path):
    opened = open_source(write(tmp_path / "v.npz", numbers()))
    assert opened.names[:2] == ["vector-00000", "vector-00001"]
    assert set(opened.labels) == {""}


def test_a_table_of_labels_names_vectors(tmp_path):
    (tmp_path / "labels.csv").write_text("path,label\nvector-00003,anomaly\n")
    opened = open_source(write(tmp_path / "v.npz", numbers()), labels=tmp_path / "labels.csv")
    assert opened.labels[3] == "anomaly"


def test_a_manifest_with_boxes_stays_a_manifest(tmp_path):
    pq.write_table(pa.table({"path": ["a.png"], "box": [[0.0, 1.0]]}), tmp_path / "m.parquet")
    with pytest.raises(UserError, match=r"a\.png"):
        open_source(tmp_path / "m.parquet")


def ragged(path):
    pq.write_table(pa.table({"v": [[1.0, 2.0], [3.0]]}), path)


def two_columns(path):
    pq.write_table(pa.table({"v": [[1.0]], "w": [[2.0]]}), path)


@pytest.mark.parametrize(
    ("make", "suffix", "said"),
    [
        (lambda path: np.savez(path, vectors=np.zeros((3, 2), np.int64)), "npz", "use floats"),
        (lambda path: np.savez(path, vectors=np.zeros(3)), "npz", "use floats"),
        (lambda path: np.savez(path, vectors=np.zeros((0, 3))), "npz", "use floats"),
        (lambda path: np.savez(path, vectors=np.full((3, 2), np.nan)), "npz", "vector 0 holds NaN"),
        (lambda path: np.savez(path, vectors=np.ones((3, 2)), labels=np.array(["normal"])), "npz", "1 labels for 3"),
        (lambda path: np.savez(path, vectors=np.ones((2, 2)), name=np.array(["a", "a"])), "npz", "one name"),
        (lambda path: np.savez(path, vectors=np.ones((2, 2)), labels=np.array(["good", ""])), "npz", "good"),
        (ragged, "parquet", "different lengths"),
        (two_columns, "parquet", "several columns"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused_in_one_line(tmp_path, make, suffix, said):
    path = tmp_path / f"v.{suffix}"
    make(path)
    with pytest.raises(UserError, match=said) as refused:
        load_images(open_source(path))
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["v.npz", "v.parquet"])
def test_fit_score_and_evaluate_take_vectors(tmp_path, name, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, numbers(count=200), label=words(200))
    write(tmp_path / f"new-{name}", numbers(seed=1, count=200), label=words(200))
    assert run(["fit", name, "--out", "model", "--set", "num_prototypes=13"]) == 0
    assert run(["score", "model", f"new-{name}", "--out", "s.csv"]) == 0
    rows = list(csv.DictReader((tmp_path / "s.csv").read_text().splitlines()))
    assert len(rows) == 200
    assert {row["path"] for row in rows[:20]} <= {f"vector-{i:05d}" for i in range(25)}
    assert float(rows[0]["p_value"]) < 0.1
    assert run(["evaluate", "model", f"new-{name}"]) == 0
    assert "AUROC" in capsys.readouterr().out


def test_vectors_and_images_are_not_mixed_up(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "v.npz", numbers(count=100))
    np.savez("i.npz", images=np.zeros((5, 32, 32), np.uint8), labels=np.array(["normal"] * 5))
    assert run(["fit", "v.npz", "--out", "model", "--set", "num_prototypes=13"]) == 0
    for command, said in [
        (["fit", "v.npz", "--out", "m", "--method", "elsa+"], "holds vectors, not images"),
        (["fit", "v.npz", "--out", "m", "--encoder", "tiny"], "holds vectors, not images"),
        (["fit", "v.npz", "--out", "m", "--size", "32"], "leave out --size"),
        (["score", "model", "i.npz", "--out", "s.csv"], "holds images, MODEL was fitted on vectors"),
        (["evaluate", "model", "i.npz"], "holds images, MODEL was fitted on vectors"),
        (["serve", "model"], "was fitted on vectors, and the service takes images"),
        (["data", "check", "v.npz"], "only images can be checked"),
    ]:
        assert run(command) == 2
        assert said in capsys.readouterr().err
