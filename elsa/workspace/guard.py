"""Who may talk to the page: this machine's own browser, or whoever has the token; nobody through another site.

A page on the internet can make a browser send requests to 127.0.0.1, and can give 127.0.0.1 a name of its own (DNS
rebinding). So every request must name this server as its host and must not come from elsewhere.
"""

import hashlib
import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "elsa_token"
LARGEST_BODY = 1 << 20
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """Wraps the app: refuses what does not come from the page itself, and sends the headers that protect it."""

    def __init__(self, app: ASGIApp, *, token: str | None, loopback: bool) -> None:
        self.app, self.loopback = app, loopback
        self.secret = None if token is None else hashlib.sha256(token.encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        answer = self.refusal(scope) or self.admission(scope)
        await (answer or self.app)(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> PlainTextResponse | None:
        """The answer to a request that another site may have caused; None for one that may go on."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.loopback and not is_loopback(_without_port(host)):
            return _refused(403, f"this page answers at 127.0.0.1 only, not at {host!r}")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return _refused(403, "requests from other origins are refused")
        site = headers.get("sec-fetch-site", "same-origin")
        opened_by_hand = scope["method"] == "GET" and scope["path"] == "/" and _navigates(headers)
        if site not in ("same-origin", "none") and not opened_by_hand:
            return _refused(403, "requests from other origins are refused")
        if scope["method"] not in ("GET", "HEAD"):
            # Forms of other sites can send plain text; JSON they cannot without asking, which is refused above.
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return _refused(415, "send application/json")
            length = headers.get("content-length", "")
            if not length.isdecimal() or int(length) > LARGEST_BODY:
                return _refused(413, f"send at most {LARGEST_BODY:,} bytes, and say how many")
        return None

    def admission(self, scope: Scope) -> PlainTextResponse | RedirectResponse | None:
        """With a token: a redirect that sets its cookie, or the refusal of who has neither."""
        if self.secret is None:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and given and self._right(hashlib.sha256(given.encode()).hexdigest()):
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(COOKIE, self.secret, httponly=True, samesite="strict", max_age=30 * 24 * 3600)
            return response
        if self._right(_cookie(Headers(scope=scope))):
            return None
        return _refused(401, "this page needs a token: open it as http://.../?token=TOKEN, as `elsa label` printed it")

    def _right(self, offered: str) -> bool:
        assert self.secret is not None
        return hmac.compare_digest(offered.encode(), self.secret.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at that address."""
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if port.isdecimal() and name else host).strip("[]")


def _navigates(headers: Mapping[str, str]) -> bool:
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _cookie(headers: Mapping[str, str]) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _refused(status: int, why: str) -> PlainTextResponse:
    return PlainTextResponse(why + "\n", status_code=status)
