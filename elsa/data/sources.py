"""Where images come from: folders, manifests, Parquet, CIFAR-10's binary files and .npz, all read as one Source.

Opening a source reads names and labels only; images are read, one after the other, when they are asked for.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow

from elsa.data import packed
from elsa.data.benchmarks import CIFAR10_FILES
from elsa.data.images import Payload
from elsa.data.tables import SUFFIXES, check_label_words, open_parquet, read_table
from elsa.data.vectors import holds_vectors, read_vectors, vector_columns
from elsa.errors import UserError

IMAGE_SUFFIXES = {
    ".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm",
    ".jp2", ".avif",
}  # fmt: skip
LONGEST_NAME, LONGEST_PATH = 255, 4096  # in bytes, on every common file system
LABEL_FOLDERS = {"normal": "normal", "anomaly": "anomaly"}
SPLIT_FOLDERS = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}


@dataclass(frozen=True)
class Source:
    """Images by name, in a fixed order, with what is known about each; pixels are read on demand."""

    path: Path
    kind: str
    """folder, manifest, image-parquet, cifar-10, npz or vectors"""
    names: list[str]
    """Relative POSIX paths, or names within a packed file; no two alike."""
    labels: list[str]
    """'normal', 'anomaly' or '' for each name."""
    extra: dict[str, list[Any]]
    """Further columns, e.g. class, split or group."""
    payloads: Callable[[Sequence[int]], Iterator[Payload]]
    """The files, encoded bytes or pixels of the given records, whose numbers must ascend."""
    stamps: Callable[[], Iterator[tuple[str, int, int]]]
    """(name, bytes, time of change) of every file the images come from."""

    def __len__(self) -> int:
        return len(self.names)

    def payload(self, record: int) -> Payload:
        """The file, encoded bytes or pixels of one record."""
        return next(self.payloads([record]))

    def fingerprint(self) -> str:
        """Changes when a file is added, removed or written to; does not read the images."""
        digest = hashlib.sha256(f"{self.kind}\n{len(self)}\n".encode())
        for name, size, changed in self.stamps():
            digest.update(f"{name}\0{size}\0{changed}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def subset(self, records: Sequence[int]) -> "Source":
        """The same source with the given records only, whose numbers must ascend."""
        whole = self
        return replace(
            whole,
            names=[whole.names[i] for i in records],
            labels=[whole.labels[i] for i in records],
            extra={name: [values[i] for i in records] for name, values in whole.extra.items()},
            payloads=lambda chosen: whole.payloads([records[i] for i in chosen]),
        )


def open_source(source: Path, labels: Path | None = None) -> Source:
    """The images of `source`; where the table `labels` (columns path, label) names an image, its word counts."""
    source = Path(source)
    try:
        is_folder = stat.S_ISDIR(source.stat().st_mode)
    except OSError as error:
        raise UserError(f"SOURCE {source}: {error.strerror}; give a folder, a table or a packed file") from error
    suffix = source.suffix.lower()
    if is_folder:
        place = cifar10_place(source)
        opened = _open_folder(source) if place is None else _open_cifar10(source, place)
    elif suffix == ".parquet" and (column := image_column(open_parquet(source).schema_arrow)) is not None:
        opened = _open_image_parquet(source, column)
    elif holds_vectors(source):
        opened = _open_vectors(source)
    elif suffix in SUFFIXES:
        opened = _open_manifest(source)
    elif suffix == ".npz":
        opened = _open_npz(source)
    else:
        raise UserError(
            f"SOURCE {source}: use a folder, a table ({', '.join(SUFFIXES)}) or an .npz, not a {suffix or 'plain'} file"
        )
    if not opened.names:
        raise UserError(f"SOURCE {source} lists no images")
    return opened if labels is None else _with_labels(opened, Path(labels))


def _open_folder(folder: Path) -> Source:
    names = sorted(walk_images(folder))
    if not names:
        if any(folder.glob("*.parquet")):
            raise UserError(f"SOURCE {folder} holds Parquet files and no images; give one of the Parquet files")
        raise UserError(f"SOURCE {folder} holds no images; looked for {', '.join(sorted(IMAGE_SUFFIXES))} at any depth")
    splits = [_folder_word(folder, name, SPLIT_FOLDERS) for name in names]
    return Source(
        path=folder,
        kind="folder",
        names=names,
        labels=[_folder_word(folder, name, LABEL_FOLDERS) for name in names],
        extra={"split": splits} if any(splits) else {},
        payloads=lambda records: (folder / names[i] for i in records),
        stamps=lambda: _file_stamps(folder, names),
    )


def walk_images(root: Path, folder: Path | None = None, prefix: str = "") -> Iterator[str]:
    """Relative names of all image files below, as they are met: hidden ones skipped, links must stay inside."""
    folder = folder or root
    try:
        with os.scandir(folder) as entries:  # not a list: a folder may hold ten million
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    _check_inside(Path(entry.path), root, entry.path)
                    if entry.is_dir():
                        continue  # its files are met where they lie
                if entry.is_dir():
                    yield from walk_images(root, Path(entry.path), f"{prefix}{entry.name}/")
                elif Path(entry.name).suffix.lower() in IMAGE_SUFFIXES:
                    yield prefix + entry.name
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; change its permissions or move it away") from error


def _check_inside(path: Path, root: Path, given: str) -> None:
    # os.path.realpath, for Path.resolve raises on a loop of links in some versions and not in others
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise UserError(f"{given} leaves the source {root}; copy the file into it, or take a folder that holds both")


def _folder_word(source: Path, name: str, words: dict[str, str]) -> str:
    """What a sub-folder at the first or second level says about an image, such as its label."""
    found = {words[part.casefold()] for part in PurePosixPath(name).parts[:2] if part.casefold() in words}
    if len(found) > 1:
        raise UserError(
            f"{source / name} lies in two folders that contradict each other: {' and '.join(sorted(found))}"
        )
    return found.pop() if found else ""


def _open_manifest(path: Path) -> Source:
    columns = read_table(path)
    given = _path_column(path, columns)
    labels = check_label_words(columns.get("label", [None] * len(given)), str(path), given)
    inside = _Inside(path.parent)
    names = [inside.name_of(str(text), path) for text in given]
    missing = [name for name in dict.fromkeys(names) if not (path.parent / name).is_file()]
    if missing:
        raise UserError(f"{path}: {_some(missing)} not found beside it; paths are relative to the manifest's folder")
    _refuse_contradictions(path, names, labels)
    first: dict[str, int] = {}
    for row, name in enumerate(names):
        first.setdefault(name, row)
    kept = [first[name] for name in sorted(first)]
    names = [names[row] for row in kept]
    return Source(
        path=path,
        kind="manifest",
        names=names,
        labels=[labels[row] for row in kept],
        extra={
            name: [values[row] for row in kept] for name, values in columns.items() if name not in ("path", "label")
        },
        payloads=lambda records: (path.parent / names[i] for i in records),
        stamps=lambda: _file_stamps(path.parent, names),
    )


def _path_column(path: Path, columns: dict[str, list[Any]]) -> list[Any]:
    if "path" not in columns:
        raise UserError(f"{path} has no column `path`; its columns are {', '.join(columns) or 'none'}")
    for row, value in enumerate(columns["path"]):
        if not isinstance(value, str) or not value:
            raise UserError(f"{path}: `path` of row {row} is {value!r}; give the path of an image")
        if not _can_be_a_file_name(value):
            raise UserError(f"{path}: `path` of row {row}, {value!r}, holds what no file name can; correct it")
    return columns["path"]


def _can_be_a_file_name(text: str) -> bool:
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can say
        return False
    return b"\0" not in name and len(name) <= LONGEST_PATH and max(map(len, name.split(b"/"))) <= LONGEST_NAME


class _Inside:
    """Turns the paths of a table into names relative to a folder, and refuses those that leave it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.real_root = os.path.realpath(root)
        self.checked: dict[str, bool] = {}  # realpath costs 50 us, and many files share a folder

    def name_of(self, text: str, table: Path) -> str:
        if "\\" in text and not (self.root / text).exists():
            text = text.replace("\\", "/")  # a table written on Windows
        path = os.path.normpath(os.path.join(self.root, text))
        name = os.path.relpath(path, os.path.normpath(self.root))
        if os.path.isabs(text) and _goes_up(name):  # an absolute path to a folder reached by another name
            name = os.path.relpath(os.path.realpath(path), self.real_root)
        if _goes_up(name) or os.path.isabs(name) or not self._stays(path):
            raise UserError(
                f"{table}: path {text!r} leaves the source, which is the folder of the table; list only files inside it"
            )
        return Path(name).as_posix()

    def _stays(self, path: str) -> bool:
        folder = os.path.dirname(path)
        if folder not in self.checked:
            self.checked[folder] = Path(os.path.realpath(folder)).is_relative_to(self.real_root)
        linked = os.path.islink(path)
        return self.checked[folder] and (not linked or Path(os.path.realpath(path)).is_relative_to(self.real_root))


