"""Labels out and in again, foreign files, and what is wrong with them in one line."""

import csv
import hashlib
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from said import say

from elsa.cli import run
from elsa.data.sources import open_source
from elsa.data.tables import read_table
from elsa.errors import UserError
from elsa.workspace.exchange import export_labels, import_labels
from elsa.workspace.store import open_store

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from tiny_folder import make_photos

FILES = {"csv": "labels.csv", "parquet": "labels.parquet", "label-studio": "labels.json", "coco": "labels.json"}
ODD = 'sub/<b>Ünï</b>, "x";\n1.png'


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "workspace") as store:
        yield store


@pytest.fixture
def other(tmp_path):
    with open_store(tmp_path / "other") as store:
        yield store


def people(store):
    return {name: label.people for name, label in store.labels().items()}


def fill(store):
    store.add(
        [
            say("a.png", "normal"), say("a.png", "anomaly", "bob"), say(ODD, "anomaly"), say("b.png", "unsure"),
            say("gone.png", "normal"), say("gone.png", ""), say("01.png", "normal", "7"),
        ]
    )  # fmt: skip
    return {"a.png": {"ann": "normal", "bob": "anomaly"}, ODD: {"ann": "anomaly"}, "b.png": {"ann": "unsure"},
            "01.png": {"7": "normal"}}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_what_goes_out_comes_back_in_once(store, other, tmp_path, kind):
    said = fill(store)
    path = tmp_path / FILES[kind]
    assert export_labels(store, path, kind) == 4
    done = import_labels(other, path)
    assert people(other) == said
    assert (done.added, done.already, done.unknown, done.conflicts) == (5, 0, [], ["a.png"])
    again = import_labels(other, path)
    assert (again.added, again.already) == (0, 5)
    assert len(other.events()) == 5


def test_an_import_after_an_undo_brings_the_word_back(store, tmp_path):
    (tmp_path / "l.csv").write_text("path,label\na.png,anomaly\n")
    import_labels(store, tmp_path / "l.csv", who="ann")
    store.undo("ann", "u")
    assert import_labels(store, tmp_path / "l.csv", who="ann").added == 1
    assert people(store) == {"a.png": {"ann": "anomaly"}}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_has_the_words_a_fit_learns_from(store, tmp_path, kind):
    fill(store)
    export_labels(store, tmp_path / FILES[kind])
    columns = read_table(tmp_path / FILES[kind])
    assert dict(zip(columns["path"], columns["label"], strict=True)) == {
        "01.png": "normal", "a.png": "", "b.png": "", ODD: "anomaly",
    }  # fmt: skip
    assert [str(one).lower() for one in columns["conflict"]] == ["false", "true", "false", "false"]


def test_a_table_of_paths_and_labels_is_what_one_person_says(store, tmp_path):
    (tmp_path / "l.csv").write_text("path;label;who\na.png;anomaly;eve\nb.png;Normal;\nc.png;;\n")
    done = import_labels(store, tmp_path / "l.csv", who="boss")
    assert people(store) == {"a.png": {"eve": "anomaly"}, "b.png": {"boss": "normal"}}
    assert done.added == 2


def test_label_studio_tasks_have_its_shape(store, tmp_path):
    fill(store)
    export_labels(store, tmp_path / "l.json", "label-studio")
    task = json.loads((tmp_path / "l.json").read_text())[1]
    assert task["data"] == {"image": "a.png", "conflict": True}
    [ann, bob] = task["annotations"]
    assert (ann["completed_by"], bob["completed_by"]) == ({"email": "ann"}, {"email": "bob"})
    [result] = bob["result"]
    assert result["value"] == {"choices": ["anomaly"]}
    assert (result["type"], result["from_name"], result["to_name"]) == ("choices", "label", "image")


def annotated(image, *annotations):
    return {"id": 1, "data": {"image": image}, "annotations": list(annotations)}


def chosen(word, **more):
    return {"result": [{"type": "choices", "value": {"choices": [word]}}], **more}


