"""The process beside the page: embeds the images once and fits the head after every batch of labels.

A process of its own, for the page must answer while it works; a polite one (`os.nice`), and one that ends with the page
that started it. It reads jobs from stdin and tells what it does on stdout, a line of JSON each:

    {"job": "prepare"}
    {"job": "fit", "number": 7, "after": 212, "normal": [rows], "anomaly": [rows]}

    {"stage": "embed", "done": 512, "total": 5500}
    {"prepared": "KEY"}    {"fitted": 7}    {"error": "one line"}

Nothing is pre-trained and nothing is kept between jobs but the encoder, so that a killed process loses one fit.
"""

import argparse
import ctypes
import io
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from elsa.data.sources import open_source
from elsa.encoders import Encoder, parse_encoder
from elsa.errors import UserError
from elsa.head import ElsaHead, HeadConfig
from elsa.jobs import versions
from elsa.output import write_whole
from elsa.saved import save_model
from elsa.trust.calibrate import lowest_false_alarms, score_threshold
from elsa.workspace.prepare import Prepared, prepare

POLITENESS = 10  # of 19; a third of a core for it where the page and others want the rest
FALSE_ALARMS = 0.05
LEAST_PROTOTYPES = 13  # with fewer the loss 1/E is unbounded at the head's temperature
PATIENCE = 60.0  # seconds a new process waits for the one of a killed page to notice that it is alone
SECONDS_BETWEEN_NEWS = 0.2

Job = dict[str, Any]
News = dict[str, Any]


def model_folder(folder: Path, number: int) -> Path:
    """Where the model of that number lies in a workspace."""
    return folder / "models" / f"{number:04d}"


def scores_file(folder: Path, number: int) -> Path:
    """The score of every row under that model."""
    return folder / "models" / f"{number:04d}.scores.npy"


def prototypes_file(folder: Path, number: int) -> Path:
    """The prototype every row is closest to under that model."""
    return folder / "models" / f"{number:04d}.prototypes.npy"


