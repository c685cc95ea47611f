"""Labels in and out of a store: CSV, Parquet, Label Studio's JSON and image tags in the manner of COCO.

What goes out has one row or task per image with everybody's words, so that a conflict is seen and what comes back in is
what went out. A table's column `label` is what `elsa fit --labels` learns from.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from elsa.data.sources import open_source
from elsa.data.tables import read_table
from elsa.errors import UserError
from elsa.output import storable, write_whole
from elsa.workspace.events import WORDS, Label, LabelEvent
from elsa.workspace.prepare import hash_payload
from elsa.workspace.store import Store, open_existing

SUFFIXES = {"csv": ".csv", "parquet": ".parquet", "label-studio": ".json", "coco": ".json"}
FORMATS = tuple(SUFFIXES)
CATEGORIES = {"normal": 1, "anomaly": 2, "unsure": 3}
STRATEGY = "import"


@dataclass(frozen=True)
class Word:
    """What one person says about one image, and where a file says it."""

    image: str
    who: str
    label: str
    place: str


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    added: int
    already: int
    """Words the store had: said by the same person, and still standing."""
    unknown: list[str]
    """Images that are not in the source; their words were left out."""
    conflicts: list[str]
    """Images about which people disagree now."""

    def lines(self) -> list[str]:
        """What a person reads."""
        lines = [f"{self.added:,} labels added, {self.already:,} were there"]
        if self.unknown:
            lines.append(f"{len(self.unknown):,} images are not in the source and were left out: {_some(self.unknown)}")
        if self.conflicts:
            lines.append(f"{len(self.conflicts):,} images on which people disagree: {_some(self.conflicts)}")
        return lines


def export_labels(store: Store, path: Path, kind: str | None = None) -> int:
    """Write every image somebody has a word for; returns how many. The kind follows from the suffix: .csv, .parquet."""
    kind = _kind(path, kind)
    labels = dict(sorted(store.labels().items()))
    if kind in ("csv", "parquet"):
        _write_table(labels, path, kind)
    else:
        content = _label_studio(labels) if kind == "label-studio" else _coco(labels)
        write_whole(path, json.dumps(content, indent=1, ensure_ascii=False).encode(), option="FILE")
    return len(labels)


def import_labels(
    store: Store,
    path: Path,
    who: str = "import",
    names: Sequence[str] | None = None,
    sha256: Callable[[str], str] = lambda name: "",
) -> Imported:
    """Add the words of a file that the store does not have, all of them or none.

    `who` said those without a name. With `names`, images of other names are listed and left out; an image goes by its
    path, or by the last part of it if only one image has that.
    """
    words = read_words(path, who)
    known = None if names is None else _Names(names)
    before = store.labels()
    added, already, unknown = [], 0, dict[str, None]()
    said: dict[tuple[str, str], Word] = {}
    for word in words:
        name = word.image if known is None else known.find(word.image)
        if name is None:
            unknown[word.image] = None
            continue
        first = said.setdefault((name, word.who), word)
        if first.label != word.label:
            raise UserError(
                f"{path}, {word.place}: {word.who} says {word.label!r} of {name!r} and {first.label!r} in "
                f"{first.place}; keep the one that is right"
            )
        if first is not word:
            continue
        if name in before and before[name].people.get(word.who) == word.label:
            already += 1
            continue
        request = f"import {uuid4()}"
        added.append(LabelEvent(word.who, name, word.label, request, sha256=sha256(name), strategy=STRATEGY))
    store.add(added)
    conflicts = [name for name, label in store.labels().items() if label.conflict]
    return Imported(len(added), already, list(unknown), sorted(conflicts))


def import_into(
    workspace: Path, file: Path, *, who: str = "import", source: Path | None = None, store: str | None = None
) -> Imported:
    """The same for a workspace folder; its own source, or the one given, tells the images and their hashes."""
    with open_existing(workspace, store) as opened:
        found = source or _source_of(workspace)
        if found is None:
            return import_labels(opened, file, who)
        images = open_source(found)
        row_of = {storable(name): row for row, name in enumerate(images.names)}
        return import_labels(opened, file, who, list(row_of), lambda name: hash_payload(images.payload(row_of[name])))


def _source_of(workspace: Path) -> Path | None:
    """The source that workspace.json names."""
    path = workspace / "workspace.json"
    if not path.exists():
        return None
    try:
        return Path(json.loads(path.read_text())["source"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give --source") from error


def read_words(path: Path, who: str) -> list[Word]:
    """Everybody's words in a file of any of the kinds; a table tells its kind by its suffix, JSON by what it holds."""
    if path.suffix.lower() != ".json":
        return _words_of_table(path, who)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno} is not JSON: {error.msg} at column {error.colno}") from error
    if isinstance(content, list):
        return [word for number, task in enumerate(content, 1) for word in _words_of_task(path, number, task, who)]
    if isinstance(content, dict) and {"images", "annotations", "categories"} <= content.keys():
        return _words_of_coco(path, content, who)
    raise UserError(
        f"{path} is neither a list of Label Studio's tasks nor has it COCO's images, annotations and categories: "
        "export it again in one of these formats"
    )


