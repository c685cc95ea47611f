"""`elsa score` on sources of any size: shards scored by several processes, each written whole, then one table of all.

A job's folder holds its manifest (which model, which source, which rows make a shard), the names of the source's files
and one small Parquet file for each scored shard. A shard that is there is done; a killed job goes on with the others.
"""

import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from elsa import __version__
from elsa.config import ElsaConfig
from elsa.data.images import BrokenImageError, Decoding, decode, quiet_pillow
from elsa.data.parallel import available_cores, ordered_map
from elsa.detectors.contrastive import CSIDetector
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.output import storable, whole_file, write_whole
from elsa.progress import Progress
from elsa.saved import Detector, open_model
from elsa.ship.bulk_source import GO_ON, Origin, RemoteFile, Row, survey
from elsa.ship.bulk_table import SCORED, Judge, Summary, scores_of, write_ranked, write_shards
from elsa.trust.calibrate import discovery_threshold

FORMAT = 1
SHARD_SIZE = 8192
BATCH_BYTES = 32 << 20  # of decoded images that are scored together
LARGEST_BATCH = 1024
LARGEST_BATCH_ON_CPU = 128  # no slower there, and progress shows every few seconds
AHEAD = 2  # batches decoded while one is scored
BEGUN = {".work", ".manifest.json.partial"}  # in a folder whose job was killed at its very beginning

Item = TypeVar("Item")