def fit(folder: Path, prepared: Prepared, encoder: Encoder, job: Job, progress: Any) -> None:
    """Fit the head on the embeddings and the labels of the job; the MODEL folder appears last, and whole."""
    began = time.monotonic()
    words = [""] * len(prepared.names)
    for word in ("normal", "anomaly"):
        for row in job[word]:
            words[row] = word
    vectors_ND = prepared.vectors()
    usual = HeadConfig().num_prototypes
    prototypes = min(usual, max(LEAST_PROTOTYPES, len(words) // 3))  # of a small source half is held out
    head = ElsaHead(encoder=encoder, progress=progress, num_prototypes=prototypes).fit(vectors_ND, words)
    progress("prototypes", 0, 1, {})
    _save_array(scores_file(folder, job["number"]), head.train_scores_.numpy())
    _save_array(prototypes_file(folder, job["number"]), head.prototype_of(vectors_ND).numpy().astype(np.int32))
    rate = max(FALSE_ALARMS, lowest_false_alarms(len(head.calibration_)))
    labels = {"normal": len(job["normal"]), "anomaly": len(job["anomaly"])}
    about = {
        "command": job["command"],
        "seed": head.seed,
        "preprocessing": asdict(prepared.decoding),
        "data": {
            "images": len(words),
            "labels": {**labels, "unlabelled": len(words) - sum(labels.values())},
            "key": prepared.key,
        },
        "workspace": {
            "after": job["after"],
            "false_alarms": rate,
            "threshold": score_threshold(head.calibration_, rate),
            "prototypes": len(head.prototypes_KD_),
        },
        "versions": versions(),
        "seconds": round(time.monotonic() - began, 2),
    }
    save_model(head, model_folder(folder, job["number"]), about)


def _save_array(path: Path, array: np.ndarray) -> None:
    file = io.BytesIO()
    np.save(file, array)
    write_whole(path, file.getvalue(), option="--workspace")


class Worker:
    """The page's end: hands over one job at a time and passes on the news, from a thread of its own.

    If the process dies it says so once, as {"died": what it last wrote}; the next job starts another one.
    """

    def __init__(self, folder: Path, source: Path, encoder: str, tell: Callable[[News], None]) -> None:
        self.folder, self.tell = folder, tell
        self._command = [sys.executable, "-m", "elsa.workspace.refit", str(folder), str(source), encoder]
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._closing = False
        self._turn = threading.Lock()

    def send(self, job: Job) -> None:
        """Hand over a job; returns at once."""
        with self._turn:
            if self._closing:
                return
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            with suppress(OSError):  # it has just died, which the listener is about to tell
                self._process.stdin.write(json.dumps(job) + "\n")
                self._process.stdin.flush()

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process, whatever it is doing: what it was fitting is fitted again next time."""
        with self._turn:
            self._closing = True
            process = self._process
        if process is not None and self._listener is not None:
            process.kill()
            self._listener.join()

    def _start(self) -> None:
        log = open(self.folder / "refit.log", "w", encoding="utf-8", errors="replace")  # noqa: SIM115 (handed over)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
        )
        log.close()
        self._listener = threading.Thread(target=self._listen, args=[self._process], name="elsa-refit", daemon=True)
        self._listener.start()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout:
            for line in process.stdout:
                self.tell(json.loads(line))
        with suppress(OSError):  # half a job may be left in the pipe of a process that died
            process.stdin.close()
        code = process.wait()
        if not self._closing:
            lines = (self.folder / "refit.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self.tell({"died": lines[-1] if lines else f"it was ended with code {code}"})


def give_memory_back() -> None:
    """Return what is free to the system: of its own accord glibc keeps more from fit to fit, up to half a GB."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def work(folder: Path, source: Path, encoder_text: str, jobs: "SimpleQueue[Job]", tell: Callable[[News], None]) -> None:
    """Do one job after the other, for ever."""
    encoder: Encoder | None = None
    prepared: Prepared | None = None
    last_news = 0.0

    def progress(stage: str, done: int, total: int, figures: dict[str, float]) -> None:
        nonlocal last_news
        if done >= total or time.monotonic() - last_news > SECONDS_BETWEEN_NEWS:
            last_news = time.monotonic()
            tell({"stage": stage, "done": done, "total": total})

    while True:
        job = jobs.get()
        try:
            encoder = encoder or parse_encoder(encoder_text)
            if prepared is None or job["job"] == "prepare":
                prepared = prepare(folder, open_source(source), encoder, progress)
            if job["job"] == "prepare":
                give_memory_back()
                tell({"prepared": prepared.key})
            else:
                fit(folder, prepared, encoder, job, progress)
                give_memory_back()
                tell({"fitted": job["number"]})
        except UserError as error:
            tell({"error": " ".join(str(error).split())})


def main() -> None:
    """What runs in the process: `python -m elsa.workspace.refit WORKSPACE SOURCE ENCODER`."""
    parser = argparse.ArgumentParser(description="The process beside the page of `elsa label`, which starts it.")
    for name in ("workspace", "source", "encoder"):
        parser.add_argument(name)
    given = parser.parse_args()
    if sys.platform != "win32":
        os.nice(POLITENESS)
    news = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not speak among the news
    jobs: SimpleQueue[Job] = SimpleQueue()
    threading.Thread(target=_read_jobs, args=[jobs], daemon=True).start()
    folder = Path(given.workspace)
    alone = sqlite3.connect(folder / ".refit.lock", timeout=PATIENCE, isolation_level=None)
    alone.execute("BEGIN EXCLUSIVE")  # released by the system when this process ends, however it ends

    def tell(line: News) -> None:
        news.write(json.dumps(line) + "\n")
        news.flush()

    work(folder, Path(given.source), given.encoder, jobs, tell)


def _read_jobs(jobs: "SimpleQueue[Job]") -> None:
    """Pass on jobs until the page is gone, and with it the reason for this process."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
