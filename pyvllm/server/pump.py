"""From the outputs of streams to the bytes of one answer, without waking a task for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pyvllm import _core
from pyvllm.async_llm import OutputStream

Write = Callable[[int, _core.Output], bytes]
"""Number of a stream and what came of it -> bytes, perhaps none."""


class Pipe(Protocol):
    """Where the pieces of an answer's body go."""

    def is_full(self) -> bool:
        """Whether pieces have to wait until `drain` has returned."""

    def write(self, data: bytes) -> bool:
        """Send a piece, which is not empty; whether it waits for `drain` to do so."""

    async def drain(self) -> None:
        """Wait until the client has taken enough."""


class _Connection:
    """A connection of uvicorn's: pieces are written to it as they come."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def is_full(self) -> bool:
        return self._cycle.flow.write_paused

    def write(self, data: bytes) -> bool:
        if not (self._cycle.disconnected or self._cycle.transport.is_closing()):
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return False

    async def drain(self) -> None:
        await self._cycle.flow.drain()


class _Buffer:
    """Any ASGI `send`, which has to be awaited: a piece waits for `drain`, and then it is full."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._data = b""

    def is_full(self) -> bool:
        return bool(self._data)

    def write(self, data: bytes) -> bool:
        self._data += data
        return True

    async def drain(self) -> None:
        while self._data:
            data, self._data = self._data, b""
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


def open_pipe(send: Send) -> Pipe:
    """The shortest way for the body of an answer that has begun."""
    cycle = getattr(send, "__self__", None)
    if isinstance(cycle, RequestResponseCycle) and cycle.chunked_encoding and cycle.scope["method"] != "HEAD":
        return _Connection(cycle)
    return _Buffer(send)


class Pump:
    """Writes what comes of streams as it comes. While a client does not read, the streams put outputs together."""

    def __init__(
        self,
        streams: Sequence[OutputStream],
        pipe: Pipe,
        write: Write,
        finish: Callable[[int, _core.Output], None],
    ) -> None:
        """`write` is called with each output, in order, and `finish` with the last one of each stream."""
        self._streams, self._pipe = streams, pipe
        self._write, self._finish = write, finish
        self._left = set(range(len(streams)))
        self._error: Exception | None = None
        self._attention = asyncio.Event()

    async def run(self) -> None:
        """Return once all streams have ended and been written. Raises what a stream raises."""
        for number, stream in enumerate(self._streams):
            stream.on_news(partial(self._pump, number))
        while self._left and self._error is None:
            for number in list(self._left):
                self._pump(number)
            await self._attention.wait()
            self._attention.clear()
            await self._pipe.drain()
        if self._error is not None:
            raise self._error

    def _pump(self, number: int) -> None:
        """Write what has come of a stream. Called by the engine's client, so it must not raise."""
        try:
            if self._pipe.is_full():
                self._attention.set()
                return
            for output in self._streams[number].poll():
                data = self._write(number, output)
                if data and self._pipe.write(data):
                    self._attention.set()
                if output.finished:
                    self._left.discard(number)
                    self._attention.set()
                    self._finish(number, output)
        except Exception as error:
            self._error = self._error or error
            self._attention.set()