def _goes_up(relative: str) -> bool:
    return Path(relative).parts[:1] == ("..",)


def _with_labels(source: Source, table: Path) -> Source:
    columns = read_table(table)
    given = _path_column(table, columns)
    if "label" not in columns:
        raise UserError(f"{table} has no column `label`; its columns are {', '.join(columns)}")
    words = check_label_words(columns["label"], str(table), given)
    position = {name: i for i, name in enumerate(source.names)}
    names = [_known_name(text, position, source, table) for text in given]
    _refuse_contradictions(table, names, words)
    unknown = [name for name in dict.fromkeys(names) if name not in position]
    if unknown:
        raise UserError(
            f"{table} labels what SOURCE {source.path} does not hold: {_some(unknown)}; "
            f"its images have names like {source.names[0]!r}"
        )
    labels = list(source.labels)
    for name, word in zip(names, words, strict=True):
        labels[position[name]] = word
    return replace(source, labels=labels)


def _known_name(text: str, position: dict[str, int], source: Source, table: Path) -> str:
    """The source's own name for a path of a label file, which may also be relative to the label file."""
    root = source.path if source.path.is_dir() else source.path.parent
    candidates = [text, text.replace("\\", "/").removeprefix("./")]
    if source.kind in ("folder", "manifest"):
        beside = os.path.join(os.path.realpath(table.parent), text.replace("\\", "/"))
        candidates.append(Path(os.path.relpath(os.path.realpath(beside), os.path.realpath(root))).as_posix())
    return next((name for name in candidates if name in position), text)


