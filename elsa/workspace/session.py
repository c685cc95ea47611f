"""A labelling session: the workspace of one source, what people said about its images, and the models that follow.

The WORKSPACE folder, for everything that reads it (row i of every file is one image; see prepare.py):

    workspace.json             source, label table, encoder and store it was made with
    images.json                key, names, sha256, records, decoding, broken, shards; written when all below is whole
    images/NAME-HASH/*.u8      the decoded images (elsa.data.shards)
    embeddings.npy             float32 [N, D], one unit vector per image
    elsa.db                    labels and models (elsa.workspace.store), unless --store names a PostgreSQL database
    models/NNNN/               a MODEL folder as `elsa fit` writes it; its model.json has a part "workspace":
                               after (last event learned from), threshold, false_alarms, prototypes
    models/NNNN.scores.npy     float64 [N], the score of every row, each without itself as a neighbour
    models/NNNN.prototypes.npy int32 [N], the prototype every row is closest to
    refit.log                  what the refit process last said on stderr

In the store a model's `folder` is "models/NNNN", and its `about` holds key, threshold, seconds, labels, the estimates
`before` and `now`, and the images that `moved` most.
"""

import getpass
import json
import os
import re
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa.data.sources import Source, open_source
from elsa.errors import UserError
from elsa.model_file import read_model
from elsa.output import write_whole
from elsa.weights import find_mobilenet_v2
from elsa.workspace.estimates import estimate
from elsa.workspace.events import LabelEvent, Labels
from elsa.workspace.prepare import Prepared, encoder_sha256, find_prepared
from elsa.workspace.queries import AUDIT, Asked, State, ask, suspects
from elsa.workspace.refit import News, Worker, model_folder, prototypes_file, scores_file
from elsa.workspace.store import Model, Store, open_store

FORMAT = 1
OURS = re.compile(r"\.?(page\.lock|elsa\.db|workspace\.json|models)")  # what a start that was killed leaves behind
PATIENCE = 5.0  # seconds to wait for a page that is just ending
BATCH = 10  # labels after which the head is fitted again
MOVED = 12
SUSPECTS = 0.05  # of the images that no one has called an anomaly, those shown as suspects
ATTEMPTS = 3
SECONDS_BETWEEN_ESTIMATES = 0.5
MOST_AT_ONCE = 1000

TITLES = {
    "share": "Anomalies among all images",
    "gamma_p": "Anomalies among those without a label",
    "auroc": "AUROC of the scores",
    "false_alarms": "Normal images above the threshold",
    "misses": "Anomalies below the threshold",
}

NOTHING, NORMAL, ANOMALY, UNSURE, CONFLICT = range(5)
CODE_OF = {"": NOTHING, "normal": NORMAL, "anomaly": ANOMALY, "unsure": UNSURE}
WORD_OF = ("", "normal", "anomaly", "unsure", "conflict")


@dataclass(frozen=True)
class View:
    """What one model says about every row."""

    model: Model
    scores: NDArray[np.float64]
    prototypes: NDArray[np.int32]
    threshold: float
    calibration: NDArray[np.float64]
    """Ascending."""
    order: NDArray[np.int64]
    """Rows, most anomalous first."""
    rank: NDArray[np.int64]
    """Place of each row in that order, from 1."""

    def p_value(self, row: int) -> float:
        """The share of normal images expected to score as high."""
        as_high = len(self.calibration) - int(np.searchsorted(self.calibration, self.scores[row]))
        return (1 + as_high) / (len(self.calibration) + 1)


def read_view(folder: Path, model: Model, rows: int) -> View:
    """The files of one model; refused if they are damaged or of other images."""
    number = int(Path(model.folder).name)
    tensors, about = read_model(model_folder(folder, number))
    try:
        scores, prototypes = np.load(scores_file(folder, number)), np.load(prototypes_file(folder, number))
    except (OSError, ValueError) as error:
        raise UserError(f"{model.folder}: its scores cannot be read: {error}; go on with another model") from error
    if not len(scores) == len(prototypes) == rows:
        raise UserError(f"{model.folder} has scores of {len(scores)} images, the source has {rows}; use a later model")
    order = np.argsort(-scores, kind="stable")
    rank = np.empty(rows, np.int64)
    rank[order] = np.arange(1, rows + 1)
    calibration = np.sort(tensors["calibration"].double().numpy())
    return View(model, scores, prototypes, about["workspace"]["threshold"], calibration, order, rank)