def test_label_studio_names_images_in_its_own_ways(store, tmp_path):
    images = ["/data/local-files/?d=sub/a.png", "/data/upload/3/1a2b3c4d-b.png", "https://host/x/c%20d.png", "e.png",
              "/data/upload/3/1a2b3c4d-twice.png"]  # fmt: skip
    tasks = [annotated(image, chosen("Anomaly", completed_by=4)) for image in images]
    tasks.append(annotated("sub/a.png", chosen("normal", was_cancelled=True), {"result": []}))
    (tmp_path / "l.json").write_text(json.dumps(tasks))
    names = ["sub/a.png", "b.png", "deep/c d.png", "x/twice.png", "y/twice.png"]
    done = import_labels(store, tmp_path / "l.json", names=names, sha256=lambda name: f"sha of {name}")
    assert people(store) == {name: {"4": "anomaly"} for name in names[:3]}
    assert done.unknown == images[3:]
    assert "2 images are not in the source and were left out: 'e.png'" in done.lines()[1]
    assert {event.sha256 for event in store.events()} == {f"sha of {name}" for name in names[:3]}


def test_coco_has_images_categories_and_annotations(store, tmp_path):
    fill(store)
    export_labels(store, tmp_path / "l.json", "coco")
    content = json.loads((tmp_path / "l.json").read_text())
    name_of = {one["id"]: one["file_name"] for one in content["images"]}
    word_of = {one["id"]: one["name"] for one in content["categories"]}
    found = [
        (name_of[a["image_id"]], a["attributes"]["who"], word_of[a["category_id"]]) for a in content["annotations"]
    ]
    assert sorted(found) == sorted(
        (name, who, word) for name, said in people(store).items() for who, word in said.items()
    )
    assert len({one["id"] for one in content["annotations"]}) == 5


def test_people_who_disagree_are_shown_and_none_is_overwritten(store, tmp_path):
    store.add([say("a.png", "normal")])
    (tmp_path / "l.csv").write_text("path,label\na.png,anomaly\n")
    done = import_labels(store, tmp_path / "l.csv", who="bob")
    assert done.conflicts == ["a.png"]
    assert done.lines()[-1] == "1 images on which people disagree: 'a.png'"
    assert people(store) == {"a.png": {"ann": "normal", "bob": "anomaly"}}


TASK = annotated("a.png", chosen("normal"))
COCO = {
    "images": [{"id": 1, "file_name": "a.png"}],
    "categories": [{"id": 1, "name": "normal"}],
    "annotations": [{"image_id": 1, "category_id": 1}],
}
WRONG = [
    ("l.csv", "path,label\na.png,normal\nb.png,1\n", "l.csv, row 3: label '1'"),
    ("l.csv", "path,label\n,normal\n", "row 2: `path` is ''"),
    ("l.csv", "image,label\na.png,normal\n", "no column `path`; its columns are image, label"),
    ("l.csv", "path,label\na.png,normal\na.png,anomaly\n", "row 3: me says 'anomaly' of 'a.png' and 'normal' in row 2"),
    ("l.csv", 'path,label,words\na.png,normal,{\n', "row 2: `words` is not JSON"),
    ("l.csv", 'path,label,words\na.png,normal,[]\n', "row 2: `words` is"),
    ("l.json", "[{]", "line 1 is not JSON"),
    ("l.json", "3", "neither a list of Label Studio's tasks nor"),
    ("l.json", json.dumps([TASK, {"data": 3}]), "task 2 is not a task of Label Studio"),
    ("l.json", json.dumps([TASK, annotated("", chosen("normal"))]), "task 2: `data.image` is ''"),
    ("l.json", json.dumps([TASK, annotated("b.png", chosen("cat"))]), "task 2: label 'cat': use normal, anomaly"),
    ("l.json", json.dumps([annotated("b.png", {"result": 3})]), "task 1: an annotation has no list `result`"),
    ("l.json", json.dumps([annotated("b", chosen("normal") | {"result": [{"type": "choices", "value": {}}]})]),
     "task 1: choices are None"),
    ("l.json", json.dumps(COCO | {"images": [{"id": 1}]}), "image 1 needs an `id` and a `file_name`"),
    ("l.json", json.dumps(COCO | {"annotations": [{"image_id": 9, "category_id": 1}]}), "annotation 1 needs"),
    ("l.json", json.dumps(COCO | {"categories": [{"id": 1, "name": "dog"}]}), "annotation 1: label 'dog'"),
    ("l.json", json.dumps(COCO | {"images": {}}), "`images` is not a list"),
    ("l.txt", "a.png normal", "tables end in"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "content", "said"), WRONG)
