"""The HTTP side of a front end: an application of FastAPI around a client of the engine.

Handlers read bodies themselves, as FastAPI's own way coerces types and has other errors; the
OpenAPI page is told of the models that they use.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from plugins.server import replies, schema
from plugins.server.about import About
from plugins.server.client import Client
from plugins.server.docs import add_docs
from plugins.server.engine_numbers import gauges, totals
from plugins.server.errors import ApiError
from plugins.server.gate import Gate
from plugins.server.generation import Generation
from plugins.server.metrics import Metrics
from plugins.server.responses import on_api_error, on_bug, on_disconnect, on_http_error
from plugins.server.settings import Settings

REFERENCE = "#/components/schemas/{model}"
BODIES = (schema.CompletionBody, schema.ChatBody, schema.TokenizeBody, schema.DetokenizeBody)

Handler = Callable[[Request], Awaitable[Response]]


def make_app(client: Client, settings: Settings, now: Callable[[], float] = time.time) -> FastAPI:
    """All endpoints of the server. now: Unix time, s."""
    metrics = Metrics(lambda: gauges(client.state()), lambda: totals(client.state()))
    app = FastAPI(title="Tritium", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(Gate, api_key=settings.api_key, metrics=metrics)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_bug)
    generation = Generation(client, settings, metrics, now)
    about = About(client, settings, metrics)
    for path, handler, body, reply in (
        ("/v1/completions", generation.completions, schema.CompletionBody, replies.Completion),
        ("/v1/chat/completions", generation.chat, schema.ChatBody, replies.ChatCompletion),
        ("/tokenize", about.tokenize, schema.TokenizeBody, replies.Tokenized),
        ("/detokenize", about.detokenize, schema.DetokenizeBody, replies.Detokenized),
    ):
        _post(app, path, handler, body, reply)
    for path, get, answer in (
        ("/v1/models", about.models, replies.ModelList),
        ("/v1/models/{model_id:path}", about.model, replies.Model),
        ("/v1/engine", about.engine, None),
        ("/v1/engine/steps", about.steps, None),
        ("/v1/workers", about.workers, None),
        ("/health", about.health, None),
        ("/ready", about.ready, None),
        ("/metrics", about.metrics, None),
    ):
        app.add_api_route(path, get, responses=_responses(answer), response_class=Response)
        # The server that runs the application leaves the body out.
        head = about.no_steps if get == about.steps else get
        app.add_api_route(path, head, methods=["HEAD"], include_in_schema=False)
    for path, steer in (
        ("/v1/workers/{worker_id}/drain", about.drain),
        ("/v1/workers/{worker_id}/undrain", about.undrain),
    ):
        app.add_api_route(
            path,
            steer,
            methods=["POST"],
            status_code=202,
            responses=_responses(None),
            response_class=Response,
        )
    add_docs(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _post(
    app: FastAPI, path: str, handler: Handler, body: type[BaseModel], reply: type[BaseModel]
) -> None:
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=body.__name__)}}}
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        responses=_responses(reply),
        response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


def _responses(reply: type[BaseModel] | None) -> dict[int | str, dict[str, Any]]:
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": replies.ErrorAnswer, "description": "Refused"},
        "5XX": {"model": replies.ErrorAnswer, "description": "Not served"},
    }
    return errors if reply is None else {200: {"model": reply}, **errors}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        page = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, bodies = models_json_schema(
            [(body, "validation") for body in BODIES], ref_template=REFERENCE
        )
        page["components"]["schemas"] |= bodies["$defs"]
        app.openapi_schema = page
    return app.openapi_schema
