"""The ASGI application: routes, what lies around them, and their description."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, cast

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyvllm._core import __version__
from pyvllm.server.auth import ApiKeys
from pyvllm.server.chat import Chat
from pyvllm.server.completions import Completions
from pyvllm.server.errors import ApiError
from pyvllm.server.front_door import METRICS, ErrorBoundary, FrontDoor
from pyvllm.server.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeBody,
    TokenizeBody,
)
from pyvllm.server.routes import Routes
from pyvllm.server.serving import Serving
from pyvllm.server.static_files import FOLDER, HEADERS, StaticFile, read_files
from pyvllm.server.tokens import Tokens

HEALTH: Final = "/health"
_SCHEMAS: Final = "#/components/schemas/"

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One entry of the routing table."""

    path: str
    method: str
    endpoint: Endpoint
    body: type[Body] | None = None
    answer: str = "application/json"


def build_app(serving: Serving) -> ASGIApp:
    """The application of the OpenAI-compatible server."""
    pages = {} if serving.args.disable_page else read_files(FOLDER)
    return make_app(serving, _routes(serving), pages)


def make_app(serving: Serving, routes: list[Route], pages: dict[str, StaticFile]) -> ASGIApp:
    """An application of these routes. `pages`: files that load without a key."""
    args = serving.args
    docs: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(
        title="pyvllm",
        version=__version__,
        root_path=args.root_path,
        redirect_slashes=False,
        middleware=_middleware(serving, open_paths={HEALTH, *pages}),
        exception_handlers={ApiError: _answer_api_error, HTTPException: _answer_http_exception},
        **(docs if args.disable_fastapi_docs else {}),
    )
    for route in routes:
        _add(app, route)
    for path, file in pages.items():
        app.add_api_route(path, _file_endpoint(file), methods=["GET", "HEAD"], include_in_schema=False)
    _describe_bodies(app, [route.body for route in routes if route.body is not None])
    return FrontDoor(app, serving)


def _routes(serving: Serving) -> list[Route]:
    about, tokens = Routes(serving), Tokens(serving)
    completions, chat = Completions(serving), Chat(serving)
    return [
        Route(path=HEALTH, method="GET", endpoint=about.health),
        Route(path="/ping", method="GET", endpoint=about.health),
        Route(path="/ping", method="POST", endpoint=about.health),
        Route(path="/version", method="GET", endpoint=about.version),
        Route(path="/load", method="GET", endpoint=about.load),
        Route(path=METRICS, method="GET", endpoint=about.metrics, answer="text/plain"),
        Route(path="/engine/snapshot", method="GET", endpoint=about.snapshot),
        Route(path="/v1/models", method="GET", endpoint=about.models),
        Route(path="/v1/models/{model_id:path}", method="GET", endpoint=about.model),
        Route(path="/v1/completions", method="POST", endpoint=completions.create, body=CompletionRequest),
        Route(path="/v1/chat/completions", method="POST", endpoint=chat.create, body=ChatCompletionRequest),
        Route(path="/invocations", method="POST", endpoint=about.invocations, body=CompletionRequest),
        Route(path="/tokenize", method="POST", endpoint=tokens.tokenize, body=TokenizeBody),
        Route(path="/detokenize", method="POST", endpoint=tokens.detokenize, body=DetokenizeBody),
    ]


def _add(app: FastAPI, route: Route) -> None:
    if route.method == "GET":
        app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    extra: dict[str, Any] = {}
    if route.body is not None:
        schema = {"$ref": _SCHEMAS + route.body.__name__}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{" in route.path:
        extra["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    app.add_api_route(
        route.path,
        route.endpoint,
        methods=[route.method],
        name=f"{route.method} {route.path}",
        description=inspect.getdoc(route.endpoint),
        response_model=None,
        openapi_extra=extra or None,
        responses={
            200: {"content": {route.answer: {}}, "description": "The answer."},
            "4XX": {"description": "The request is wrong: an error of OpenAI's shape."},
            "5XX": {"description": "The server cannot answer: an error of OpenAI's shape."},
        },
    )


def _describe_bodies(app: FastAPI, bodies: list[type[Body]]) -> None:
    """Have the schemas of bodies, which are read without FastAPI's help, in its description."""
    describe = app.openapi
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}")

    def openapi() -> dict[str, Any]:
        described = describe()
        described.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _file_endpoint(file: StaticFile) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return Response(file.content, media_type=file.media_type, headers=HEADERS)

    return endpoint


def _middleware(serving: Serving, open_paths: set[str]) -> list[Middleware]:
    """From the outermost to the innermost."""
    args = serving.args
    layers: list[Middleware] = []
    if args.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=args.allowed_origins,
                allow_methods=args.allowed_methods,
                allow_headers=args.allowed_headers,
                allow_credentials=args.allow_credentials,
            )
        )
    layers += [load_middleware(name) for name in args.middleware]
    if args.api_key:
        layers.append(Middleware(ApiKeys, keys=args.api_key, open_paths=open_paths))
    return [*layers, Middleware(ErrorBoundary, serving=serving)]


def load_middleware(name: str) -> Middleware:
    """What an import path names. Raises ValueError for what is neither a class nor a coroutine function."""
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"middleware {name!r} cannot be imported: {error}") from error
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    if isinstance(found, type):
        return Middleware(cast(Any, found))
    raise ValueError(f"middleware must be classes or coroutine functions, got {name!r}")


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Of the framework: no such path, or not that method."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    texts = {404: "there is no such path", 405: "the path does not take this method"}
    message = texts.get(status, status.phrase)
    return ApiError(status, message, headers=error.headers).response()