@dataclass(frozen=True)
class Job:
    """All that a worker, here or on another machine, needs to score a shard."""

    model: Path
    device: str
    views: int | None
    how: Decoding
    origin: Origin
    work: Path
    shard_size: int

    @property
    def listing(self) -> Path:
        """Where the names of the source's files are noted."""
        return self.work / "names.parquet"

    @property
    def shards(self) -> list[Path]:
        """The scored shards, there or not."""
        return [self.work / f"scored-{number:05d}.parquet" for number in range(len(self.names))]

    @property
    def names(self) -> list[str]:
        """The files of a folder of results."""
        return [f"part-{number:05d}.parquet" for number in range(-(-self.origin.count // self.shard_size))]

    def span(self, number: int) -> tuple[int, int]:
        """The first row of a shard, and the row behind its last."""
        start = number * self.shard_size
        return start, min(start + self.shard_size, self.origin.count)

    def missing(self) -> list[int]:
        """The shards that are not scored yet."""
        return [number for number, shard in enumerate(self.shards) if not shard.exists()]


def score_in_bulk(
    model: Path,
    source: str | Path,
    out: Path,
    *,
    detector: Detector,
    about: dict[str, Any],
    limit: float | None,
    fdr: float | None,
    device: str,
    views: int | None,
    engine: str,
    workers: int | None,
    shard_size: int | None,
    resume: bool,
    progress: Progress,
) -> Summary:
    """Score a source of any size and write the table, or the folder of shards; what it found."""
    to_folder = is_folder(out)
    work = out / ".work" if to_folder else out.with_name(f"{out.name}.parts")
    manifest = (out if to_folder else work) / "manifest.json"
    if work.exists() and not resume:
        with _locked(work, out):  # a job under way is no job left behind: nobody should be told to delete it
            pass
    noted = _noted(manifest, out, resume)
    if noted is None and to_folder and out.exists() and {path.name for path in out.iterdir()} - BEGUN:
        raise UserError(f"--out {out} holds other files; give the name of a new folder, or of a .csv or .parquet file")
    if noted is not None and noted["finished"]:
        _check_same(noted, about, survey(source, None), views, shard_size, manifest)
        if (noted["limit"], noted.get("fdr")) != (limit, fdr):
            raise UserError(f"--resume: {out} is finished, with other verdicts; choose another --out for new ones")
        shutil.rmtree(work, ignore_errors=True)
        return Summary(**noted["finished"])
    new_folder = work if not to_folder or out.exists() else out
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work, out):
        try:
            job = _begin(model, source, work, manifest, noted, about, views, shard_size, device)
            _score_missing(job, detector, engine, workers, progress)
            # with fewer views scores are others than those of the held-back images, which the model does not hold
            if fdr is None:
                judge = Judge(detector.calibration_ if views is None else None, limit)
            else:
                scored = map(torch.from_numpy, map(np.copy, scores_of(job.shards)))
                judge = Judge(detector.calibration_, discovery_threshold(scored, detector.calibration_, fdr))
            if to_folder:
                summary = write_shards(out, job.names, job.shards, judge)
                begun = json.loads(manifest.read_bytes())
                _write_json(manifest, {**begun, "limit": limit, "fdr": fdr, "finished": asdict(summary)})
            else:
                summary = write_ranked(out, job.shards, judge, work)
        except (UserError, OSError, KeyboardInterrupt) as error:
            if not any(work.glob("scored-*.parquet")):  # nothing worth going on from
                shutil.rmtree(new_folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or error
            raise UserError(f"cannot write {work}: {reason}; free some space or choose another --out") from error
    shutil.rmtree(work, ignore_errors=True)
    return summary


def is_folder(out: Path) -> bool:
    """Whether --out names a folder of shards: one that is there, or a name without a suffix."""
    return out.is_dir() or not out.suffix


def check_views(detector: Detector, views: int | None) -> None:
    """Refuse a number of views that the model cannot score with."""
    if views is None:
        return
    if not isinstance(detector, (Elsa, CSIDetector)):
        raise UserError(f"--views {views}: {type(detector).__name__} looks at each image in one way; leave --views out")
    if not 1 <= views <= detector.config.views:
        raise UserError(
            f"--views {views}: the model was fitted to score with {detector.config.views}; give 1 to that many"
        )


class Scorer:
    """A detector that turns the rows of a shard into a file of scores, while the next images are decoded."""

    def __init__(self, job: Job, detector: Detector, threads: int) -> None:
        self.job, self.detector, self.threads = job, detector, threads
        if job.views is not None:
            assert isinstance(detector, (Elsa, CSIDetector))
            config: ElsaConfig = dataclasses.replace(detector.config, views=job.views)
            detector.config = config
        per_image = job.how.channels * job.how.size**2
        self.batch = max(
            1, min(LARGEST_BATCH_ON_CPU if job.device == "cpu" else LARGEST_BATCH, BATCH_BYTES // per_image)
        )

    def score(self, number: int, tell: Callable[[int], None] = lambda rows: None) -> int:
        """Score a shard and write its file; how many rows it has. `tell` hears of every batch."""
        names: list[str] = []
        scores: list[float | None] = []
        errors: list[str] = []
        with quiet_pillow():
            for batch in ahead(self._decoded(number), AHEAD):
                found = self._scores([pixels for _, pixels in batch if not isinstance(pixels, str)])
                for name, pixels in batch:
                    score = None if isinstance(pixels, str) else next(found)
                    finite = score is not None and np.isfinite(score)
                    names.append(storable(name))
                    scores.append(score if finite else None)
                    errors.append(pixels if isinstance(pixels, str) else "" if finite else "its score is not a number")
                tell(len(batch))
        with whole_file(self.job.shards[number]) as partial:
            pq.write_table(pa.table([names, scores, errors], schema=SCORED), partial)
        return len(names)

    def _decoded(self, number: int) -> Iterator[list[tuple[str, NDArray[np.uint8] | str]]]:
        start, stop = self.job.span(number)
        rows = self.job.origin.rows(start, stop, self.job.listing)
        decoded = ordered_map(self._decode, rows, self.threads)
        while batch := list(islice(decoded, self.batch)):
            yield batch

    def _decode(self, row: Row) -> tuple[str, NDArray[np.uint8] | str]:
        name, payload = row
        try:
            if isinstance(payload, BrokenImageError):
                raise payload
            return name, decode(payload.fetch() if isinstance(payload, RemoteFile) else payload, self.job.how)
        except BrokenImageError as error:
            return name, str(error)

    def _scores(self, pixels: list[NDArray[np.uint8]]) -> Iterator[float]:
        if not pixels:
            return iter(())
        return iter(self.detector.anomaly_score(torch.from_numpy(np.stack(pixels))).tolist())


def ahead(items: Iterable[Item], count: int) -> Iterator[Item]:
    """The items, up to `count` of them made in a thread of their own before they are asked for."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    wanted = threading.Event()
    wanted.set()

    def make() -> None:
        try:
            for item in items:
                if not wanted.is_set():
                    return
                ready.put(("item", item))
            ready.put(("end", None))
        except BaseException as error:  # handed over, and raised where the item is missed
            ready.put(("error", error))

    maker = threading.Thread(target=make, name="elsa-ahead", daemon=True)
    maker.start()
    try:
        while True:
            kind, what = ready.get()
            if kind == "error":
                raise what
            if kind == "end":
                return
            yield what
    finally:
        wanted.clear()
        while maker.is_alive():  # it may be waiting for room
            with suppress(queue.Empty):
                ready.get_nowait()
            maker.join(0.01)


def worker_scorer(job: Job) -> Scorer:
    """The scorer of one of several processes: one core each, which wastes less than sharing every operation."""
    if job.device == "cpu":
        torch.set_num_threads(1)
    detector, _ = open_model(job.model, job.device)
    return Scorer(job, detector, 1 if job.device == "cpu" else available_cores())


def _begin(
    model: Path,
    source: str | Path,
    work: Path,
    manifest: Path,
    noted: dict[str, Any] | None,
    about: dict[str, Any],
    views: int | None,
    shard_size: int | None,
    device: str,
) -> Job:
    """The job as its manifest has it, or a new one with its manifest."""
    origin = survey(source, None if noted else work / "names.parquet")
    if noted is not None:
        _check_same(noted, about, origin, views, shard_size, manifest)
        shard_size = noted["shard_size"]
    how = Decoding(**about["preprocessing"])
    job = Job(model.absolute(), device, views, how, origin, work.absolute(), shard_size or SHARD_SIZE)
    if noted is None:
        for stale in work.glob("scored-*"):
            stale.unlink()
        ranges = [(*job.span(number), name) for number, name in enumerate(job.names)]
        told = {
            "format": FORMAT,
            "elsa": __version__,
            **_identity(about, origin, views),
            "source": origin.place,
            "images": origin.count,
            "shard_size": job.shard_size,
            "shards": [{"file": name, "first": start, "stop": stop} for start, stop, name in ranges],
            "limit": None,
            "fdr": None,
            "finished": None,
        }
        _write_json(manifest, told)
    return job


def _noted(manifest: Path, out: Path, resume: bool) -> dict[str, Any] | None:
    if not manifest.exists():
        return None
    if not resume:
        raise UserError(
            f"{manifest.parent} is left from a job that wrote --out {out}; go on with --resume, or delete it"
        )
    try:
        noted = json.loads(manifest.read_bytes())
        known = noted["format"] == FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{manifest} is not a manifest of elsa score; delete {manifest.parent}") from error
    if not known:
        raise UserError(f"{manifest} has format {noted['format']}, this version writes {FORMAT}; use its version")
    return noted


def _identity(about: dict[str, Any], origin: Origin, views: int | None) -> dict[str, Any]:
    """What must not change between a job and its resumption."""
    return {"model": about["sha256_json"], "fingerprint": origin.fingerprint, "views": views}


def _check_same(
    noted: dict[str, Any],
    about: dict[str, Any],
    origin: Origin,
    views: int | None,
    shard_size: int | None,
    manifest: Path,
) -> None:
    words = {
        "model": "another MODEL",
        "fingerprint": "another SOURCE, or one that has changed",
        "views": "other --views",
    }
    for key, value in _identity(about, origin, views).items():
        if noted[key] != value:
            raise UserError(f"--resume: {manifest} was begun with {words[key]}; give that one, or choose another --out")
    if shard_size not in (None, noted["shard_size"]):
        raise UserError(f"--shard-size {shard_size}: the job was begun with {noted['shard_size']}; leave it out")


def _score_missing(job: Job, detector: Detector, engine: str, workers: int | None, progress: Progress) -> None:
    missing, total = job.missing(), job.origin.count
    done = total - sum(stop - start for start, stop in map(job.span, missing))
    began, before = time.perf_counter(), done

    def tell(rows: int) -> None:
        nonlocal done
        done += rows
        progress("score", done, total, {"images/s": (done - before) / (time.perf_counter() - began)})

    if missing:
        progress("score", done, total, {})
    workers = workers or (available_cores() if job.device == "cpu" else 1)
    if engine == "ray":
        from elsa.ship.ray_engine import score_on_ray

        finished = score_on_ray(job, missing, workers)
    elif workers == 1 or len(missing) < 2 or job.origin.place.startswith("memory://"):
        # in this process: with a single shard nothing is gained by another, and memory:// exists here alone
        scorer = Scorer(job, detector, available_cores())
        for number in missing:
            scorer.score(number, tell)
        return
    else:
        finished = _score_in_processes(job, missing, min(workers, len(missing)))
    for rows in finished:
        tell(rows)


def _score_in_processes(job: Job, missing: list[int], workers: int) -> Iterator[int]:
    """The rows of each shard, as the shards are done."""
    spawn = multiprocessing.get_context("spawn")  # a forked torch may hang in its thread pool
    pool = ProcessPoolExecutor(workers, spawn, initializer=_start_worker, initargs=(job,))
    try:
        for done in as_completed([pool.submit(_score_shard, number) for number in missing]):
            yield done.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process died, perhaps for want of memory: give fewer --workers than {workers}; {GO_ON}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_scorers: list[Scorer] = []  # of this worker process: one


def _start_worker(job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once and without a traceback
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_the_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    _scorers.append(worker_scorer(job))


def _score_shard(number: int) -> int:
    return _scorers[0].score(number)


def _write_json(path: Path, about: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(about, indent=1) + "\n").encode())


@contextmanager
def _locked(work: Path, out: Path) -> Iterator[None]:
    """Refuse to work where another process does; the kernel frees the lock when a process ends, however it ends."""
    if os.name != "posix":  # fcntl is not everywhere
        yield
        return
    import fcntl

    handle = os.open(work / "lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another elsa score is writing --out {out}; wait for it, or choose another name"
            ) from error
        yield
    finally:
        os.close(handle)
