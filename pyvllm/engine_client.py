"""Speaks with an engine's process from an event loop: sends requests, wakes who waits, sees whether it lives."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from pyvllm import _core
from pyvllm.engine_spawn import EngineDeadError, EngineProcess
from pyvllm.wire import NUMBER, PROGRESS, RECEIVE_BYTES, FrameReader, Kind, error_from_json, frame

WATCH_S: Final = 0.5
"""Most seconds between two looks at an engine's signs of life."""
HEARTBEAT_TIMEOUT_S: Final = 4.0
"""Without a sign of life for so long an engine is dead: eight of its beats, which come from a thread of their own, so
during a step too. All that wait are told within 5 s. Time in which this side was held up does not count."""
_CLOCK_STEP_S: Final = 0.01
"""Later than this after a moment the clock is certainly past it."""


class EngineGenerateError(RuntimeError):
    """A step failed while this request was in the engine, which goes on without it."""


class EngineClient:
    """The requests of one event loop at an engine's process: sends them, and wakes who waits for one.

    Streams are known by number only, so that one which is forgotten ends.
    """

    def __init__(
        self,
        process: EngineProcess,
        front: _core.FrontEnd,
        *,
        heartbeat_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        """`heartbeat_timeout_s`: a process that shows no sign of life for so long is dead; `stall_timeout_s`: and so is
        one whose step takes so long.
        """
        self.front = front
        self.dead_error: EngineDeadError | None = None
        self.forgotten: deque[int] = deque()
        """Numbers of streams that nobody holds any more. The garbage collector may be anywhere: it only leaves word."""
        self._process = process
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._connection = process.connection
        self._connection.setblocking(False)
        self._frames = FrameReader()
        self._outgoing = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._errors: dict[int, Exception] = {}
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._idle: asyncio.Future[None] | None = None
        self._num_calls = 0
        self._num_steps = -1
        self._is_stepping = False
        self._heard_at = self._progress_at = self._watched_at = time.monotonic()

    # ---- requests ----

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine is dead; attach to the running event loop."""
        if self.dead_error is None:
            self._attach(asyncio.get_running_loop())
            self._drop_forgotten()
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))

    def check_process(self) -> None:
        """Raise `EngineDeadError` if the engine's process has ended, even if reading has not told yet."""
        self.check_alive()
        if self._process.has_ended():
            self._on_readable()  # Its last words tell more than its end.
            if self.dead_error is None:
                self._end()
            self.check_alive()

    def send(self, kind: Kind, *parts: bytes) -> None:
        """Send a frame, in part later if the engine does not read just now."""
        message = frame(kind, *parts)
        sent = 0
        if not self._outgoing:
            try:
                sent = self._connection.send(message)
            except BlockingIOError:
                pass
            except OSError:
                return  # The engine is gone, which reading will tell.
        if sent < len(message):
            self._outgoing += message[sent:]
            if self._loop is not None:
                self._loop.add_writer(self._connection, self._flush)

    def _flush(self) -> None:
        try:
            sent = self._connection.send(self._outgoing)
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()
            sent = 0
        del self._outgoing[:sent]
        if not self._outgoing and self._loop is not None:
            self._loop.remove_writer(self._connection)

    def news(self, number: int) -> asyncio.Future[None]:
        """What is done once there is news of a request, or its end. One task waits for a request at a time."""
        if self._loop is not asyncio.get_running_loop():
            self.check_alive()
        waiter = self._waiting.get(number)
        if waiter is not None and not waiter.done():
            raise RuntimeError("another task waits for this stream already")
        assert self._loop is not None
        waiter = self._waiting[number] = self._loop.create_future()
        return waiter

    def call_on_news(self, number: int, callback: Callable[[], None] | None) -> None:
        """Have `callback`, which must not raise, called at once when there is news of a request; None: no more."""
        self._callbacks.pop(number, None)
        if callback is not None:
            self._callbacks[number] = callback

    def raise_if_failed(self, number: int) -> None:
        """Raise what a request ended of, if it failed."""
        error = self._errors.pop(number, None)
        if error is not None:
            raise error
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))

    def forget(self, number: int) -> None:
        """A request's outputs are of no use any more: abort it if it has not finished."""
        self._errors.pop(number, None)
        self._callbacks.pop(number, None)
        self._wake(number)
        if self.front.drop_request(number) and self.dead_error is None:
            self.send(Kind.ABORT, NUMBER.pack(number))

    def abort(self, number: int) -> None:
        """End a request with what it has so far."""
        if self.front.abort(number):
            self.send(Kind.ABORT, NUMBER.pack(number))
            self._wake(number)

    async def call(self, method: str) -> bytes:
        """What a method of the engine returns, between two steps."""
        self.check_alive()
        self._num_calls += 1
        number = self._num_calls
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        try:
            self.send(Kind.CALL, NUMBER.pack(number), method.encode())
            return await reply
        finally:
            del self._calls[number]

    async def wait_until_idle(self) -> None:
        """Wait until no request is unfinished."""
        self.check_alive()
        while self.front.num_unfinished() and self.dead_error is None:
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def _wake(self, number: int) -> None:
        callback = self._callbacks.get(number)
        if callback is not None:
            callback()
        waiter = self._waiting.pop(number, None)
        if waiter is not None and not waiter.done():  # It is, if the task that waited was cancelled.
            waiter.set_result(None)

    # ---- what comes ----

    def _on_readable(self) -> None:
        try:
            piece = self._connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._end()
            return
        self._heard_at = time.monotonic()
        try:
            for kind, body in self._frames.feed(piece):
                self._receive(kind, body)
        except Exception as error:
            self.die(f"what the engine's process sends makes no sense: {error!r}")
            raise
        self._drop_forgotten()
        self._tell_if_idle()

    def _drop_forgotten(self) -> None:
        while self.forgotten:
            self.forget(self.forgotten.popleft())

    def _tell_if_idle(self) -> None:
        if self._idle is not None and not self._idle.done() and not self.front.num_unfinished():
            self._idle.set_result(None)

    def _receive(self, kind: Kind, body: bytes) -> None:
        if kind == Kind.STEP:
            self._progress_at = self._heard_at
            for number in self.front.receive(body):
                self._wake(number)
        elif kind == Kind.ALIVE:
            num_steps, self._is_stepping = PROGRESS.unpack(body)
            if num_steps != self._num_steps or not self._is_stepping:
                self._num_steps, self._progress_at = num_steps, self._heard_at
        elif kind == Kind.STEP_FAILED:
            cause = error_from_json(body[NUMBER.size :])
            for number in self.front.drop_through(*NUMBER.unpack_from(body)):
                self._fail(number, EngineGenerateError(f"a step failed with this request in the engine: {cause!r}"))
        elif kind == Kind.REFUSED:
            (number,) = NUMBER.unpack_from(body)
            self.front.drop_request(number)
            self._fail(number, error_from_json(body[NUMBER.size :]))
        elif kind == Kind.REPLY:
            reply = self._calls.get(*NUMBER.unpack_from(body))
            if reply is not None and not reply.done():
                reply.set_result(body[NUMBER.size :])
        elif kind == Kind.FAILED:
            self.die(f"the engine cannot go on: {error_from_json(body)!r}")
        else:
            raise ValueError(f"an engine sends no {kind.name}")

    def _fail(self, number: int, error: Exception) -> None:
        self._errors[number] = error
        self._wake(number)

    # ---- life and death ----

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read what comes in this event loop from now on. Raises `RuntimeError` if another one that runs does."""
        if self._loop is loop:
            return
        if not self._process.is_mine():
            raise RuntimeError("this AsyncLLM was made before a fork: make it in the process that uses it")
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("this AsyncLLM is in use by another event loop, which is running")
        self._detach()
        self._loop = loop
        self._heard_at = self._progress_at = time.monotonic()
        loop.add_reader(self._connection, self._on_readable)
        if self._outgoing:
            loop.add_writer(self._connection, self._flush)
        self._watch()

    def _detach(self) -> None:
        """What waits in the event loop of before waits no more."""
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            waiting: list[asyncio.Future[Any]] = [*self._waiting.values(), *self._calls.values()]
            for future in waiting + ([self._idle] if self._idle else []):
                future.cancel()
        self._waiting.clear()
        self._callbacks.clear()
        self._loop = None

    def _watch(self) -> None:
        """Look whether the engine lives, now and every `WATCH_S` seconds."""
        assert self._loop is not None
        now = time.monotonic()
        # For so long this loop was held up, or the whole machine, the engine's process with it; what has come meanwhile
        # may not be read yet. It says nothing of the engine.
        late = max(0.0, now - self._watched_at - WATCH_S)
        self._heard_at = min(now, self._heard_at + late)
        self._progress_at = min(now, self._progress_at + late)
        self._watched_at = now
        if now - self._heard_at > self._heartbeat_timeout_s:
            self.die(f"the engine's process gave no sign of life for {now - self._heard_at:.1f} s")
        elif self._is_stepping and now - self._progress_at > self._stall_timeout_s:
            self.die(f"the engine has been in one step for {now - self._progress_at:.1f} s")
        else:
            left = self._heard_at + self._heartbeat_timeout_s - now
            self._watch_timer = self._loop.call_later(min(WATCH_S, left + _CLOCK_STEP_S), self._watch)

    def _end(self) -> None:
        self.die(f"the engine's process {self._process.how_it_ended()}")

    def die(self, reason: str, *, kill: bool = True) -> None:
        """Nothing more comes from the engine: all that wait are told so."""
        if self.dead_error is not None:
            return
        self.dead_error = EngineDeadError(reason)
        if kill:
            self._process.kill()
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
        for number in {*self._waiting, *self._callbacks}:
            self._wake(number)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(reason))
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def shut_down(self) -> None:
        """Nothing more is asked of the engine. From any thread."""
        reason = "the engine was shut down"
        loop = self._loop
        if loop is None or not loop.is_running() or loop is asyncio._get_running_loop():
            self.die(reason, kill=False)
        else:
            loop.call_soon_threadsafe(functools.partial(self.die, reason, kill=False))
