"""Routes about the server itself: health, models, metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from pyvllm._core import __version__
from pyvllm.async_llm import EngineDeadError
from pyvllm.server.chat import Chat
from pyvllm.server.completions import Completions
from pyvllm.server.errors import ApiError, bad_request, unavailable
from pyvllm.server.live_view import snapshot_json
from pyvllm.server.parsing import read_json
from pyvllm.server.serving import Serving
from pyvllm.server.tasks import JSON_TYPE

SNAPSHOT_S: Final = 0.2
"""A snapshot makes the engine pause between two steps: however many look at it, it is made no more often."""
_OWNER: Final = "pyvllm"


class Routes:
    """All that is no text from a model."""

    def __init__(self, serving: Serving) -> None:
        """What all routes share."""
        self._serving = serving
        self._completions = Completions(serving)
        self._chat = Chat(serving)
        self._snapshot: asyncio.Future[bytes] | None = None
        self._snapshot_at = 0.0

    async def health(self, request: Request) -> Response:
        """200 while tokens can be made, 503 once the engine is gone, hangs, or the server shuts down."""
        try:
            await self._serving.llm.check_health()
        except EngineDeadError:
            raise unavailable("the engine does not answer") from None
        return Response()

    async def invocations(self, request: Request) -> Response:
        """A completion or a chat, whichever the body is."""
        found = await read_json(request, self._serving.args.max_body_bytes)
        if "messages" in found:
            return await self._chat.answer(request, found)
        if "prompt" in found:
            return await self._completions.answer(request, found)
        raise bad_request(None, "the body must have messages or a prompt")

    async def version(self, request: Request) -> Response:
        """The package's."""
        return _json({"version": __version__})

    async def load(self, request: Request) -> Response:
        """Requests for text that are being answered."""
        return _json({"server_load": self._serving.load})

    async def metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        return Response(self._serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """All names under which the model is served."""
        return _json({"object": "list", "data": [self._model(name) for name in self._serving.names]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["model_id"]
        if name not in self._serving.names:
            known = ", ".join(self._serving.names)
            raise ApiError(404, f"the model {name[:200]!r} does not exist; there is {known}", param="model")
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._serving.created,
            "owned_by": _OWNER,
            "root": self._serving.llm.info.model,
            "parent": None,
            "max_model_len": self._serving.llm.info.max_model_len,
            "permission": [],
        }

    async def snapshot(self, request: Request) -> Response:
        """The KV pool's blocks and the requests that hold them, and the queues; made anew a few times a second."""
        now = time.monotonic()
        if self._snapshot is None or now - self._snapshot_at > SNAPSHOT_S:
            self._snapshot_at = now
            self._snapshot = asyncio.ensure_future(self._take_snapshot())
        # Cancelling one reader must not take it from the others.
        body = await asyncio.shield(self._snapshot)
        return Response(body, media_type=JSON_TYPE, headers={"Cache-Control": "no-store"})

    async def _take_snapshot(self) -> bytes:
        llm = self._serving.llm
        snapshot = await llm.snapshot()
        return snapshot_json(snapshot, llm.stats(), llm.info, time.monotonic())


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type=JSON_TYPE)