def test_what_is_wrong_is_told_in_one_line_and_nothing_is_stored(store, tmp_path, file, content, said):
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError) as refused:
        import_labels(store, tmp_path / file, who="me")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert store.events() == []


def test_a_file_that_is_no_text_is_refused(store, tmp_path):
    (tmp_path / "l.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        import_labels(store, tmp_path / "l.json")


@pytest.mark.parametrize(
    ("file", "kind"), [("l.json", None), ("l.txt", None), ("l.csv", "coco"), ("l.json", "csv"), ("l.parquet", "csv")]
)
def test_a_kind_that_does_not_fit_the_file_is_refused(store, tmp_path, file, kind):
    with pytest.raises(UserError, match=r"as .json with --format label-studio or coco"):
        export_labels(store, tmp_path / file, kind)
    assert not (tmp_path / file).exists()


def test_nothing_to_export_is_a_table_without_rows(store, tmp_path):
    assert export_labels(store, tmp_path / "l.csv") == 0
    with open(tmp_path / "l.csv", newline="") as file:
        assert len(list(csv.reader(file))) == 1
    assert import_labels(store, tmp_path / "l.csv").added == 0
    export_labels(store, tmp_path / "l.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "l.parquet").num_rows == 0


def run_elsa(capsys, *arguments):
    code = run([str(argument) for argument in arguments])
    return code, capsys.readouterr()


def test_the_commands_take_labels_out_and_in(store, tmp_path, capsys):
    """Images of the workspace's own source are known by path, and their bytes are noted."""
    make_photos(tmp_path / "photos", count=40)
    first, second, *_ = open_source(tmp_path / "photos").names
    (tmp_path / "workspace" / "workspace.json").write_text(json.dumps({"source": str(tmp_path / "photos")}))
    (tmp_path / "in.csv").write_text(f"path,label\n{first},anomaly\n{second},normal\nelsewhere.png,normal\n")
    code, said = run_elsa(capsys, "labels", "import", tmp_path / "workspace", tmp_path / "in.csv", "--who", "ann")
    assert (code, said.out.splitlines()) == (
        0, ["2 labels added, 0 were there", "1 images are not in the source and were left out: 'elsewhere.png'"],
    )  # fmt: skip
    digest = hashlib.sha256((tmp_path / "photos" / first).read_bytes()).hexdigest()
    assert store.labels()[first].event.sha256 == digest
    code, said = run_elsa(capsys, "labels", "export", tmp_path / "workspace", tmp_path / "out.parquet")
    assert (code, said.out) == (0, f"2 labelled images written to {tmp_path / 'out.parquet'}\n")
    assert read_table(tmp_path / "out.parquet")["label"] == ["anomaly", "normal"]


def test_a_mistyped_workspace_is_refused_and_not_made(tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    code, said = run_elsa(capsys, "labels", "export", tmp_path / "photos", tmp_path / "out.csv")
    assert (code, said.out) == (2, "")
    assert "holds no elsa.db: give the folder of `elsa label`" in said.err
    assert list((tmp_path / "photos").iterdir()) == []


def test_a_damaged_note_of_the_source_is_told(store, tmp_path, capsys):
    (tmp_path / "workspace" / "workspace.json").write_text("{")
    (tmp_path / "in.csv").write_text("path,label\na.png,anomaly\n")
    code, said = run_elsa(capsys, "labels", "import", tmp_path / "workspace", tmp_path / "in.csv")
    assert code == 2
    assert "workspace.json cannot be read" in said.err
