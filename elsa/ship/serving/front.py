"""Around every request: who may ask, what it is called, what is logged and counted, and how refusals look."""

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elsa.ship.serving.limits import Refusal
from elsa.ship.serving.service import Service

log = logging.getLogger("elsa.serve")

OPEN = ("/v2/health/live", "/v2/health/ready")  # an orchestrator's probes carry no token
REQUEST_ID = re.compile(r"[\w.:-]{1,64}")
LOUD = ("/score", "/infer", "/admin/reload")  # the rest is probes and scrapes, logged only where refused


class Front:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, service: Service, tokens: Sequence[str] = ()) -> None:
        self.app, self.service = app, service
        self.secrets = [hashlib.sha256(token.encode()).digest() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16]
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
                if self.service.draining:  # the client's next request goes to another instance
                    extra.append((b"connection", b"close"))
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        failure: Exception | None = None
        scope.setdefault("state", {})
        try:
            refused = self.refusal(scope, headers)
            await (refused or self.app)(scope, receive, send_named)
        except Exception as error:  # the client is told, the log keeps where it arose, the service goes on
            failure = error
            if not status:
                await refuse(Refusal(500, "the service failed at this request; its log says more"))(
                    scope, receive, send_named
                )
        self.note(scope, request_id, status, time.monotonic() - began, failure)

    def refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Without a token only this machine is answered, and no web page that a browser here has open."""
        if self.secrets:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            digest = hashlib.sha256(token.strip().encode()).digest()
            known = [hmac.compare_digest(digest, secret) for secret in self.secrets]  # all of them, in constant time
            if scope["path"] in OPEN or (scheme.lower() == "bearer" and any(known)):
                return None
            answer = refuse(Refusal(401, "send Authorization: Bearer TOKEN, one given to `elsa serve --token`"))
            answer.headers["www-authenticate"] = "Bearer"
            return answer
        # DNS rebinding: a page's own name may be made to lead here, but the browser still sends that name
        if not is_loopback(headers.get("host", "")):
            return refuse(Refusal(403, "the Host must be this machine (127.0.0.1 or localhost) unless a token is set"))
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers["host"]:
            return refuse(Refusal(403, "requests of other sites' pages are refused unless a token is set"))
        return None

    def note(self, scope: Scope, request_id: str, status: int, seconds: float, failure: Exception | None) -> None:
        """Count the request and log it."""
        route = getattr(scope.get("route"), "path", "none")
        metrics = self.service.metrics
        metrics.requests.add(route=route, status=str(status))
        if status == 200 and route.endswith(("/score", "/infer")):
            metrics.request_seconds.observe(seconds)
        if status < 400 and not route.endswith(LOUD):
            return
        fields = {
            "id": request_id,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
            **{name: scope["state"][name] for name in ("images", "model") if name in scope["state"]},
        }
        log.log(logging.ERROR if status >= 500 else logging.INFO, "request", extra={"fields": fields}, exc_info=failure)


def refuse(refusal: Refusal) -> JSONResponse:
    """A refusal as an answer, in the form the Open Inference Protocol gives errors."""
    headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
    return JSONResponse({"error": refusal.reason}, refusal.status, headers)


def is_loopback(host: str) -> bool:
    """Whether a name or address, with a port or not, is this machine's own."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