def _kind(path: Path, kind: str | None) -> str:
    suffix = path.suffix.lower()
    fitting = [one for one in FORMATS if SUFFIXES[one] == suffix and kind in (None, one)]
    if len(fitting) != 1:
        asked = "" if kind is None else f" --format {kind}"
        raise UserError(
            f"{path}{asked}: labels are written as .csv, as .parquet, or as .json with --format label-studio or coco"
        )
    return fitting[0]


def _write_table(labels: Mapping[str, Label], path: Path, kind: str) -> None:
    rows = list(labels.values())
    table = pyarrow.table(
        {
            "path": pyarrow.array([label.image for label in rows], pyarrow.string()),
            "label": pyarrow.array([label.training_word for label in rows], pyarrow.string()),
            "conflict": pyarrow.array([label.conflict for label in rows], pyarrow.bool_()),
            "words": pyarrow.array(
                [json.dumps(label.people, ensure_ascii=False) for label in rows], pyarrow.string()
            ),
            "at": pyarrow.array([label.event.at for label in rows], pyarrow.string()),
            "sha256": pyarrow.array([label.event.sha256 for label in rows], pyarrow.string()),
        }
    )  # fmt: skip
    sink = pyarrow.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink) if kind == "csv" else pyarrow.parquet.write_table(table, sink)
    write_whole(path, sink.getvalue().to_pybytes(), option="FILE")


def _words_of_table(path: Path, who: str) -> list[Word]:
    columns = read_table(path)
    for name in ("path", "label"):
        if name not in columns:
            raise UserError(f"{path} has no column `{name}`; its columns are {', '.join(columns) or 'none'}")
    first = 2 if path.suffix.lower() in (".csv", ".tsv") else 1  # a header is line 1
    words = []
    for row, (image, label) in enumerate(zip(columns["path"], columns["label"], strict=True)):
        place = f"row {row + first}"
        _check_image(path, place, image)
        everybody = columns.get("words", [None] * len(columns["path"]))[row]
        said = {(columns["who"][row] if "who" in columns else None) or who: label or ""}
        if everybody:
            try:
                said = json.loads(everybody)
            except json.JSONDecodeError as error:
                raise UserError(
                    f'{path}, {place}: `words` is not JSON: {error.msg}; give {{"NAME": "normal"}}'
                ) from error
            if not isinstance(said, dict):
                raise UserError(
                    f'{path}, {place}: `words` is {everybody!r}; give {{"NAME": "normal"}} or leave it empty'
                )
        for person, word in said.items():
            if checked := _checked_word(path, place, word):
                words.append(Word(image, str(person), checked, place))
    return words


def _words_of_task(path: Path, number: int, task: Any, who: str) -> list[Word]:
    place = f"task {number}"
    data = task.get("data") if isinstance(task, dict) else None
    if not isinstance(data, dict) or not isinstance(task.get("annotations", []), list):
        raise UserError(
            f'{path}, {place} is not a task of Label Studio: it needs {{"data": ..., "annotations": [...]}}'
        )
    image = data.get("image")
    _check_image(path, place, image, "data.image")
    words = []
    for annotation in task.get("annotations", []):
        if not isinstance(annotation, dict) or not isinstance(annotation.get("result"), list):
            raise UserError(f"{path}, {place}: an annotation has no list `result`; export it again as JSON")
        if annotation.get("was_cancelled"):
            continue
        for result in annotation["result"]:
            if isinstance(result, dict) and result.get("type") == "choices":
                choices = result.get("value", {}).get("choices")
                if not isinstance(choices, list) or len(choices) != 1:
                    raise UserError(
                        f"{path}, {place}: choices are {choices!r}; one of normal, anomaly, unsure is allowed"
                    )
                words.append(Word(str(image), _person(annotation, who), _checked_word(path, place, choices[0]), place))
    return words


