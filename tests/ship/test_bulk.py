"""Bulk scoring: every row once, whatever is killed, from every kind of source, refused in one line where it must be."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import elsa.ship.bulk
import elsa.ship.bulk_source
import elsa.ship.bulk_table
from elsa.cli import run
from elsa.data.images import BrokenImageError
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.elsa import Elsa
from elsa.saved import open_model, save_model
from elsa.ship.bulk import ahead
from elsa.ship.bulk_source import RemoteFile, survey
from elsa.ship.bulk_table import SCORED, Judge, write_ranked

PHOTOS = 23


def png(seed, size=32):
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def write_images(path, contents, names=None, row_group_size=None):
    rows = [{"bytes": c, "path": names[i] if names else None} for i, c in enumerate(contents)]
    schema = pa.schema([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))])
    pq.write_table(pa.table({"image": rows}, schema=schema), path, row_group_size=row_group_size)


def rows_of(path):
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    return pq.read_table(path).to_pylist()


def shards_of(folder):
    return [row for part in sorted(folder.glob("part-*.parquet")) for row in rows_of(part)]


def told(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error")]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """23 pictures in two folders; 005 is torn, 017 is empty."""
    folder = tmp_path_factory.mktemp("bulk") / "photos"
    (folder / "b").mkdir(parents=True)
    for number in range(PHOTOS):
        place = folder / "b" if number % 3 == 0 else folder
        content = png(number)
        (place / f"{number:03}.png").write_bytes(content[:90] if number == 5 else b"" if number == 17 else content)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bulk-model") / "m"
    images = torch.stack([torch.from_numpy(np.array(Image.open(io.BytesIO(png(s))))) for s in range(40)])
    settings = {"pretrain_epochs": 1, "finetune_epochs": 1, "num_prototypes": 8, "views": 2}
    detector = Elsa(preset="cpu", **settings).fit(images.permute(0, 3, 1, 2).contiguous(), [""] * 40)
    preprocessing = {"size": 32, "channels": 3, "resize": "stretch", "pixel_limit": 10_000_000}
    save_model(detector, folder, {"preprocessing": preprocessing})
    return folder


@pytest.fixture(scope="module")
def expected(photos, model):
    """The scores of the library, by name."""
    detector, about = open_model(model)
    loaded = load_images(open_source(photos), **about["preprocessing"])
    return dict(zip(loaded.names, detector.anomaly_score(loaded.images).tolist(), strict=True))


def test_progress_shows_from_the_start_and_on_a_cpu_every_few_images(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("elsa.terminal.SECONDS_BETWEEN_LINES", 0.0)
    write_images(tmp_path / "many.parquet", [png(0)] * 300)
    assert score(model, tmp_path / "many.parquet", tmp_path / "out.csv") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("score ")]
    assert [line.split()[1] for line in lines] == ["0/300", "128/300", "256/300", "300/300"]


def score(model, source, out, *options):
    return run(["score", str(model), str(source), "--out", str(out), "--device", "cpu", "--workers", "1", *options])


def test_shards_hold_every_row_once_in_the_order_of_the_source(model, photos, expected, tmp_path, capsys):
    assert score(model, photos, tmp_path / "out", "--shard-size", "5", "--false-alarms", "0.5") == 0
    rows = shards_of(tmp_path / "out")
    assert [row["path"] for row in rows] == sorted([*expected, "005.png", "017.png"])
    assert {row["path"]: row["score"] for row in rows if row["score"] is not None} == expected
    assert {row["path"]: bool(row["error"]) for row in rows if row["error"]} == {"005.png": True, "017.png": True}
    assert all((row["verdict"] == "anomaly") == (row["p_value"] <= 0.5) for row in rows if not row["error"])
    assert {(row["p_value"], row["verdict"]) for row in rows if row["error"]} == {(None, "")}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [(s["file"], s["first"], s["stop"]) for s in manifest["shards"]] == [
        ("part-00000.parquet", 0, 5), ("part-00001.parquet", 5, 10), ("part-00002.parquet", 10, 15),
        ("part-00003.parquet", 15, 20), ("part-00004.parquet", 20, 23),
    ]  # fmt: skip
    assert manifest["images"] == PHOTOS
    assert manifest["finished"]["scored"] == PHOTOS - 2
    assert sorted(os.listdir(tmp_path / "out")) == ["manifest.json", *(f"part-{n:05}.parquet" for n in range(5))]
    assert "could not be read (2)" in capsys.readouterr().out


def test_one_table_is_ranked_however_many_shards_and_buckets_it_took(
    model, photos, expected, tmp_path, capsys, monkeypatch
):
    assert score(model, photos, tmp_path / "one.csv") == 0
    monkeypatch.setattr(elsa.ship.bulk_table, "BUCKET_ROWS", 3)
    monkeypatch.setattr(elsa.ship.bulk_table, "SAMPLED", 2)
    for name in ("many.csv", "many.parquet"):
        assert score(model, photos, tmp_path / name, "--shard-size", "4") == 0
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "many.csv").read_bytes()
    rows = rows_of(tmp_path / "many.parquet")
    assert [row["path"] for row in rows] == [
        *sorted(expected, key=lambda name: (-expected[name], name)), "005.png", "017.png",
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["many.csv", "many.parquet", "one.csv"]


def test_rows_that_tie_are_ranked_by_name_and_share_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(elsa.ship.bulk_table, "BUCKET_ROWS", 2)
    for number in range(3):
        names = [f"{letter}{number}" for letter in "cab"]
        table = pa.table([names, [1.0, None, 1.0 + number], ["", "broken", ""]], schema=SCORED)
        pq.write_table(table, tmp_path / f"{number}.parquet")
    shards = [tmp_path / f"{number}.parquet" for number in range(3)]
    summary = write_ranked(tmp_path / "out.csv", shards, Judge(torch.tensor([0.5, 2.5]), 1.5), tmp_path)
    rows = rows_of(tmp_path / "out.csv")
    assert [row["path"] for row in rows] == ["b2", "b1", "b0", "c0", "c1", "c2", "a0", "a1", "a2"]
    assert [row["p_value"] for row in rows[:3]] == [str(1 / 3), str(2 / 3), str(2 / 3)]
    assert [row["verdict"] for row in rows] == ["anomaly"] * 2 + ["normal"] * 4 + [""] * 3
    assert (summary.scored, summary.anomalies, summary.broken) == (6, 2, 3)


def test_parquet_files_of_images_keep_their_paths_or_get_row_numbers(model, photos, expected, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    contents = [(photos / name).read_bytes() for name in expected]
    write_images(source / "named.parquet", contents[:9], list(expected)[:9], row_group_size=4)
    write_images(source / "unnamed.parquet", [*contents[9:], None, b"rubbish"], row_group_size=3)
    assert score(model, source, tmp_path / "out", "--shard-size", "5") == 0
    rows = shards_of(tmp_path / "out")
    assert [row["path"] for row in rows[:9]] == [f"named.parquet/{name}" for name in list(expected)[:9]]
    assert [row["path"] for row in rows[9:]] == [f"unnamed.parquet/row-{n:05}" for n in range(len(expected) - 7)]
    assert [row["score"] for row in rows[:-2]] == list(expected.values())
    assert [row["error"] for row in rows[-2:]] == [
        "the record holds no image",
        "not an image in a known format (JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF)",
    ]


def test_two_rows_of_one_path_are_told_apart(tmp_path):
    write_images(tmp_path / "twice.parquet", [png(1), png(2)], ["a.png", "a.png"])
    origin = survey(tmp_path / "twice.parquet", None)
    assert [name for name, _ in origin.rows(0, 2, Path())] == ["row-00000", "row-00001"]


def test_rows_behind_a_damaged_page_say_so_and_the_others_are_read(tmp_path):
    path = tmp_path / "t.parquet"
    write_images(path, [png(seed, 64) for seed in range(12)], row_group_size=4)
    origin = survey(path, None)
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xff" * 200)
    kinds = [type(content).__name__ for _, content in origin.rows(0, 12, Path())]
    assert kinds == ["bytes"] * 4 + ["BrokenImageError"] * 8


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_tables_and_packed_files_are_scored_in_ranges_as_well(suffix, model, photos, expected, tmp_path):
    names = sorted(expected)
    if suffix == "csv":
        source = photos.parent / "table.csv"
        source.write_text("path\n" + "".join(f"photos/{name}\n" for name in names))
        names = [f"photos/{name}" for name in names]
    else:
        source = tmp_path / "s.npz"
        np.savez(source, images=np.stack([np.array(Image.open(photos / name)) for name in names]))
        names = [f"image-{n:05}" for n in range(len(names))]
    assert score(model, source, tmp_path / "out", "--shard-size", "8") == 0
    rows = shards_of(tmp_path / "out")
    assert [row["path"] for row in rows] == names
    assert [row["score"] for row in rows] == [expected[name] for name in sorted(expected)]


@pytest.mark.parametrize("kind", ["images", "parquet"])
def test_an_object_store_gives_the_scores_of_the_folder(kind, model, photos, expected, tmp_path):
    store = fsspec.filesystem("memory")
    if kind == "images":
        for path in photos.rglob("*.png"):
            store.pipe_file(f"/bucket/images/{path.relative_to(photos).as_posix()}", path.read_bytes())
        prefix = ""
    else:
        write_images(tmp_path / "p.parquet", [(photos / name).read_bytes() for name in expected], list(expected))
        store.put(str(tmp_path / "p.parquet"), "/bucket/parquet/p.parquet")
        prefix = "p.parquet/"
    assert score(model, f"memory://bucket/{kind}", tmp_path / "out", "--shard-size", "9") == 0
    rows = shards_of(tmp_path / "out")
    assert {row["path"]: row["score"] for row in rows if not row["error"]} == {
        prefix + name: value for name, value in expected.items()
    }
    assert len(rows) == (PHOTOS if kind == "images" else len(expected))


def test_a_store_that_is_away_is_asked_again_and_then_stops_the_job(monkeypatch):
    store, asked = fsspec.filesystem("memory"), []
    store.pipe_file("/away/a.png", b"content")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    good = type(store).cat_file

    def away(self, path, **_):
        asked.append(path)
        if len(asked) < 3:
            raise ConnectionError("no route")
        return good(self, path)

    monkeypatch.setattr(type(store), "cat_file", away)
    assert RemoteFile("memory://away", "a.png").fetch() == b"content"
    with pytest.raises(BrokenImageError, match="cannot be read: FileNotFoundError"):
        RemoteFile("memory://away", "b.png").fetch()
    asked.clear()
    monkeypatch.setattr(type(store), "cat_file", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(elsa.UserError, match="memory://away does not answer: no route; add --resume"):
        RemoteFile("memory://away", "a.png").fetch()


class Stop(BaseException):
    """A kill at a chosen moment."""


def stop_after(monkeypatch, calls):
    """The n-th file to be moved into its place is the last: what kill -9 leaves, at every moment that matters."""
    real, count = os.replace, []

    def replace(*where):
        if len(count) == calls:
            raise Stop
        count.append(1)
        return real(*where)

    monkeypatch.setattr(os, "replace", replace)
    return count


@pytest.mark.parametrize("out", ["out", "s.csv"])
def test_killed_at_every_file_it_writes_it_ends_with_the_same_rows(out, model, photos, tmp_path, monkeypatch):
    options = ["--shard-size", "6"]
    assert score(model, photos, tmp_path / "whole" / out, *options) == 0
    scored, real = [], elsa.ship.bulk.Scorer.score
    monkeypatch.setattr(elsa.ship.bulk.Scorer, "score", lambda self, n, *a: scored.append(n) or real(self, n, *a))
    for kills in range(12):
        with monkeypatch.context() as patched:
            stop_after(patched, kills)  # files
            try:
                assert score(model, photos, tmp_path / out, *options, "--resume") == 0
            except Stop:
                continue
        break
    assert 3 <= kills <= 6
    assert score(model, photos, tmp_path / out, *options, "--resume") == 0
    assert len(scored) <= 4 + 4 + (4 if out == "s.csv" else 0)  # a shard under way at most is scored again at each kill
    if out == "out":
        assert shards_of(tmp_path / out) == shards_of(tmp_path / "whole" / out)
        assert sorted(os.listdir(tmp_path / out)) == sorted(os.listdir(tmp_path / "whole" / out))
    else:
        assert (tmp_path / out).read_bytes() == (tmp_path / "whole" / out).read_bytes()
        assert not list(tmp_path.glob("*.parts"))


@pytest.fixture
def stopped(model, photos, tmp_path, monkeypatch):
    """A job of which one shard is scored."""
    copy = shutil.copytree(photos, tmp_path / "photos")
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        with pytest.raises(Stop):
            score(model, copy, tmp_path / "out", "--shard-size", "6")
    return copy


def test_a_job_that_was_left_is_not_begun_anew_without_a_word(stopped, model, tmp_path, capsys):
    assert score(model, stopped, tmp_path / "out", "--shard-size", "6") == 2
    [line] = told(capsys)
    assert "is left from a job" in line
    assert "--resume" in line


def test_resume_refuses_another_source_model_views_and_shard_size(stopped, model, tmp_path, capsys):
    def refused(words, *options, model=model):
        assert score(model, stopped, tmp_path / "out", "--resume", *options) == 2
        [line] = told(capsys)
        assert words in line

    refused("--shard-size 7", "--shard-size", "7")
    refused("other --views", "--views", "1")
    other = shutil.copytree(model, tmp_path / "other")
    detector, about = open_model(other)
    save_model(detector, other, {"preprocessing": about["preprocessing"], "seconds": 1})
    refused("another MODEL", model=other)
    (stopped / "001.png").write_bytes(png(99))
    refused("another SOURCE, or one that has changed")


def test_resume_refuses_two_at_once_and_files_of_others(stopped, model, tmp_path, capsys):
    if os.name != "posix":
        pytest.skip("no fcntl here")
    code = (
        f"import fcntl, os, time; h = os.open({str(tmp_path / 'out/.work/lock')!r}, os.O_RDWR)\n"
        "fcntl.lockf(h, fcntl.LOCK_EX); print(1, flush=True); time.sleep(30)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        assert score(model, stopped, tmp_path / "out", "--resume") == 2
        assert "another elsa score is writing" in told(capsys)[0]
        assert score(model, stopped, tmp_path / "out") == 2  # not "left from a job, delete it"
        assert "another elsa score is writing" in told(capsys)[0]
        holder.kill()
    assert len(list((tmp_path / "out" / ".work").glob("scored-*"))) == 1  # the other one's work is untouched
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    assert score(model, stopped, tmp_path / "mine") == 2
    assert "holds other files" in told(capsys)[0]
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_a_finished_folder_is_told_again_and_not_scored_again(model, photos, tmp_path, capsys, monkeypatch):
    assert score(model, photos, tmp_path / "out", "--false-alarms", "0.5") == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(elsa.ship.bulk.Scorer, "score", None)
    assert score(model, photos, tmp_path / "out", "--false-alarms", "0.5", "--resume") == 0
    assert capsys.readouterr().out == first
    assert score(model, photos, tmp_path / "out", "--false-alarms", "0.7", "--resume") == 2
    assert "other verdicts" in told(capsys)[0]


def test_fewer_views_are_another_score_without_p_values(model, photos, tmp_path, capsys, expected):
    assert score(model, photos, tmp_path / "s.parquet", "--views", "1") == 0
    assert "No p-values and verdicts" in capsys.readouterr().out
    rows = rows_of(tmp_path / "s.parquet")
    assert {row["p_value"] for row in rows} == {None}
    assert {row["verdict"] for row in rows} == {""}
    detector, about = open_model(model)
    one = load_images(open_source(photos), **about["preprocessing"])
    single = Elsa.from_state(detector.state()[0], json.loads(json.dumps(about["detector"])))
    single.config = type(single.config)(**{**about["detector"]["settings"], "views": 1})
    scores = dict(zip(one.names, single.anomaly_score(one.images).tolist(), strict=True))
    assert {row["path"]: row["score"] for row in rows if not row["error"]} == scores != expected
    for options, words in (
        (["--views", "3"], "fitted to score with 2"),
        (["--views", "1", "--false-alarms", "0.5"], "leave out one"),
    ):
        assert score(model, photos, tmp_path / "t.csv", *options) == 2
        assert words in told(capsys)[0]


def test_a_score_that_is_no_number_is_a_row_with_its_error(model, photos, tmp_path, monkeypatch):
    real = Elsa.anomaly_score

    def odd(self, images):
        scores = real(self, images)
        scores[3] = torch.nan
        return scores

    monkeypatch.setattr(Elsa, "anomaly_score", odd)
    assert score(model, photos, tmp_path / "s.csv") == 0
    rows = rows_of(tmp_path / "s.csv")
    assert sum(row["error"] == "its score is not a number" for row in rows) == 1
    assert len(rows) == PHOTOS


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere://bucket/x", "SOURCE nowhere://bucket/x"),
        ("memory://no-such-bucket", "SOURCE memory://no-such-bucket cannot be opened"),
        ("EMPTY", "holds no images and no Parquet files"),
        ("TORN", "cannot be read as Parquet"),
        ("WORDS", "no column of images"),
    ],
)
def test_sources_that_cannot_be_are_refused_before_anything_is_written(source, words, model, tmp_path, capsys):
    folder = tmp_path / "source"
    folder.mkdir()
    if source == "TORN":
        write_images(folder / "a.parquet", [png(1)] * 50)
        (folder / "a.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-9])
    if source == "WORDS":
        pq.write_table(pa.table({"words": ["a"]}), folder / "a.parquet")
    assert score(model, source if "://" in source else folder, tmp_path / "out") == 2
    [line] = told(capsys)
    assert words in line
    assert not (tmp_path / "out").exists()


def test_names_of_a_huge_folder_are_noted_in_the_order_they_are_met(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(elsa.ship.bulk_source, "SORTED_NAMES", 4)
    monkeypatch.setattr(elsa.ship.bulk_source, "NAMES_AT_ONCE", 3)
    origin = survey(photos, tmp_path / "names.parquet")
    names = [name for name, _ in origin.rows(0, PHOTOS, tmp_path / "names.parquet")]
    assert sorted(names) == open_source(photos).names
    assert [name for name, _ in origin.rows(5, 12, tmp_path / "names.parquet")] == names[5:12]
    monkeypatch.setattr(elsa.ship.bulk_source, "SORTED_NAMES", 100)
    assert survey(photos, None).fingerprint == origin.fingerprint  # whatever order the system lists them in


def test_ahead_makes_a_few_before_they_are_asked_for_and_stops_when_nobody_asks():
    made = []

    def items():
        for number in range(100):
            made.append(number)
            yield number

    taken = ahead(items(), 2)
    assert next(taken) == 0
    time.sleep(0.05)
    assert 2 <= len(made) <= 5
    taken.close()
    assert len(made) < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "elsa-ahead"]
    assert list(ahead(range(7), 2)) == list(range(7))

    def failing():
        yield 1
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        list(ahead(failing(), 2))


def test_the_commands_of_the_page_work(model, photos, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "bulk.md").read_text()
    commands = [line.split()[1:] for line in page.splitlines() if line.startswith("elsa score")]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "MODEL")
    shutil.copytree(photos, "photos")
    os.mkdir("parquet")
    write_images(Path("parquet/a.parquet"), [png(1), png(2)])
    ran = [run([*command, "--device", "cpu"]) for command in commands if "ray" not in command]
    assert ran == [0, 0, 0]
    assert sorted(os.listdir("scores")) == ["manifest.json", "part-00000.parquet"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_processes_that_are_killed_leave_the_rows_of_an_undisturbed_run(model, photos, tmp_path):
    """Real processes, real SIGKILL: of the command and of its workers."""
    start = [sys.executable, "-m", "elsa", "score", str(model), str(photos)]
    how = [
        "--device",
        "cpu",
        "--workers",
        "2",
        "--shard-size",
        "1",
        "--resume",
    ]  # batches of other sizes round otherwise
    quietly = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*start, *how, "--out", str(tmp_path / "whole.csv")], check=True, **quietly)
    command = [*start, *how, "--out", str(tmp_path / "s.csv")]
    for number in range(2):
        before = len(list(tmp_path.glob("s.csv.parts/scored-*")))
        job = subprocess.Popen(command, **quietly)
        try:
            wait_for(lambda before=before: len(list(tmp_path.glob("s.csv.parts/scored-*"))) > before)
            children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
            workers = [int(pid) for pid in children.read_text().split()] if children.exists() else []
            assert job.poll() is None
            os.kill(workers[-1] if number else job.pid, signal.SIGKILL)
            assert job.wait(60) != 0
        finally:
            job.kill()
            job.wait()
        wait_for(lambda workers=workers: not any(is_running(pid) for pid in workers))  # none goes on without its parent
    subprocess.run(command, check=True, **quietly)
    assert (tmp_path / "s.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def wait_for(what, seconds=240):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ctrl_c_before_the_first_shard_leaves_nothing(tmp_path, model, photos, monkeypatch):
    def interrupted(*anything):
        raise KeyboardInterrupt

    monkeypatch.setattr("elsa.ship.bulk._score_missing", interrupted)
    out = tmp_path / "scores.csv"
    assert run(["score", str(model), str(photos), "--out", str(out)]) == 130
    assert list(tmp_path.glob("scores*")) == []
