"""Starts and ends the engine's own process, which runs `pyvllm.engine_process`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyvllm.config import EngineArgs
from pyvllm.engine import EngineInfo
from pyvllm.wire import (
    RECEIVE_BYTES,
    FrameReader,
    Kind,
    args_to_json,
    error_from_json,
    frame,
    info_from_json,
    to_json,
)

STOP_S: Final = 3.0
"""Seconds an engine has to end by itself."""


class EngineDeadError(RuntimeError):
    """The engine's process has ended, or hangs: nothing more can come from it."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine tells once it is loaded."""

    info: EngineInfo
    """What users may ask."""
    limits: bytes
    """What a request may ask for, for a `_core.FrontEnd`."""
    stats: bytes
    """A first message for it."""


class EngineProcess:
    """An engine in a process of its own. It ends when `stop` is called, and when this process does."""

    def __init__(self) -> None:
        """Start the process; it loads nothing before `load`."""
        self.connection, theirs = socket.socketpair()
        self._maker = os.getpid()
        linked = threading.current_thread() is threading.main_thread()
        command = [sys.executable, "-m", "pyvllm.engine_process", theirs.fileno(), os.getpid(), int(linked)]
        # The modules that this program sees, and none from the working directory that it does not.
        package = str(Path(__file__).parents[1])
        paths = [path or os.curdir for path in sys.path] + [package]
        with theirs:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in a terminal is for this process alone.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
            )

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def send_arguments(self, args: EngineArgs) -> None:
        """Let it load an engine."""
        level = logging.getLevelName(logging.getLogger("pyvllm").getEffectiveLevel())
        if level not in logging.getLevelNamesMapping():
            level = "INFO"
        self.connection.sendall(frame(Kind.START, to_json({"engine_args": args_to_json(args), "log_level": level})))

    def wait_loaded(self) -> EngineFacts:
        """Wait until the engine can make tokens. Raises what loading raised."""
        frames = FrameReader()
        while piece := self.connection.recv(RECEIVE_BYTES):
            for kind, body in frames.feed(piece):
                if kind == Kind.FAILED:
                    raise error_from_json(body)
                if kind == Kind.READY:
                    facts: dict[str, Any] = json.loads(body)
                    return EngineFacts(
                        info=info_from_json(facts["info"]),
                        limits=bytes.fromhex(facts["limits"]),
                        stats=bytes.fromhex(facts["stats"]),
                    )
        raise EngineDeadError(f"the engine's process {self.how_it_ended()} while it was loading")

    def how_it_ended(self) -> str:
        """In words, for messages."""
        try:
            status = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if status >= 0:
            return f"ended with exit status {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def is_mine(self) -> bool:
        """Whether this process made it, and is not one that was forked from that."""
        return os.getpid() == self._maker

    def has_ended(self) -> bool:
        """Whether the process is no more."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process at once, even if it is stopped."""
        self._process.kill()

    def stop(self) -> None:
        """End the process. May be called again; does nothing in a process forked from the one that made it."""
        if not self.is_mine() or self._process.returncode is not None:
            return
        with contextlib.suppress(OSError):  # The other end may be gone.
            self.connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # A driver may hold it: it is not waited for then.
                self._process.wait(STOP_S)
