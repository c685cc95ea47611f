"""The page of `elsa label`: a few addresses around a session, and the server that holds them.

Everything a browser gets comes from here: no address outside, no build step, no file of the source as it is.
"""

import socket
import sys
import webbrowser
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from threadpoolctl import threadpool_limits

from elsa.errors import UserError
from elsa.workspace.session import Session

try:
    import uvicorn
    from fastapi import FastAPI, Query, Request, Response
    from fastapi.responses import JSONResponse
    from fastapi.staticfiles import StaticFiles
    from jinja2 import Environment, PackageLoader
    from pydantic import BaseModel, ConfigDict, Field
except ImportError as error:
    raise UserError(f"the page needs {error.name}: pip install elsa[label]") from error

from elsa.data.images import BrokenImageError
from elsa.workspace.guard import Guard, is_loopback
from elsa.workspace.images import photo, thumbnail
from elsa.workspace.prepare import Prepared
from elsa.workspace.queries import MIX, STRATEGIES

FOR_EVER = {"cache-control": "private, max-age=31536000, immutable"}
FRESH = {"cache-control": "no-store"}
SHOWN = {
    "all": "All images",
    "unlabelled": "Without a label",
    "labelled": "With a label",
    "normal": "Normal",
    "anomaly": "Anomaly",
    "unsure": "Unsure",
    "conflict": "People disagree",
    "flagged": "Above the threshold",
    "suspects": "Suspects",
}
ASK_FOR = {"mix": "a mix of all", "nearest to the threshold": "close calls", "one per prototype": "one of every kind"}
ORDERS = {"highest": "Most anomalous first", "lowest": "Least anomalous first", "name": "By name"}

Token = Annotated[str, Field(min_length=8, max_length=80, pattern=r"^[\w-]+$")]
Person = Annotated[str, Field(max_length=80)]


class Strict(BaseModel):
    """A request that says exactly what is asked of it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Said(Strict):
    """A word about one image, and what was shown beside it."""

    name: str
    label: Literal["normal", "anomaly", "unsure", ""]
    strategy: Annotated[str, Field(max_length=40)] = ""
    probability: Annotated[float, Field(gt=0, le=1)] | None = None
    model: int | None = None
    score: float | None = None


class Labelled(Strict):
    request: Token
    who: Person = ""
    items: Annotated[list[Said], Field(min_length=1, max_length=1000)]


class Undo(Strict):
    request: Token
    who: Person = ""


def make_app(session: Session, *, token: str | None = None, loopback: bool = True) -> FastAPI:
    """The addresses of the page; `session` is at work already."""
    app = FastAPI(title="elsa label", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token, loopback=loopback)
    pages = Environment(loader=PackageLoader("elsa.workspace", "pages"), autoescape=True)
    app.mount("/static", StaticFiles(packages=[("elsa.workspace", "pages/static")]), name="static")

    @app.exception_handler(UserError)
    def refuse(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())}, status_code=409)

    @app.get("/")
    def page() -> Response:
        html = pages.get_template("label.html").render(
            source=session.source.path.name or str(session.source.path),
            who=session.who,
            photos=session.source.kind in ("folder", "manifest"),
            strategies={name: ASK_FOR.get(name, name) for name in STRATEGIES},
            shown=SHOWN,
            orders=ORDERS,
        )
        return Response(html, media_type="text/html", headers=FRESH)

    @app.get("/api/state")
    def state() -> JSONResponse:
        return _fresh(session.state())

    @app.get("/api/queue")
    def queue(
        strategy: str = "",
        count: Annotated[int, Query(ge=1, le=200)] = 30,
        seed: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    ) -> JSONResponse:
        return _fresh(session.queue(strategy or MIX, count, seed))

    @app.get("/api/images")
    def images(
        show: Literal[tuple(SHOWN)] = "all",  # type: ignore[valid-type]
        order: Literal[tuple(ORDERS)] = "highest",  # type: ignore[valid-type]
        prototype: Annotated[int | None, Query(ge=0)] = None,
        low: float | None = None,
        high: float | None = None,
        text: Annotated[str, Query(max_length=200)] = "",
        offset: Annotated[int, Query(ge=0)] = 0,
        count: Annotated[int, Query(ge=1, le=200)] = 60,
    ) -> JSONResponse:
        return _fresh(
            session.browse(
                show=show, order=order, prototype=prototype, low=low, high=high, text=text, offset=offset, count=count
            )
        )

    @app.post("/api/labels")
    def labels(said: Labelled) -> JSONResponse:
        who = said.who.strip() or session.who
        return _fresh({"ids": session.label(who, said.request, [item.model_dump() for item in said.items])})

    @app.post("/api/undo")
    def undo(asked: Undo) -> JSONResponse:
        return _fresh({"undone": session.undo(asked.who.strip() or session.who, asked.request)})

    @app.post("/api/refit")
    def refit() -> JSONResponse:
        session.refit()
        return _fresh({})

    @app.get("/api/models")
    def models() -> JSONResponse:
        return _fresh(session.models())

    @app.post("/api/models/{number}/use")
    def use_model(number: int) -> JSONResponse:
        session.use_model(number)
        return _fresh({})

    @app.get("/thumb/{key}/{row}")
    def thumb(key: str, row: int) -> Response:
        prepared = _shown(session, key, row)
        return _image(lambda: thumbnail(prepared.shards, row)) if prepared else Response(status_code=404)

    @app.get("/photo/{key}/{row}")
    def whole(key: str, row: int) -> Response:
        prepared = _shown(session, key, row)
        return _image(lambda: photo(session.source, prepared.records[row])) if prepared else Response(status_code=404)

    return app


def _shown(session: Session, key: str, row: int) -> Prepared | None:
    """The images that this address is about, if it is one of theirs: a row of the source as it is now."""
    prepared = session.prepared
    if prepared is None or key != prepared.key[:12] or not 0 <= row < len(prepared.records):
        return None
    return prepared


def _image(encode: Callable[[], tuple[bytes, str]]) -> Response:
    try:
        content, kind = encode()
    except (BrokenImageError, UserError, OSError) as error:
        return JSONResponse({"detail": " ".join(str(error).split())}, status_code=404)
    return Response(content, media_type=kind, headers=FOR_EVER)


def _fresh(content: Any) -> JSONResponse:
    return JSONResponse(content, headers=FRESH)


def serve(
    session: Session, *, host: str, port: int, token: str | None, browser: bool, say: Callable[[str], None]
) -> None:
    """Serve the page until the user ends it; closes the session, too."""
    loopback = is_loopback(host)
    try:
        if not loopback and not token:
            raise UserError(
                f"--host {host} lets others on the network open the page: add --token with a secret of your choice"
            )
        with _listen(host, port) as listening:
            shown = f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{listening.getsockname()[1]}/" + (
                f"?{urlencode({'token': token})}" if token else ""
            )
            session.start()
            say(f"The page is at {address} (Ctrl-C ends it; every label is kept)")
            if browser:
                webbrowser.open(address)
            app = make_app(session, token=token, loopback=loopback)
            config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
            # Small products only: threads that wait for each other beside a fit took ten times as long as one.
            with threadpool_limits(limits=1, user_api="blas"):
                uvicorn.Server(config).run(sockets=[listening])
    finally:
        session.close()


def _listen(host: str, port: int) -> socket.socket:
    """A socket at that address; taken before any work is done for a page nobody could open."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there it would let two servers share the port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        raise UserError(f"--host {host} --port {port}: {error}; choose another --port") from error
    return listening
