"""The routes of `elsa serve` and their description in OpenAPI."""

import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse

from elsa import __version__
from elsa.data.images import Decoding, quiet_pillow
from elsa.errors import UserError
from elsa.ship.serving import metrics as prometheus
from elsa.ship.serving import open_inference as oip
from elsa.ship.serving.bodies import ScoreRequest, Sent, read_score_body
from elsa.ship.serving.front import Front, refuse
from elsa.ship.serving.limits import Refusal
from elsa.ship.serving.service import Found, Service

REF = "#/components/schemas/{model}"


class ErrorAnswer(BaseModel):
    """Why a request was refused, in one line."""

    error: str


class HeatMap(BaseModel):
    """How much the score would fall without each place; above zero is what makes an image anomalous."""

    shape: list[int]
    data: str
    """float32, little-endian, row by row, in base64."""


class Result(BaseModel):
    """One image: a score and what follows from it, or the reason why it could not be read."""

    name: str
    score: float | None = None
    p_value: float | None = None
    verdict: str | None = None
    prototype: int | None = None
    heat_map: HeatMap | None = None
    error: str | None = None


class ModelAnswer(BaseModel):
    """Which model answered."""

    name: str
    id: str


class ScoreAnswer(BaseModel):
    """Results in the order of the images."""

    model: ModelAnswer
    higher_is: str
    false_alarms: float
    threshold: float | None
    results: list[Result]


class DriftAnswer(BaseModel):
    """The last scores against the calibration."""

    images: int
    distance: float | None
    p_value: float | None
    mean_p_value: float | None
    alarm: bool
    calibrated_on: int
    model: ModelAnswer


class Live(BaseModel):
    """Liveness."""

    live: bool


class Ready(BaseModel):
    """Readiness."""

    ready: bool


class ModelReady(BaseModel):
    """Readiness of the model."""

    name: str
    ready: bool


class ServerMetadata(BaseModel):
    """What this server is."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """Name, type and shape of a tensor; -1 is any number."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """What the model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Their description in OpenAPI."""
    return {status: {"model": ErrorAnswer} for status in statuses}


SCORING_ERRORS = errors(400, 408, 413, 429, 500, 503)
SCORE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": REF.format(model="ScoreRequest")}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "string", "format": "binary"},
                            "description": "Image files; every part with a file name is one, whatever its field.",
                        }
                    },
                }
            },
        },
    }
}
INFER_BODY = {
    "parameters": [
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "required": False,
            "schema": {"type": "integer", "minimum": 0},
            "description": "Length of the JSON object where binary tensor data follows it.",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": REF.format(model="InferenceRequest")}}},
    },
}


def build_app(service: Service, tokens: Sequence[str] = ()) -> FastAPI:
    """The web application around a service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with quiet_pillow():
            service.start()
            yield
            service.stop()

    # no /docs: its page loads scripts from elsewhere, and this works offline
    app = FastAPI(title="elsa serve", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Front, service=service, tokens=tokens)
    _answer_errors(app)
    _score_routes(app, service)
    _inference_routes(app, service)
    _operator_routes(app, service)
    app.openapi = lambda: _described(app, bool(tokens))  # type: ignore[method-assign]  # FastAPI's own way to extend it
    return app


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return refuse(error)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return refuse(Refusal(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))


def _score_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/score",
        response_model=ScoreAnswer,
        responses={**SCORING_ERRORS, **errors(415), 422: {"model": ScoreAnswer, "description": "No image is readable"}},
        openapi_extra=SCORE_BODY,
    )
    async def score(request: Request, heat_map: bool = False) -> Response:
        """Score image files: multipart/form-data with one part a file, or JSON with base64."""
        kind = request.headers.get("content-type", "")
        found = await service.find(request, lambda body, _: (read_score_body(body, kind), heat_map))
        request.state.model = found.model.id
        return Response(json.dumps(score_answer(found)), 200 if found.findings else 422, media_type="application/json")


def score_answer(found: Found) -> dict[str, Any]:
    """ScoreAnswer as plain values; building a thousand pydantic objects would take longer than decoding the images."""
    model, findings = found.model, found.findings
    results: list[dict[str, Any]] = [{"name": name} for name in found.decoded.names]
    for place, error in found.decoded.broken.items():
        results[place]["error"] = str(error)
    for row, place in enumerate(found.decoded.places):
        assert findings is not None
        results[place] |= {
            "score": findings.scores[row],
            "p_value": findings.p_values[row],
            "verdict": None if findings.verdicts is None else findings.verdicts[row],
            "prototype": None if findings.prototypes is None else findings.prototypes[row],
        }
        if findings.heat is not None:
            heat = findings.heat[row].numpy().astype("<f4")
            results[place]["heat_map"] = {
                "shape": list(heat.shape),
                "data": base64.b64encode(heat.tobytes()).decode(),
            }
    return {
        "model": {"name": model.name, "id": model.id},
        "higher_is": "anomalous",
        "false_alarms": model.false_alarms,
        "threshold": model.threshold,
        "results": results,
    }


