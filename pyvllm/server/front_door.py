"""The outermost middleware: a name for each request, a line in the log, numbers for Prometheus."""

from __future__ import annotations

import logging
import time
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyvllm.server.errors import as_api_error
from pyvllm.server.serving import NOTES_KEY, SEND_KEY, Notes, Serving, new_request_id
from pyvllm.server.tasks import CLIENT_GONE

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "X-Request-Id"
METRICS: Final = "/metrics"
_QUIET: Final = ("/health", METRICS, "/ping", "/load", "/engine/snapshot")
"""Paths that are asked for all the time; their lines are for debugging."""
_TEXT: Final = ("/v1/completions", "/v1/chat/completions", "/invocations", "/generate")


class FrontDoor:
    """ASGI middleware around all others."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        """`serving`: what all routes share."""
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        notes = Notes(request_id=new_request_id(None if header is None else header.decode("latin-1")))
        scope[NOTES_KEY] = notes
        if not self._serving.args.middleware:
            scope[SEND_KEY] = send
        status = 0
        start = time.perf_counter()

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._serving.args.enable_request_id_headers:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = notes.request_id
            await send(message)

        counts = scope["method"] == "POST" and scope["path"].endswith(_TEXT)
        self._serving.load += counts
        try:
            await self._app(scope, receive, send_noting)
        finally:
            self._serving.load -= counts
            self._note(scope, notes, CLIENT_GONE if notes.client_gone else status, time.perf_counter() - start)

    def _note(self, scope: Scope, notes: Notes, status: int, seconds: float) -> None:
        route = scope.get("route")
        known = getattr(route, "path", None)
        self._serving.metrics.http.observe(known, scope["method"], status, seconds)
        if self._serving.args.disable_uvicorn_access_log:
            return
        level = logging.DEBUG if known in _QUIET else logging.INFO
        if not logger.isEnabledFor(level):
            return
        line = f"{scope['method']} {_shown_path(scope['path'])} {status} in {1000 * seconds:.0f} ms"
        if notes.prompt_tokens is not None:
            ends = ", ".join(sorted(set(notes.finish_reasons)))
            line += f", {notes.prompt_tokens} prompt and {notes.output_tokens} output tokens"
            line += f" ({ends})" if ends else ""
        logger.log(level, "%s, id %s", line, notes.request_id)


class ErrorBoundary:
    """ASGI middleware right around the routes: whatever one raises becomes an answer of OpenAI's shape."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        """`serving`: what all routes share."""
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if scope["type"] == "http" and scope["path"] != METRICS:
                self._serving.check_draining()
            await self._app(scope, receive, send_noting)
        except ClientDisconnect:
            scope[NOTES_KEY].client_gone = True
        except Exception as error:
            failure = as_api_error(error)
            if started:
                # An answer that has begun cannot become another; to cut it off is all that tells the client.
                raise
            await failure.response()(scope, receive, send)


def _shown_path(path: str) -> str:
    """A path as one short word, whatever a client made of it."""
    shown = "".join(c if c.isascii() and c.isprintable() and c != " " else "?" for c in path[:100])
    return shown + ("..." if len(path) > 100 else "")
