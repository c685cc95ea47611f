"""Manifests and label files as people write them, and the line in the complaint when they are wrong."""

import pyarrow
import pyarrow.parquet
import pytest

from elsa.data.tables import check_label_words, read_table
from elsa.errors import UserError

COLUMNS = {"path": ["a.png", "b,c.png"], "label": ["normal", ""]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", 'path,label\na.png,normal\n"b,c.png",\n'),
        ("t.csv", '\ufeffpath,label\r\na.png,normal\r\n\r\n"b,c.png",\r\n'),
        ("t.csv", "path;label\na.png;normal\nb,c.png;\n"),
        ("t.tsv", "path\tlabel\na.png\tnormal\nb,c.png\t\n"),
        ("T.CSV", ' path , label\na.png,normal\n"b,c.png",""'),
        ("t.jsonl", '{"path": "a.png", "label": "normal"}\n\n{"label": "", "path": "b,c.png"}'),
    ],
)
def test_text_tables(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    assert read_table(tmp_path / name) == COLUMNS


def test_parquet_table_and_absent_values(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table(COLUMNS), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet") == COLUMNS
    (tmp_path / "t.jsonl").write_text('{"path": "a"}\n{"path": "b", "group": 3}')
    assert read_table(tmp_path / "t.jsonl") == {"path": ["a", "b"], "group": [None, 3]}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("t.csv", b"path,label\na.png,normal\na.png,normal,extra\n", r"t.csv, line 3: 3 values for the 2 columns"),
        ("t.csv", b'path,label\na.png,"normal\n', r"t.csv, line 2: unexpected end of data"),
        ("t.csv", b"path,path\na,b\n", r"t.csv, line 1: a column name occurs twice"),
        ("t.csv", "path\nä.png".encode("latin-1"), r"t.csv is not UTF-8 text \(byte 5\)"),
        ("t.jsonl", b'{"path": "a"}\n\n{"path": \n', r"t.jsonl, line 3 is not JSON: .* at column 10"),
        ("t.jsonl", b'"a.png"\n', r"t.jsonl, line 1: expected one JSON object"),
        ("t.parquet", b"PAR1 and nothing else", r"t.parquet is not a Parquet file"),
        ("t.xlsx", b"", r"tables end in .csv, .tsv, .jsonl, .ndjson, .parquet; this one ends in .xlsx"),
    ],
)
def test_malformed_tables_name_the_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint) as caught:
        read_table(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_missing_table_is_named(tmp_path):
    for name in ("t.csv", "t.parquet"):
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            read_table(tmp_path / name)


def test_a_damaged_parquet_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"path": [f"{i}.png" for i in range(1000)]}), path)
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        read_table(path)


def test_label_words():
    assert check_label_words(["normal", None, "", "anomaly"], "t", list("abcd")) == ["normal", "", "", "anomaly"]
    with pytest.raises(UserError, match=r"my\.csv: label 'defect' of b\.png: use 'normal'"):
        check_label_words(["normal", "defect"], "my.csv", ["a.png", "b.png"])


@pytest.mark.parametrize("number", [1, "1", "-1", 0, "0", 1.0, True])
def test_numbers_as_labels_get_the_explanation(number):
    with pytest.raises(UserError, match="is a number, and numbers mean different things"):
        check_label_words([number], "my.csv", ["a.png"])
