"""What passes between an engine's process and its front end: frames on a socket. Nothing is pickled."""

from __future__ import annotations

import builtins
import dataclasses
import json
import struct
import traceback
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final

from pyvllm._core import ParameterError
from pyvllm.config import EngineArgs
from pyvllm.engine import EngineInfo
from pyvllm.sampling_params import RequestOutputKind, SamplingParams

_HEADER: Final = struct.Struct("<IB")
RECEIVE_BYTES: Final = 1 << 18
"""Most that is read from a socket at once."""


class Kind(IntEnum):
    """What a frame holds. To the engine first, then from it."""

    START = 0
    """JSON: the engine's arguments."""
    ADD = 1
    """A request, made by the core."""
    ABORT = 2
    """Number of a request."""
    CALL = 3
    """Number of the call, name of a method."""
    READY = 10
    """JSON: the engine is loaded."""
    FAILED = 11
    """JSON: the error that ended the engine."""
    STEP = 12
    """Outputs of a step, made by the core."""
    STEP_FAILED = 13
    """Number of the last request taken in, then JSON: the error. Requests up to that one are lost."""
    REFUSED = 14
    """Number of a request, then JSON: why the engine does not take it."""
    ALIVE = 15
    """Steps so far, whether one runs. Comes now and then."""
    REPLY = 16
    """Number of a call, what it returned."""


NUMBER: Final = struct.Struct("<Q")
"""Number of a request or a call."""
PROGRESS: Final = struct.Struct("<Q?")
"""What `Kind.ALIVE` holds."""


def frame(kind: Kind, *parts: bytes) -> bytes:
    """A frame of that kind that holds `parts`."""
    return b"".join((_HEADER.pack(sum(map(len, parts)), kind), *parts))


class FrameReader:
    """Puts together frames from pieces as they come."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, piece: bytes) -> Iterator[tuple[Kind, bytes]]:
        """The frames that are whole with this piece. To be read to the end before the next one."""
        pending = self._pending
        pending += piece
        start = 0
        while len(pending) - start >= _HEADER.size:
            length, kind = _HEADER.unpack_from(pending, start)
            end = start + _HEADER.size + length
            if end > len(pending):
                break
            yield Kind(kind), bytes(pending[start + _HEADER.size : end])
            start = end
        del pending[:start]


def to_json(value: object) -> bytes:
    """As JSON. Raises `TypeError` for what JSON does not have."""
    return json.dumps(value).encode()


def args_to_json(args: EngineArgs) -> dict[str, Any]:
    """An engine's arguments as JSON has them."""
    return {item.name: getattr(args, item.name) for item in dataclasses.fields(EngineArgs)}


def info_to_json(info: EngineInfo) -> dict[str, Any]:
    """Facts about an engine as JSON has them."""
    return dataclasses.asdict(info)


def info_from_json(fields: dict[str, Any]) -> EngineInfo:
    """The inverse of `info_to_json`."""
    params = fields["default_sampling_params"]
    params["output_kind"] = RequestOutputKind(params["output_kind"])
    if params["logit_bias"] is not None:  # Keys of JSON are strings.
        params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
    return EngineInfo(**(fields | {"default_sampling_params": SamplingParams(**params)}))


def error_to_json(error: BaseException) -> bytes:
    """An exception: its type and those it inherits from, its text, and where it was raised."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    if isinstance(error, ParameterError):
        kinds.insert(0, "ParameterError")
    place = "".join(traceback.format_exception(error))
    return to_json({"type": type(error).__name__, "kinds": kinds, "text": str(error), "traceback": place})


def error_from_json(message: bytes) -> Exception:
    """An exception of the same type and text; of the nearest built-in type, its own named, if it is of another.

    The traceback follows as a note unless the text alone is meant for users.
    """
    fields = json.loads(message)
    for kind in fields["kinds"]:
        found = ParameterError if kind == "ParameterError" else getattr(builtins, kind, None)
        if not isinstance(found, type) or not issubclass(found, Exception):
            continue
        text = fields["text"] if kind == fields["type"] else f"{fields['type']}: {fields['text']}"
        try:
            error = found(text)
        except TypeError:  # UnicodeDecodeError and the like want more arguments: take what they inherit from.
            continue
        if not isinstance(error, OSError | ValueError):
            error.add_note(f"In the engine's process:\n{fields['traceback']}")
        return error
    return RuntimeError(f"{fields['type']}: {fields['text']}")
