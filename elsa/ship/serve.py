"""`elsa serve`: a MODEL behind HTTP, from the socket to the signals; the answers are made in elsa/ship/serving."""

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from elsa.errors import UserError

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from elsa.ship.serving.app import build_app
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("fastapi", "uvicorn", "starlette", "python_multipart"):
        raise
    raise UserError(f"elsa serve needs the package {error.name}: pip install elsa[serve]") from error

from elsa.ship.serving.front import JsonLines, is_loopback
from elsa.ship.serving.limits import Limits
from elsa.ship.serving.service import Service

log = logging.getLogger("elsa.serve")

# After SIGTERM new requests are still answered for so long, each with Connection: close, so that clients go elsewhere
# on their own: a connection closed under a request that is just arriving cannot tell its client what became of it.
LAST_ORDERS = 1.0
HEADERS_SECONDS = 10.0  # for the first line and the headers of a request; a client that trickles them is cut off


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol with a limit on the time in which the headers of a request have to arrive."""

    def connection_made(self, transport: Any) -> None:
        """Set the clock."""
        super().connection_made(transport)
        self.headers_due = self.loop.call_later(HEADERS_SECONDS, self.give_up)

    def data_received(self, data: bytes) -> None:
        """Stop the clock while a request is under way, set it when the next one begins."""
        super().data_received(data)
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting:
            self.headers_due.cancel()
        elif self.headers_due.cancelled() or self.headers_due.when() < self.loop.time():
            self.headers_due = self.loop.call_later(HEADERS_SECONDS, self.give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the clock."""
        self.headers_due.cancel()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Cut off a client that has not said what it wants; one whose request is under way is not touched."""
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server with our signals: SIGTERM and SIGINT drain, SIGHUP loads the model again."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.reloads: set[asyncio.Task[None]] = set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; uvicorn's own version would end the process by the signal, not with code 0."""
        self.loop = asyncio.get_running_loop()
        kinds = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if os.name == "posix" else [])
        before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called between two instructions of whatever runs: everything is left to the event loop."""
        self.loop.call_soon_threadsafe(self.on_signal, sig)

    def on_signal(self, sig: int) -> None:
        """Act on a signal."""
        if os.name == "posix" and sig == signal.SIGHUP:
            task = asyncio.ensure_future(self.reload())
            self.reloads.add(task)
            task.add_done_callback(self.reloads.discard)
        elif self.service.draining:  # asked twice: at once
            self.should_exit = self.force_exit = True
        else:
            self.service.draining = True
            log.info("draining", extra={"fields": {"signal": signal.Signals(sig).name}})
            self.loop.call_later(LAST_ORDERS, self.close)

    def close(self) -> None:
        """Stop listening, finish what was accepted."""
        self.should_exit = True

    async def reload(self) -> None:
        """Load the model again; the service has logged why if it did not."""
        try:
            await self.service.reload()
        except UserError:
            return

    def _log_started_message(self, listeners: Sequence[Any]) -> None:
        """Say where the service listens, in a line that other programs can read."""
        host, port = listeners[0].getsockname()[:2]
        fields = {"url": f"http://{f'[{host}]' if ':' in host else host}:{port}", "pid": os.getpid()}
        model = self.service.model
        log.info("listening", extra={"fields": {**fields, "name": model.name, "model": model.id}})


def serve(
    model: Path,
    *,
    host: str,
    port: int,
    false_alarms: float | None,
    limits: Limits,
    tokens: Sequence[str],
    device: str,
) -> None:
    """Serve a MODEL folder until SIGTERM or SIGINT."""
    tokens = [token.strip() for token in tokens]
    if any(len(token) < 8 or not token.isascii() for token in tokens):
        raise UserError("--token: give at least 8 ASCII characters, e.g. the output of `openssl rand -hex 16`")
    if not tokens and not is_loopback(f"[{host}]" if ":" in host else host):
        raise UserError(
            f"--host {host} can be reached from other machines: name a secret with --token T that clients send as "
            f"Authorization: Bearer T, or use --host 127.0.0.1"
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    with logged_to(handler):
        service = Service(model, limits, false_alarms=false_alarms, device=device)
        if service.model.threshold is None:
            log.warning("no verdicts: the model was calibrated on too few images for --false-alarms 0.05")
        config = uvicorn.Config(
            build_app(service, tokens),
            host=host,
            port=port,
            http=ImpatientProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # X-Forwarded-For is what anyone says of himself
            timeout_keep_alive=30,
            timeout_graceful_shutdown=math.ceil(limits.timeout) + 1,
        )
        server = Server(config, service)
        try:
            server.run()
        except SystemExit as error:  # uvicorn has logged why
            raise UserError(f"cannot listen on {host} port {port}; choose another --port or --host") from error


@contextmanager
def logged_to(handler: logging.Handler) -> Iterator[None]:
    """Send our log and uvicorn's there, and nowhere else, for as long as the block runs."""
    loggers = [logging.getLogger("elsa.serve"), logging.getLogger("uvicorn.error")]
    levels = (logging.INFO, logging.WARNING)
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger, level in zip(loggers, levels, strict=True):
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