def _person(annotation: Mapping[str, Any], who: str) -> str:
    """Label Studio names the person by number, or by a record with an address."""
    by = annotation.get("completed_by")
    if isinstance(by, dict):
        by = by.get("email") or by.get("id")
    return who if by in (None, "") else str(by)


def _words_of_coco(path: Path, content: Mapping[str, Any], who: str) -> list[Word]:
    name_of: dict[Any, str] = {}
    word_of: dict[Any, str] = {}
    for place, field, ids, value in (
        ("image", "images", name_of, "file_name"),
        ("category", "categories", word_of, "name"),
    ):
        for number, one in enumerate(_list(path, content, field), 1):
            if not isinstance(one, dict) or "id" not in one or not isinstance(one.get(value), str):
                raise UserError(f"{path}, {place} {number} needs an `id` and a `{value}`")
            ids[one["id"]] = one[value]
    words = []
    for number, one in enumerate(_list(path, content, "annotations"), 1):
        place = f"annotation {number}"
        if not isinstance(one, dict) or one.get("image_id") not in name_of or one.get("category_id") not in word_of:
            raise UserError(f"{path}, {place} needs the `image_id` of an image and the `category_id` of a category")
        about = one.get("attributes")
        person = about.get("who") if isinstance(about, dict) else None
        word = _checked_word(path, place, word_of[one["category_id"]])
        words.append(Word(name_of[one["image_id"]], person or who, word, place))
    return words


def _list(path: Path, content: Mapping[str, Any], field: str) -> list:
    if not isinstance(content[field], list):
        raise UserError(f"{path}: `{field}` is not a list; export it again as COCO")
    return content[field]


def _check_image(path: Path, place: str, image: Any, field: str = "path") -> None:
    if not isinstance(image, str) or not image:
        raise UserError(f"{path}, {place}: `{field}` is {image!r}; give the path of an image")


def _checked_word(path: Path, place: str, word: Any) -> str:
    if not isinstance(word, str) or word.casefold() not in WORDS:
        raise UserError(
            f"{path}, {place}: label {word!r}: use normal, anomaly, unsure or nothing; numbers mean different "
            "things to different programs"
        )
    return word.casefold()


def _label_studio(labels: Mapping[str, Label]) -> list[dict[str, Any]]:
    def annotation(label: Label, number: int, who: str, word: str) -> dict[str, Any]:
        choice = {"id": f"w{number}", "from_name": "label", "to_name": "image", "type": "choices"}
        return {
            "completed_by": {"email": who},
            "created_at": label.event.at,
            "result": [choice | {"value": {"choices": [word]}}],
        }

    return [
        {
            "id": number,
            "data": {"image": name, "conflict": label.conflict},
            "annotations": [
                annotation(label, place, who, word) for place, (who, word) in enumerate(label.people.items(), 1)
            ],
        }
        for number, (name, label) in enumerate(labels.items(), 1)
    ]


def _coco(labels: Mapping[str, Label]) -> dict[str, Any]:
    annotations = [
        {"image_id": image, "category_id": CATEGORIES[word], "attributes": {"who": who, "conflict": label.conflict}}
        for image, label in enumerate(labels.values(), 1)
        for who, word in label.people.items()
    ]
    return {
        "info": {"description": "labels of images, one annotation for each person's word"},
        "images": [{"id": image, "file_name": name} for image, name in enumerate(labels, 1)],
        "categories": [{"id": number, "name": word} for word, number in CATEGORIES.items()],
        "annotations": [{"id": number} | one for number, one in enumerate(annotations, 1)],
    }


class _Names:
    """Finds the image of a source that a file means."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)
        self.by_last: dict[str, list[str]] = {}
        for name in names:
            self.by_last.setdefault(name.rpartition("/")[2], []).append(name)

    def find(self, text: str) -> str | None:
        """The image's name in the source; None if there is none or more than one."""
        parts = urlsplit(text)
        paths = [text, text.replace("\\", "/").removeprefix("./"), unquote(parts.path)]
        paths += parse_qs(parts.query).get("d", [])  # how Label Studio names files of a local folder
        for path in paths:
            if path in self.names:
                return path
        last = paths[-1].replace("\\", "/").rpartition("/")[2]
        head, _, rest = last.partition("-")
        uploaded = [rest] if len(head) == 8 and set(head) <= set("0123456789abcdef") else []  # 1a2b3c4d-photo.png
        for candidate in [last, *uploaded]:
            if len(found := self.by_last.get(candidate, [])) == 1:
                return found[0]
        return None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3:,} more"
