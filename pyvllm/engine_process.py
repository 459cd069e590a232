"""The engine's own process: takes requests from a socket, steps, and sends one message a step.

Run as `python -m pyvllm.engine_process SOCKET PARENT LINKED`; `pyvllm.engine_client` does.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from pyvllm import _core
from pyvllm.config import EngineArgs
from pyvllm.wire import (
    NUMBER,
    PROGRESS,
    RECEIVE_BYTES,
    FrameReader,
    Kind,
    error_to_json,
    frame,
    info_to_json,
    to_json,
)

if TYPE_CHECKING:
    from pyvllm.engine import Engine

logger = logging.getLogger("pyvllm")

BEAT_S: Final = 0.5
"""Seconds between two signs of life."""
_PR_SET_PDEATHSIG: Final = 1


class Channel:
    """Frames to and from the front end. One thread may receive, any may send."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection`: blocking."""
        self.connection = connection
        self._frames = FrameReader()
        self._lock = threading.Lock()

    def send(self, kind: Kind, *parts: bytes) -> None:
        """Send a frame. Waits while the front end does not read: nothing piles up here."""
        message = frame(kind, *parts)
        with self._lock:
            self.connection.sendall(message)

    def receive(self, *, wait: bool) -> list[tuple[Kind, bytes]]:
        """Frames that have come. `wait`: until some bytes are there. Raises `EOFError` if the front end has closed."""
        try:
            piece = self.connection.recv(RECEIVE_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not piece:
            raise EOFError("the front end has closed the connection")
        return list(self._frames.feed(piece))


class Service:
    """Steps an engine for a front end at the other end of a channel."""

    def __init__(self, channel: Channel) -> None:
        """Nothing is served until `run`."""
        self.num_steps = 0
        self.is_stepping = False
        self._channel = channel
        self._last_number = 0

    def run(self, engine: Engine) -> None:
        """Serve until the channel ends, which raises `EOFError`. Raises what leaves the engine unusable."""
        while True:
            frames = self._channel.receive(wait=not engine.has_unfinished())
            self._take_in(engine, frames)
            outputs = self._step(engine) if engine.has_unfinished() else []
            if frames or outputs:
                self._channel.send(Kind.STEP, _core.encode_step(outputs, engine.stats(), self._last_number))

    def _take_in(self, engine: Engine, frames: Iterable[tuple[Kind, bytes]]) -> None:
        for kind, body in frames:
            if kind == Kind.ADD:
                self._last_number += 1  # as the front end counts, whatever becomes of the request
                try:
                    engine.add_message(body)
                except Exception as error:
                    self._channel.send(Kind.REFUSED, NUMBER.pack(self._last_number), error_to_json(error))
            elif kind == Kind.ABORT:
                engine.abort(str(*NUMBER.unpack(body)))
            elif kind == Kind.CALL:
                self._channel.send(Kind.REPLY, body[: NUMBER.size], _call(engine, body[NUMBER.size :]))
            else:
                raise ValueError(f"a front end sends no {kind.name}")

    def _step(self, engine: Engine) -> list[_core.Output]:
        self.is_stepping = True
        try:
            return engine.step()
        except Exception as error:
            self._channel.send(Kind.STEP_FAILED, NUMBER.pack(self._last_number), error_to_json(error))
            engine.warm_up()  # Whether it can go on.
            return []
        finally:
            self.num_steps += 1
            self.is_stepping = False


def _call(engine: Engine, method: bytes) -> bytes:
    match method:
        case b"reset_prefix_cache":
            return bytes([engine.reset_prefix_cache()])
        case b"block_map":
            return engine.block_map().to_bytes()
    raise ValueError(f"no method {method!r}")


def _watch(channel: Channel, service: Service, parent: int) -> None:
    """Show that the process lives, and end it when its parent does. Runs in a thread of its own."""
    poll = select.poll()
    poll.register(channel.connection, 0)  # tells of the other end's closing, even while frames are waiting
    # A closed connection says it at once; a parent that was forked leaves it open in its children.
    while not poll.poll(BEAT_S * 1000) and os.getppid() == parent:
        try:
            channel.send(Kind.ALIVE, PROGRESS.pack(service.num_steps, service.is_stepping))
        except OSError:
            break
    _exit(0)


def _exit(status: int) -> None:
    """End the process, whatever its other threads do: there is nothing to save, and the system frees the rest."""
    logging.shutdown()
    os._exit(status)


def _receive_start(channel: Channel) -> dict[str, Any]:
    frames: list[tuple[Kind, bytes]] = []
    while not frames:
        frames = channel.receive(wait=True)
    fields: dict[str, Any] = json.loads(frames[0][1])
    return fields


def _load(start: dict[str, Any]) -> Engine:
    from pyvllm.loading import build_engine
    from pyvllm.logging import configure_logging

    configure_logging(start["log_level"])
    engine = build_engine(EngineArgs(**start["engine_args"]))
    engine.warm_up()
    return engine


def main(argv: list[str]) -> None:
    """Serve the front end at the other end of an inherited socket until it closes."""
    descriptor, parent, linked = map(int, argv)
    # Who interrupts or ends the program, ends its front end, which drains the engine first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if linked:  # Made by the parent's main thread: the signal comes when the thread that made a process ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    service = Service(channel)
    threading.Thread(target=_watch, args=(channel, service, parent), daemon=True).start()
    ready = False
    try:
        import pyvllm.loading  # noqa: F401  takes seconds, which the parent uses to find the model

        engine = _load(_receive_start(channel))
        stats = _core.encode_step([], engine.stats(), 0)
        facts = {"info": info_to_json(engine.info), "limits": engine.limits().hex(), "stats": stats.hex()}
        channel.send(Kind.READY, to_json(facts))
        ready = True
        service.run(engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _exit(0)
    except BaseException as error:
        if ready:
            logger.exception("the engine cannot go on")
        channel.send(Kind.FAILED, error_to_json(error))
        _exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
