"""What lies between a request and its answer: admission, decoding, the batch, and a model that may change meanwhile."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request

from elsa.data.images import Decoding
from elsa.data.parallel import available_cores
from elsa.encoders import BATCH
from elsa.errors import UserError
from elsa.ship.serving.batcher import Batch, Batcher
from elsa.ship.serving.bodies import Decoded, Sent, decode_all
from elsa.ship.serving.drift import DriftWatch
from elsa.ship.serving.limits import Admission, Limits, Refusal, claimed_bytes, read_body
from elsa.ship.serving.loaded import Findings, Loaded, load_for_service
from elsa.ship.serving.metrics import Metrics

Result = TypeVar("Result")
log = logging.getLogger("elsa.serve")


@dataclass(frozen=True)
class Found:
    """The images of a request that could be read, and what the model found; None if there are none."""

    model: Loaded
    decoded: Decoded
    findings: Findings | None


class Service:
    """One model served; everything but scoring and decoding happens on the event loop, so nothing here needs a lock."""

    def __init__(self, folder: Path, limits: Limits, *, false_alarms: float | None = None, device: str = "cpu") -> None:
        self.folder, self.limits, self.false_alarms, self.device = Path(folder), limits, false_alarms, device
        self.metrics = Metrics()
        self.metrics.capacity.set(limits.queue)
        self.admission = Admission(limits)
        self.accepted = self.answered = 0
        self.draining = False
        self.reloading = asyncio.Lock()
        self.use(self.load())

    def load(self) -> Loaded:
        """The model as its folder holds it now."""
        return load_for_service(self.folder, self.false_alarms, self.limits.max_pixels, self.device)

    def use(self, model: Loaded) -> None:
        """Answer new requests with this model; those under way keep theirs."""
        self.model = model
        self.drift = DriftWatch(model.detector.calibration_)
        self.metrics.model.set(1, name=model.name, id=model.id)

    def start(self) -> None:
        """Start the threads; on the event loop."""
        self.batcher = Batcher(self.limits, self.batch_done)
        self.decoders = ThreadPoolExecutor(available_cores(), thread_name_prefix="elsa-decode")

    def stop(self) -> None:
        """Finish what was accepted and end the threads."""
        self.decoders.shutdown()
        self.batcher.stop()
        log.info("stopped", extra={"fields": {"accepted": self.accepted, "answered": self.answered}})

    @property
    def ready(self) -> bool:
        """Whether to send requests here."""
        return self.batcher.alive and not self.draining

    async def reload(self) -> Loaded:
        """Load the model folder again and switch to it; a folder that does not load changes nothing."""
        async with self.reloading:
            try:
                model = await asyncio.to_thread(self.load)
            except UserError as error:
                self.metrics.reloads.add(result="refused")
                log.error("reload refused", extra={"fields": {"reason": str(error), "model": self.model.id}})
                raise
            before = self.model.id
            self.use(model)
            self.metrics.reloads.add(result="done")
            log.info("reloaded", extra={"fields": {"model": model.id, "before": before}})
            return model

    async def find(self, request: Request, read: Callable[[bytes, Decoding], tuple[list[Sent], bool]]) -> Found:
        """Everything from an arriving request to the findings, within the limits, or a Refusal.

        `read` makes of a body its images, and whether their heat maps are asked for.
        """
        deadline = asyncio.get_running_loop().time() + self.limits.timeout
        room = claimed_bytes(request, self.limits)
        self.admission.enter(room)
        images = 1
        self.accepted += 1
        try:
            body = await read_body(request, self.limits, deadline)
            model = self.model
            async with asyncio.timeout_at(deadline):
                sent, heat = await self.in_thread(read, body, model.decoding)
                if len(sent) > self.limits.queue:
                    raise Refusal(413, f"{len(sent):,} images in one request; at most {self.limits.queue:,} are taken")
                self.admission.grow(len(sent) - 1)
                images = len(sent)
                decoded = await self.in_thread(decode_all, sent, model.decoding)
                del body, sent
                self.metrics.broken.add(len(decoded.broken))
                request.state.images = images
                if not decoded.places:
                    return Found(model, decoded, None)
                findings = await self.batcher.submit(model, decoded.images, heat)
            return Found(model, decoded, findings)
        except TimeoutError:
            raise Refusal(503, f"no answer within {self.limits.timeout:g} s; come again later", 1) from None
        finally:
            self.answered += 1
            self.admission.leave(images, room)

    async def in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.decoders, work, *arguments)

    def batch_done(self, batch: Batch) -> None:
        """Count a batch, and look for drift in it."""
        count = len(batch.findings.scores)
        self.admission.answered(-(-count // BATCH) * BATCH, batch.seconds)  # what a full chunk would have held
        self.metrics.batch_images.observe(count)
        self.metrics.batch_seconds.observe(batch.seconds)
        for verdict in batch.findings.verdicts or [""] * count:
            self.metrics.images.add(verdict=verdict or "none")
        if batch.model is self.model and self.drift.add(batch.findings.scores, batch.findings.p_values):
            level = logging.WARNING if self.drift.now.alarm else logging.INFO
            log.log(level, "drift", extra={"fields": {**self.drift.about(), "model": self.model.id}})

    def scrape(self) -> str:
        """The metrics, gauges brought up to date."""
        metrics, drift = self.metrics, self.drift.now
        metrics.waiting.set(self.admission.images)
        metrics.ready.set(int(self.ready))
        metrics.drift_distance.set(drift.distance or 0.0)
        metrics.drift_alarm.set(int(drift.alarm))
        metrics.cpu.set(time.process_time())
        metrics.memory.set(resident_bytes())
        return metrics.text()


def limits_of(service: Service) -> dict[str, float]:
    """The limits in force, for the log."""
    return asdict(service.limits)


def resident_bytes() -> int:
    """Memory of this process, where the system tells (Linux); else 0."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