class Session:
    """All that the page shows and does. Its methods may be called from many threads at once."""

    def __init__(
        self,
        folder: Path,
        source: Source,
        source_path: Path,
        encoder: str,
        store: Store,
        alone: sqlite3.Connection,
        *,
        who: str,
        batch: int,
    ) -> None:
        self.folder, self.source, self.store, self.who, self.batch = folder, source, store, who, batch
        self._encoder_sha256, self._alone = encoder_sha256(encoder), alone
        self._lock = threading.RLock()  # guards everything below
        self._acting = threading.Lock()  # labels and undos one after the other, so that an undo finds the last action
        self.prepared: Prepared | None = None
        self.view: View | None = None
        self._row: dict[str, int] = {}
        self._given = self._said = self._fitted = np.zeros(0, np.int8)
        self._labels = Labels()
        self._standing: dict[str, list[LabelEvent]] = defaultdict(list)
        self._undone: dict[str, list[LabelEvent]] = defaultdict(list)
        self._work: dict[str, Any] | None = None
        self._job: dict[str, Any] = {}
        self._attempts = 0
        self._trouble = ""
        self._asked = False
        self._next_number = 1
        self._embeddings = np.zeros((0, 0), np.float32)
        self._shown_with: dict[int, int] = {}
        self._ranks: dict[int, NDArray[np.int32] | None] = {}
        self.estimates: list[dict[str, Any]] = []
        self._dirty = threading.Event()
        self._closed = threading.Event()
        self._estimator = threading.Thread(target=self._estimate_for_ever, name="elsa-estimates", daemon=True)
        self.worker = Worker(folder, source_path, encoder, self._hear)

    def start(self) -> None:
        """Go on where the workspace stands: prepare, fit, or show the last model at once."""
        self._estimator.start()
        prepared = find_prepared(self.folder, self.source, self._encoder_sha256)
        if prepared is None:
            self._send({"job": "prepare"}, "read images", len(self.source))
        else:
            self._open(prepared)

    def close(self) -> None:
        """End the refit process and let go of the store; nothing is lost by not calling this."""
        self._closed.set()
        self._dirty.set()
        self.worker.close()
        if self._estimator.is_alive():
            self._estimator.join()
        self.store.close()
        self._alone.close()

    # What people say

    def label(self, who: str, request: str, items: Sequence[dict[str, Any]]) -> list[int]:
        """Store one word for each item; the ids of its events, when they are durable."""
        prepared = self._ready()
        if not 0 < len(items) <= MOST_AT_ONCE:
            raise UserError(f"{len(items)} labels at once: send 1 to {MOST_AT_ONCE}")
        events = []
        for number, item in enumerate(items):
            row = self._row.get(item["name"])
            if row is None:
                raise UserError(f"{item['name']!r} is no image of this source: reload the page")
            events.append(
                LabelEvent(
                    who=who,
                    image=item["name"],
                    label=item["label"],
                    request=f"{request}:{number}",
                    sha256=prepared.sha256[row],
                    model=item.get("model"),
                    score=item.get("score"),
                    strategy=item.get("strategy") or "",
                    probability=item.get("probability"),
                )
            )
        with self._acting:
            ids = self.store.add(events)
            self._sync()
        self._consider()
        return ids

    def undo(self, who: str, request: str) -> list[str]:
        """Take back the last action of a person, however many images it was about; the names of these images.

        Called again with the same request it takes back nothing more.
        """
        self._ready()
        with self._acting:
            self._sync()
            begun = self._undone[request]
            if begun:
                action = begun[0].request.rpartition(":")[0]
            elif self._standing[who]:
                action = self._standing[who][-1].request.rpartition(":")[0]
            else:
                return []
            while self._standing[who] and self._standing[who][-1].request.rpartition(":")[0] == action:
                self.store.undo(who, f"{request}:{len(self._undone[request])}")
                self._sync()
            undone = [event.image for event in self._undone[request]]
        self._consider()
        return undone

    def use_model(self, number: int) -> None:
        """Go back to an earlier model, or forth; labels stay as they are."""
        prepared = self._ready()
        chosen = next((model for model in self.store.models() if model.id == number), None)
        if chosen is None or chosen.about.get("key") != prepared.key:
            raise UserError(f"model {number} is not one of these images: choose one that the page lists")
        view = read_view(self.folder, chosen, len(prepared.names))
        self.store.use_model(number)
        with self._lock:
            self.view = view
        self._dirty.set()

    def refit(self) -> None:
        """Fit now, without waiting for a whole batch of labels."""
        self._ready()
        with self._lock:
            self._asked, self._trouble = True, ""
        self._consider()

    # What the page shows

    def state(self) -> dict[str, Any]:
        """Where everything stands, in numbers; cheap, for every page asks every second or two."""
        if self.prepared is not None:
            self._sync()
        with self._lock:
            work = dict(self._work) if self._work else None
            view, prepared = self.view, self.prepared
            counts = np.bincount(self._said, minlength=len(WORD_OF)).tolist()
            return {
                "phase": "ready" if view else "preparing",
                "key": prepared.key[:12] if prepared else "",
                "images": len(prepared.names) if prepared else len(self.source),
                "broken": len(prepared.broken) if prepared else 0,
                "work": work,
                "trouble": self._trouble,
                "counts": dict(zip(WORD_OF[1:], counts[1:], strict=True)),
                "given": int((self._given != NOTHING).sum()),
                "pending": self._pending(),
                "batch": self.batch,
                "event": self._labels.last,
                "model": view.model.id if view else None,
                "prototypes": int(view.prototypes.max()) + 1 if view else 0,
                "threshold": view.threshold if view else None,
                "estimates": self.estimates,
            }

    def items(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """What the page knows of the images in these rows."""
        prepared = self._ready()
        with self._lock:
            view, labels = self.view, self._labels.of
            found = []
            for row in rows:
                name = prepared.names[row]
                label = labels.get(name) if self._said[row] else None
                found.append(
                    {
                        "row": row,
                        "name": name,
                        "word": WORD_OF[self._said[row]],
                        "given": WORD_OF[self._given[row]],
                        "people": dict(label.people) if label else {},
                        **(
                            {
                                "model": view.model.id,
                                "score": float(view.scores[row]),
                                "p": view.p_value(row),
                                "rank": int(view.rank[row]),
                                "prototype": int(view.prototypes[row]),
                                "flagged": bool(view.scores[row] > view.threshold),
                            }
                            if view
                            else {}
                        ),
                    }
                )
            return found

    def browse(
        self,
        *,
        show: str = "all",
        prototype: int | None = None,
        low: float | None = None,
        high: float | None = None,
        text: str = "",
        order: str = "highest",
        offset: int = 0,
        count: int = 60,
    ) -> dict[str, Any]:
        """Images by what is said and known of them, a page at a time."""
        prepared = self._ready()
        self._sync()
        with self._lock:
            view, said, given = self.view, self._said, self._given
            if view is None:
                raise UserError("there is no model yet: wait until the images are read")
            chosen = {
                "all": np.ones(len(said), bool),
                "unlabelled": (said == NOTHING) & (given == NOTHING),
                "labelled": (said != NOTHING) | (given != NOTHING),
                "normal": self._words() == NORMAL,
                "anomaly": self._words() == ANOMALY,
                "unsure": said == UNSURE,
                "conflict": said == CONFLICT,
                "flagged": view.scores > view.threshold,
                "suspects": self._words() != ANOMALY,
            }[show]
        if prototype is not None:
            chosen = chosen & (view.prototypes == prototype)
        if low is not None:
            chosen = chosen & (view.scores >= low)
        if high is not None:
            chosen = chosen & (view.scores <= high)
        if text:
            wanted = text.casefold()
            named = np.fromiter((wanted in name.casefold() for name in prepared.names), bool, len(prepared.names))
            chosen = chosen & named
        if show == "suspects":
            rows = suspects(self._asked_about(view), np.random.default_rng(0))
            rows = rows[: max(MOVED, int(SUSPECTS * len(rows)))]
        else:
            rows = {"highest": view.order, "lowest": view.order[::-1], "name": np.arange(len(said))}[order]
        rows = rows[chosen[rows]]
        part = rows[offset : offset + count].tolist()
        return {"total": len(rows), "offset": offset, "items": self.items(part)}

    def queue(self, strategy: str, count: int, seed: int) -> list[dict[str, Any]]:
        """The images most worth a label, in the order in which to ask for them."""
        self._ready()
        self._sync()
        with self._lock:
            view = self.view
        if view is None:
            return []
        asked = interleaved(ask(self._asked_about(view), strategy, count, seed))
        shown = self.items([one.index for one in asked])
        return [
            {**item, "strategy": one.strategy, "probability": one.probability}
            for item, one in zip(shown, asked, strict=True)
        ]

    def models(self) -> list[dict[str, Any]]:
        """Every model of these images, newest first."""
        prepared = self._ready()
        with self._lock:
            current = self.view.model.id if self.view else None
        return [
            {
                "id": model.id,
                "at": model.at,
                "folder": model.folder,
                "current": model.id == current,
                **{name: model.about[name] for name in ("seconds", "labels", "before", "now")},
                "moved": [
                    {**move, "row": self._row[move["name"]]}
                    for move in model.about["moved"]
                    if move["name"] in self._row
                ],
            }
            for model in reversed(self.store.models())
            if model.about.get("key") == prepared.key
        ]

    # How it goes on

    def _asked_about(self, view: View) -> State:
        with self._lock:
            labelled = (self._said != NOTHING) | (self._given != NOTHING)
        return State(view.scores, labelled, view.threshold, view.prototypes, embeddings=self._embeddings)

    def _ready(self) -> Prepared:
        if self.prepared is None:
            raise UserError("the images are still being read: wait until the page shows the first of them")
        return self.prepared

    def _open(self, prepared: Prepared) -> None:
        """The images are there: fold all events, take up the newest model, fit the first one if there is none."""
        with self._lock:
            self._row = {name: row for row, name in enumerate(prepared.names)}
            words = [self.source.labels[record] for record in prepared.records]
            self._given = np.array([CODE_OF[word] for word in words], np.int8)
            self._said = np.zeros(len(words), np.int8)
            self._fitted = np.full(len(words), -1, np.int8)
            self._labels = Labels()
            self._standing.clear()
            self._undone.clear()
            self._shown_with, self._ranks = {}, {}
            self._work = None
            self._embeddings = np.asarray(np.load(prepared.embeddings, mmap_mode="r"))
            self.prepared = prepared
        self._sync()
        self._adopt(prepared)
        mine = [model for model in self.store.models() if model.about.get("key") == prepared.key]
        current = self.store.current_model()
        if mine:
            using = current if current in mine else mine[-1]
            with self._lock:
                self.view = read_view(self.folder, using, len(prepared.names))
                self._fitted = self._words_after(mine[-1].after)
        self._dirty.set()
        self._consider()

    def _adopt(self, prepared: Prepared) -> None:
        """Note the models that were finished when the page was killed before it could."""
        folders = self.folder / "models"
        found = sorted(int(path.name) for path in folders.glob("[0-9]*") if path.is_dir() and path.name.isdigit())
        self._next_number = max(found, default=0) + 1
        noted = {model.folder for model in self.store.models()}
        for number in found:
            if f"models/{number:04d}" not in noted:
                _, about = read_model(model_folder(self.folder, number))
                if about["data"]["key"] == prepared.key:
                    self._take_model(number)

    def _hear(self, news: News) -> None:
        """What the refit process says; runs in a thread that listens to it."""
        try:
            self._follow(news)
        except UserError as error:  # a full disk, say: the page goes on and says so
            self._fail(" ".join(str(error).split()))

    def _follow(self, news: News) -> None:
        if "stage" in news:
            with self._lock:
                if self._work is not None:
                    self._work |= news
        elif "prepared" in news:
            prepared = find_prepared(self.folder, self.source, self._encoder_sha256)
            if prepared is None:
                self._fail(f"SOURCE {self.source.path} changed while it was read: start elsa label again")
            else:
                self._attempts = 0
                self._open(prepared)
        elif "fitted" in news:
            self._attempts = 0
            self._take_model(news["fitted"])
            with self._lock:
                self._work = None
            self._consider()
        elif "error" in news:
            self._fail(news["error"])
        else:
            self._try_again(news["died"])

    def _fail(self, why: str) -> None:
        with self._lock:
            self._work, self._trouble = None, why

    def _try_again(self, last_words: str) -> None:
        """The process died: give its job to a new one, unless the job seems to be what kills it."""
        with self._lock:
            work = self._work
            self._attempts += 1
        if work is not None and self._attempts < ATTEMPTS:
            self.worker.send(self._job)
        elif work is not None:
            self._fail(f"the refit process died {ATTEMPTS} times over: {last_words}")

    def _consider(self) -> None:
        """Fit if there is reason to and nothing else is being done."""
        with self._lock:
            if self.prepared is None or self._work is not None or self._closed.is_set():
                return
            due = self._pending() >= self.batch or (self._asked and self._pending())
            if not (due or (self.view is None and not self._trouble)):
                self._asked = False
                return
            self._asked, self._trouble = False, ""
            self._fitted = self._words()
            number, self._next_number = self._next_number, self._next_number + 1
            job = {
                "job": "fit",
                "number": number,
                "after": self._labels.last,
                "normal": np.flatnonzero(self._fitted == NORMAL).tolist(),
                "anomaly": np.flatnonzero(self._fitted == ANOMALY).tolist(),
                "command": f"elsa label {self.source.path} --workspace {self.folder}",
            }
            self._send(job, "fit", 0)

    def _send(self, job: dict[str, Any], stage: str, total: int) -> None:
        with self._lock:
            self._job, self._work = job, {"job": job["job"], "stage": stage, "done": 0, "total": total}
        self.worker.send(job)

    def _take_model(self, number: int) -> None:
        """A fit is finished: note it with what it changed, and show it."""
        prepared = self._ready()
        _, about = read_model(model_folder(self.folder, number))
        after = about["workspace"]["after"]
        folder = f"models/{number:04d}"
        view = read_view(self.folder, Model(0, "", folder, after), len(prepared.names))
        with self._lock:
            before = self.view
        note = {
            "key": prepared.key,
            "threshold": view.threshold,
            "seconds": about["seconds"],
            "labels": about["data"]["labels"],
            "before": self._estimate(before) if before else None,
            "now": self._estimate(view),
            "moved": self._moved(before, view) if before else [],
        }
        model = self.store.add_model(folder, after, note)
        self.store.use_model(model.id)
        with self._lock:
            self.view = read_view(self.folder, model, len(prepared.names))
        self._dirty.set()

    def _estimate(self, view: View) -> list[dict[str, Any]]:
        """What the labels say about that model, ready to show."""
        prepared = self._ready()
        with self._lock:
            labels = {
                name: label
                for name, label in self._labels.of.items()
                if name in self._row and self._said[self._row[name]] != NOTHING
            }
            given = [WORD_OF[code] for code in self._given.tolist()]
            shown_with = dict(self._shown_with)
        scores = self._unlearned_scores(view, shown_with)
        found = estimate(prepared.names, scores, view.threshold, self.store.events(), labels, given)
        return [{"title": title, **asdict(getattr(found, name))} for name, title in TITLES.items()]

    def _unlearned_scores(self, view: View, shown_with: dict[int, int]) -> NDArray[np.float64]:
        """Scores in which no labelled image profits from its own label.

        A model places what it was taught rightly. So an image somebody has a word for takes the place it had under the
        model that asked for it, which did not know that word yet, and the score of that place.
        """
        scores = view.scores.copy()
        places = defaultdict(list)
        for row, model in shown_with.items():
            places[model].append(row)
        for model, rows in places.items():
            rank = self._rank_under(model)
            if rank is not None:
                scores[rows] = view.scores[view.order[rank[rows] - 1]]
        return scores

    def _rank_under(self, number: int) -> NDArray[np.int32] | None:
        """The place of each row under a model of these images; None where its files are gone."""
        if number not in self._ranks:
            prepared = self._ready()
            model = next((model for model in self.store.models() if model.id == number), None)
            usable = model is not None and model.about.get("key") == prepared.key
            try:
                rank = read_view(self.folder, model, len(prepared.names)).rank if model and usable else None
            except UserError:
                rank = None
            self._ranks[number] = None if rank is None else rank.astype(np.int32)
        return self._ranks[number]

    def _estimate_for_ever(self) -> None:
        """Keep the estimates of the model in use up to date, away from the requests that show them."""
        while self._dirty.wait() and not self._closed.is_set():
            self._dirty.clear()
            with self._lock:
                view = self.view
            began = time.monotonic()
            if view is not None:
                with suppress(UserError):  # the store does not answer: those who label hear of it themselves
                    self.estimates = self._estimate(view)
            # At most a fifth of a core, however many labels there are.
            self._closed.wait(max(SECONDS_BETWEEN_ESTIMATES, 4 * (time.monotonic() - began)))

    def _moved(self, before: View, after: View) -> list[dict[str, Any]]:
        """The unlabelled images whose place changed most; a move from 400 to 4 is more than one from 9,400 to 9,004."""
        prepared = self._ready()
        with self._lock:
            known = (self._said != NOTHING) | (self._given != NOTHING)
        ratio = np.abs(np.log(before.rank / after.rank))
        ratio[known] = -1
        rows = np.argsort(-ratio, kind="stable")[:MOVED].tolist()
        return [
            {"name": prepared.names[row], "from": int(before.rank[row]), "to": int(after.rank[row])}
            for row in rows
            if ratio[row] > 0
        ]

    def _sync(self) -> None:
        """Take what is new in the store, whoever put it there."""
        prepared = self._ready()
        with self._lock:
            events = self.store.events(self._labels.last)
            if not events:
                return
            self._labels.take(events)
            for event in events:
                if event.undoes is None:
                    self._standing[event.who].append(event)
                    if event.model is not None and event.image in self._row:
                        self._shown_with.setdefault(self._row[event.image], event.model)
                else:
                    standing = self._standing[event.who]
                    taken = next(one for one in reversed(standing) if one.id == event.undoes)
                    standing.remove(taken)
                    self._undone[event.request.rpartition(":")[0]].append(taken)
                row = self._row.get(event.image)
                if row is not None:
                    self._said[row] = _code(self._labels, event.image, prepared.sha256[row])
        self._dirty.set()

    def _words(self) -> NDArray[np.int8]:
        """normal, anomaly or nothing for each row: what people say, and where they say nothing the source."""
        sure = np.where(np.isin(self._said, [NORMAL, ANOMALY]), self._said, NOTHING)
        return np.where(self._said == NOTHING, self._given, sure).astype(np.int8)

    def _words_after(self, event: int) -> NDArray[np.int8]:
        """The same as of an earlier event."""
        prepared = self._ready()
        labels, now = Labels(), self._said
        labels.take(one for one in self.store.events() if one.id <= event)
        self._said = np.zeros(len(now), np.int8)
        for name in labels.of:
            if name in self._row:
                self._said[self._row[name]] = _code(labels, name, prepared.sha256[self._row[name]])
        words, self._said = self._words(), now
        return words

    def _pending(self) -> int:
        """How many labels the newest fit does not know."""
        return int((self._words() != self._fitted).sum()) if self.view else 0


def interleaved(asked: Sequence[Asked]) -> list[Asked]:
    """The audits spread evenly among the rest: whoever stops half-way has answered half of them, too."""
    audits = [one for one in asked if one.strategy == AUDIT]
    others = [one for one in asked if one.strategy != AUDIT]
    every = [(number + 0.5) / len(part) for part in (audits, others) for number in range(len(part))]
    return [one for _, one in sorted(zip(every, audits + others, strict=True), key=lambda pair: pair[0])]


def _code(labels: Labels, name: str, sha256: str) -> int:
    label = labels.of.get(name)
    if label is None or label.event.sha256 not in ("", sha256):
        return NOTHING  # or said about another image that lay under this name
    return CONFLICT if label.conflict else CODE_OF[label.word]


def open_session(
    source: Path,
    folder: Path,
    *,
    labels: Path | None = None,
    encoder: str = "mobilenet_v2",
    store: str | None = None,
    who: str | None = None,
    batch: int = BATCH,
) -> Session:
    """The session of a workspace, made if it is not there; `start` sets it to work."""
    if batch < 1:
        raise UserError(f"--batch {batch}: the head is fitted again after so many labels; give 1 or more")
    source, folder = Path(source), Path(folder)
    kind, _, file = encoder.partition(":")
    if kind == "mobilenet_v2" and not file:
        encoder = f"mobilenet_v2:{find_mobilenet_v2()}"
    digest = encoder_sha256(encoder)
    opened = open_source(source, labels=labels)
    if opened.kind == "vectors":
        raise UserError(f"SOURCE {source} holds vectors, which nobody can look at: give the images they were made of")
    noted = _read_workspace(folder)
    here = os.path.realpath(source)
    if noted is not None and noted["source"] != here:
        raise UserError(
            f"--workspace {folder} was made for {noted['source']}, not for {here}; choose another folder, or the source"
        )
    lock = _alone(folder)
    try:
        kept = open_store(store or folder)
        where = kept.database.name if store else ""
        if noted is not None and noted["store"] != where:
            raise UserError(
                f"the labels of --workspace {folder} are in {noted['store'] or 'the folder itself'}: "
                f"{'give that --store' if noted['store'] else 'leave out --store'}, or choose another workspace"
            )
        about = {
            "format": FORMAT,
            "source": here,
            "labels": None if labels is None else os.path.realpath(labels),
            "encoder": {"name": encoder, "sha256": digest},
            "store": where,
        }
        write_whole(folder / "workspace.json", (json.dumps(about, indent=1) + "\n").encode(), option="--workspace")
    except BaseException:
        lock.close()
        raise
    return Session(folder, opened, source, encoder, kept, lock, who=who or _user(), batch=batch)


def _read_workspace(folder: Path) -> dict[str, Any] | None:
    """What workspace.json says; None for a folder that is to become a workspace."""
    path = folder / "workspace.json"
    if not path.exists():
        if folder.exists() and not (folder.is_dir() and all(OURS.match(entry.name) for entry in folder.iterdir())):
            raise UserError(f"--workspace {folder} exists and is not a workspace; choose a new name or an empty folder")
        return None
    try:
        about = json.loads(path.read_text())
        version = about["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); choose another --workspace") from error
    if version > FORMAT:
        raise UserError(f"{path} has format {version}, this version reads up to {FORMAT}; update elsa")
    return about


def _alone(folder: Path) -> sqlite3.Connection:
    """A lock on the workspace, which the system takes back when this process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "models").mkdir(exist_ok=True)
        lock = sqlite3.connect(folder / ".page.lock", timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        lock.execute("BEGIN EXCLUSIVE")
    except OSError as error:
        raise UserError(f"cannot write --workspace {folder}: {error.strerror}; choose another folder") from error
    except sqlite3.OperationalError as error:
        raise UserError(
            f"--workspace {folder} is open in another `elsa label` ({error}): use its page, or end it first"
        ) from error
    return lock


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "somebody"