def _refuse_contradictions(table: Path, names: list[str], words: list[str]) -> None:
    word_of: dict[str, str] = {}
    for name, word in zip(names, words, strict=True):
        if word_of.setdefault(name, word) != word:
            raise UserError(
                f"{table} gives {name!r} two labels, {word_of[name]!r} and {word!r}; keep the line that is right"
            )


def image_column(schema: pyarrow.Schema) -> str | None:
    """The column of Hugging Face image structs {bytes, path}, if a Parquet file has one."""
    for field in schema:
        if pyarrow.types.is_struct(field.type) and {"bytes", "path"} <= {part.name for part in field.type}:
            return field.name
    return None


def _open_image_parquet(path: Path, column: str) -> Source:
    names, extra = packed.parquet_columns(path, column)
    labels = [""] * len(names)
    if "label" in extra:
        words = packed.class_words(path, extra["label"])
        if not all(isinstance(word, str) for word in words if word) or any(word in LABEL_FOLDERS for word in words):
            labels = check_label_words(words, str(path), names)
            del extra["label"]
        else:
            extra["label"] = words  # the classes of a public data set say nothing of normal and anomalous
    return Source(
        path=path,
        kind="image-parquet",
        names=names,
        labels=labels,
        extra=extra,
        payloads=lambda records: packed.parquet_images(path, column, records),
        stamps=lambda: _file_stamps(path.parent, [path.name]),
    )


def cifar10_place(folder: Path) -> Path | None:
    """The folder with CIFAR-10's binary files: the given one or the one the archive unpacks to."""
    places = (folder, folder / "cifar-10-batches-bin")
    return next((place for place in places if (place / CIFAR10_FILES["test"][0]).is_file()), None)


def _open_cifar10(folder: Path, place: Path) -> Source:
    names, extra = packed.cifar10_columns(place)
    files = [name for part in CIFAR10_FILES.values() for name in part]
    return Source(
        path=folder,
        kind="cifar-10",
        names=names,
        labels=[""] * len(names),
        extra=extra,
        payloads=lambda records: packed.cifar10_images(place, records),
        stamps=lambda: _file_stamps(place, files),
    )


def _open_npz(path: Path) -> Source:
    names, labels, extra = packed.npz_columns(path)
    return Source(
        path=path,
        kind="npz",
        names=names,
        labels=check_label_words(labels, str(path), names),
        extra=extra,
        payloads=lambda records: packed.npz_images(path, records),
        stamps=lambda: _file_stamps(path.parent, [path.name]),
    )


def _open_vectors(path: Path) -> Source:
    names, labels, extra = vector_columns(path)
    return Source(
        path=path,
        kind="vectors",
        names=names,
        labels=check_label_words(labels, str(path), names),
        extra=extra,
        payloads=lambda records: iter(read_vectors(path, records)),
        stamps=lambda: _file_stamps(path.parent, [path.name]),
    )


def _file_stamps(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    for name in names:
        path = folder / name
        try:
            about = path.stat() if path.exists() else path.lstat()  # a link to nothing is for the decoder to report
        except OSError as error:
            raise UserError(f"{path} has gone since the source was opened: {error.strerror}") from error
        yield name, about.st_size, about.st_mtime_ns


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more ({len(names)} in all)"
