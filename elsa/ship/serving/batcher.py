"""Dynamic batching: one thread scores, in batches formed of whatever waits when it is free."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elsa.encoders import BATCH
from elsa.ship.serving.limits import Limits
from elsa.ship.serving.loaded import Findings, Loaded


@dataclass(eq=False)
class Job:
    """The images of one request, prepared for one model; the answer names that model whatever is loaded meanwhile."""

    model: Loaded
    images: Tensor
    heat: bool
    future: "asyncio.Future[Findings]"


@dataclass(frozen=True)
class Batch:
    """What the observer is told of a batch."""

    model: Loaded
    findings: Findings
    seconds: float


class Batcher:
    """Takes jobs from the event loop, answers through their futures."""

    def __init__(self, limits: Limits, observe: Callable[[Batch], None]) -> None:
        self.limits, self.observe = limits, observe
        self.loop = asyncio.get_running_loop()
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.stopped = False
        self.thread = threading.Thread(target=self._run, name="elsa-inference", daemon=True)
        self.thread.start()

    def submit(self, model: Loaded, images: Tensor, heat: bool) -> "asyncio.Future[Findings]":
        """The findings to come; call on the event loop. What is cancelled before its turn costs nothing."""
        job = Job(model, images, heat, self.loop.create_future())
        with self.changed:
            assert not self.stopped
            self.waiting.append(job)
            self.changed.notify()
        return job.future

    def stop(self) -> None:
        """Answer what waits, then end the thread."""
        with self.changed:
            self.stopped = True
            self.changed.notify()
        self.thread.join()

    @property
    def alive(self) -> bool:
        """Whether jobs get answered."""
        return self.thread.is_alive()

    def _run(self) -> None:
        while jobs := self._next_jobs():
            wanted = [job for job in jobs if not job.future.cancelled()]
            if wanted:
                self._score(wanted)

    def _score(self, jobs: list[Job]) -> None:
        began, model = time.monotonic(), jobs[0].model
        images = torch.cat([job.images for job in jobs]) if len(jobs) > 1 else jobs[0].images
        heat = torch.cat([torch.full((len(job.images),), job.heat) for job in jobs])
        try:
            findings = model.find(images, heat)
        except Exception as error:  # whatever it is, each of these requests must be told, and the next batch scored
            self._tell([(job, error) for job in jobs])
            return
        stops = torch.tensor([len(job.images) for job in jobs]).cumsum(0).tolist()
        parts = [(job, findings.part(stop - len(job.images), stop)) for job, stop in zip(jobs, stops, strict=True)]
        self._tell(parts, Batch(model, findings, time.monotonic() - began))

    def _next_jobs(self) -> list[Job]:
        """Jobs for one model, together at most max_batch images, or one larger job; nothing once stopped and empty."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.stopped)
            if not self.waiting:
                return []
            if not self._enough():
                self.changed.wait_for(lambda: self._enough() or self.stopped, self.limits.max_wait / 1000)
            jobs = [self.waiting.popleft()]
            images, most = len(jobs[0].images), self._most(jobs[0])
            while self.waiting and self.waiting[0].model is jobs[0].model:
                images += len(self.waiting[0].images)
                if images > most:
                    break
                jobs.append(self.waiting.popleft())
            return jobs

    def _most(self, first: Job) -> int:
        """How many images to score together: whole chunks where more than one waits, for chunks are filled up."""
        waiting = len(first.images) + sum(len(job.images) for job in self.waiting)
        together = min(waiting, self.limits.max_batch)
        return together - together % BATCH if together > BATCH else together

    def _enough(self) -> bool:
        return sum(len(job.images) for job in self.waiting) >= self.limits.max_batch

    def _tell(self, answers: "Sequence[tuple[Job, Findings | Exception]]", batch: Batch | None = None) -> None:
        def on_the_loop() -> None:
            if batch is not None:
                self.observe(batch)
            for job, answer in answers:
                if job.future.done():  # its request has given up
                    continue
                if isinstance(answer, Exception):
                    job.future.set_exception(answer)
                else:
                    job.future.set_result(answer)

        self.loop.call_soon_threadsafe(on_the_loop)
