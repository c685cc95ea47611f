"""What a request may cost, and the answer to one that asks for more."""

import asyncio
import math
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from elsa.errors import UserError

BODIES_IN_MEMORY = 8  # of the largest size allowed; smaller ones, as many as fit into that


@dataclass(frozen=True)
class Limits:
    """Bounds on memory and time, whatever clients do."""

    max_batch: int = 32
    """Images scored together."""
    max_wait: float = 5.0
    """Milliseconds that a batch waits for company."""
    queue: int = 256
    """Images accepted and not answered yet, or as many as half the timeout suffices for; beyond it 429."""
    max_body: int = 32 << 20
    """Bytes of one request."""
    max_pixels: int = 50_000_000
    """Pixels that one image may claim to have."""
    timeout: float = 30.0
    """Seconds from the first byte of a request to its answer."""

    def __post_init__(self) -> None:
        for option in ("max_batch", "queue", "max_body", "max_pixels"):
            if getattr(self, option) < 1:
                raise UserError(f"--{option.replace('_', '-')} {getattr(self, option)}: give at least 1")
        if not 0 <= self.max_wait < math.inf:
            raise UserError(f"--max-wait {self.max_wait}: give milliseconds, 0 or more")
        if not 0 < self.timeout < math.inf:
            raise UserError(f"--timeout {self.timeout}: give seconds, more than 0")


class Refusal(Exception):  # noqa: N818 - it is an answer, not an error
    """An answer other than the one asked for: its status, one line for the client, when to come again."""

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after


class Admission:
    """Places for images and room for bodies, given out before a request costs anything; for the event loop alone."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.images = 0
        self.bytes = 0
        self.images_per_second = 0.0

    def enter(self, body_bytes: int) -> None:
        """Take one place and room for the body, or refuse."""
        if body_bytes > self.limits.max_body:
            raise Refusal(
                413, f"a body of {body_bytes:,} bytes; at most {self.limits.max_body:,} are read, send fewer images"
            )
        if self.bytes + body_bytes > BODIES_IN_MEMORY * self.limits.max_body:
            raise self.busy()
        self.grow(1)
        self.bytes += body_bytes

    def grow(self, images: int) -> None:
        """Take more places, once it is known how many images a body holds."""
        # Half the time for what waits: the rest is for a pace that falls, and nobody is promised what comes too late.
        late = self.images > self.images_per_second * self.limits.timeout / 2 > 0
        if late or self.images + images > self.limits.queue:
            raise self.busy()
        self.images += images

    def leave(self, images: int, body_bytes: int) -> None:
        """Give places and room back."""
        self.images -= images
        self.bytes -= body_bytes

    def answered(self, images: int, seconds: float) -> None:
        """Note how fast batches go, for Retry-After."""
        self.images_per_second += 0.2 * (images / max(seconds, 1e-3) - self.images_per_second)

    def busy(self) -> Refusal:
        """429, with a guess at when there will be room: when half of what waits is done."""
        seconds = min(60, max(1, math.ceil(self.images / 2 / max(self.images_per_second, 0.1))))
        return Refusal(429, f"{self.images:,} images are waiting already; come again in {seconds} s", seconds)


def claimed_bytes(request: Request, limits: Limits) -> int:
    """What the body will hold at most, as its headers say; a body of unknown length may be as long as allowed."""
    length = request.headers.get("content-length")
    if length is None:
        return limits.max_body
    if not (length.isascii() and length.isdigit()):
        raise Refusal(400, "Content-Length is not a number")
    return int(length)


async def read_body(request: Request, limits: Limits, deadline: float) -> bytes:
    """The whole body, bounded in size and time."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout_at(deadline):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_body:
                    raise Refusal(413, f"a body of more than {limits.max_body:,} bytes; send fewer images at a time")
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {limits.timeout:g} s") from None
    except ClientDisconnect:
        raise Refusal(400, "the client went away before its body had arrived") from None
    return b"".join(parts)