def _inference_routes(app: FastAPI, service: Service) -> None:
    def check(name: str, version: str | None) -> None:
        model = service.model
        if name != model.name or version not in (None, model.id):
            raise Refusal(404, f"there is one model here, {model.name} version {model.id}")

    @app.get("/v2", response_model=ServerMetadata)
    async def server() -> dict[str, Any]:
        """What this server is."""
        return oip.about_server()

    @app.get("/v2/health/live", response_model=Live, responses={503: {"model": Live}})
    async def live() -> JSONResponse:
        """Whether to leave this process alone: false is for the orchestrator to restart it."""
        return JSONResponse({"live": service.batcher.alive}, 200 if service.batcher.alive else 503)

    @app.get("/v2/health/ready", response_model=Ready, responses={503: {"model": Ready}})
    async def ready() -> JSONResponse:
        """Whether to send requests here."""
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/v2/models/{name}", response_model=ModelMetadata, responses=errors(404))
    @app.get("/v2/models/{name}/versions/{version}", response_model=ModelMetadata, responses=errors(404))
    async def model(name: str, version: str | None = None) -> dict[str, Any]:
        """What the model takes and gives."""
        check(name, version)
        return oip.about_model(service.model)

    @app.get(
        "/v2/models/{name}/ready", response_model=ModelReady, responses={**errors(404), 503: {"model": ModelReady}}
    )
    @app.get(
        "/v2/models/{name}/versions/{version}/ready",
        response_model=ModelReady,
        responses={**errors(404), 503: {"model": ModelReady}},
    )
    async def model_ready(name: str, version: str | None = None) -> JSONResponse:
        """Whether the model answers."""
        check(name, version)
        return JSONResponse({"name": name, "ready": service.ready}, 200 if service.ready else 503)

    infer: dict[str, Any] = {
        "response_model": oip.InferenceResponse,
        "responses": {**SCORING_ERRORS, **errors(404)},
        "openapi_extra": INFER_BODY,
    }

    @app.post("/v2/models/{name}/infer", **infer)
    @app.post("/v2/models/{name}/versions/{version}/infer", **infer)
    async def infer_images(request: Request, name: str, version: str | None = None) -> Response:
        """Score a tensor of images; see the Open Inference Protocol."""
        check(name, version)
        asked: list[oip.InferenceRequest] = []

        def read(body: bytes, how: Decoding) -> tuple[list[Sent], bool]:
            tensors, binary = oip.split_body(body, request.headers.get(oip.HEADER_LENGTH))
            asked.append(tensors)
            return oip.read_images(tensors, binary, how), oip.ON_REQUEST in oip.wanted_outputs(tensors)

        found = await service.find(request, read)
        request.state.model = found.model.id
        for place, error in sorted(found.decoded.broken.items()):
            raise Refusal(400, f"image {place}: {error}")
        assert found.findings is not None
        body, json_length = oip.answer(found.model, asked[0], found.findings)
        if json_length is None:
            return Response(body, media_type="application/json")
        return Response(body, headers={oip.HEADER_LENGTH: str(json_length)}, media_type="application/octet-stream")


def _operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.scrape(), headers={"content-type": prometheus.CONTENT_TYPE})

    @app.get("/drift", response_model=DriftAnswer)
    async def drift() -> dict[str, Any]:
        """Whether the last scores look like those the model was calibrated on."""
        return service.drift.about() | {"model": {"name": service.model.name, "id": service.model.id}}

    @app.post("/admin/reload", response_model=ModelAnswer, responses=errors(409))
    async def reload() -> dict[str, str]:
        """Load the MODEL folder again and switch to it; requests under way are answered by the model they met."""
        try:
            model = await service.reload()
        except UserError as error:
            raise Refusal(409, f"{error}; the model loaded before goes on answering") from None
        return {"name": model.name, "id": model.id}


def _described(app: FastAPI, with_token: bool) -> dict[str, Any]:
    """openapi.json with the bodies that are read by hand, and without the 422 FastAPI supposes (it is a 400 here)."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = found["components"]["schemas"]
        for body in (ScoreRequest, oip.InferenceRequest):
            schema = body.model_json_schema(ref_template=REF)
            schemas |= schema.pop("$defs", {}) | {body.__name__: schema}
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for path, operations in found["paths"].items():
            for operation in operations.values():
                if "ValidationError" in json.dumps(operation["responses"].get("422", {})):
                    del operation["responses"]["422"]
                if "heat_map" in json.dumps(operation.get("parameters", "")):
                    operation["responses"].setdefault("400", {"description": "Bad Request"})
                refusals = (
                    ["403"] if not with_token else [] if path in ("/v2/health/live", "/v2/health/ready") else ["401"]
                )
                for status in refusals:
                    content = {"application/json": {"schema": {"$ref": REF.format(model="ErrorAnswer")}}}
                    operation["responses"][status] = {"description": "Not for you", "content": content}
        if with_token:
            found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            found["security"] = [{"token": []}]
        app.openapi_schema = found
    return app.openapi_schema
