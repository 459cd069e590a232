"""API keys: every path needs one, save those that are listed."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from pyvllm.server.errors import ApiError


class ApiKeys:
    """ASGI middleware that answers 401 to whoever brings no key.

    It judges the path of the request line, never a URL put together from headers, and lets nothing pass by prefix.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], open_paths: Collection[str]) -> None:
        """`open_paths`: what needs no key, spelled exactly."""
        self._app = app
        self._keys = [key.encode(errors="surrogateescape") for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = ApiError(
                401,
                "a valid API key is needed, as in the header Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path in self._open_paths and scope["method"] in ("GET", "HEAD"):
                return True
            if scope["method"] == "OPTIONS":
                return True
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
        kind, _, key = given.partition(b" ")
        # All keys are compared, so that the time tells nothing about which one was near.
        matches = [hmac.compare_digest(key.strip(), one) for one in self._keys]
        return kind.lower() == b"bearer" and any(matches)
