"""What the page's live view is drawn from: the engine at one moment, as JSON."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from pyvllm import _core
from pyvllm.async_llm import EngineSnapshot
from pyvllm.engine import EngineInfo

_COUNTERS: Final = tuple(name for name in dir(_core.Stats) if not name.startswith("_"))


def snapshot_json(snapshot: EngineSnapshot, stats: _core.Stats, info: EngineInfo, time: float) -> bytes:
    """`time`: seconds by a clock that never goes back, so that a reader knows the rates of counters."""
    found = {
        "time": time,
        "block_size": info.block_size,
        "block_bytes": info.block_bytes,
        "stats": {name: getattr(stats, name) for name in _COUNTERS},
        "requests": snapshot.requests,
        "blocks": block_runs(snapshot),
    }
    return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)


def block_runs(snapshot: EngineSnapshot) -> dict[str, Any]:
    """Blocks in the order of their numbers, as runs of equal ones: few while a pool of any size is idle.

    Columns with an entry for each run: `lengths` in blocks, and what holds for all of them.
    """
    columns: dict[str, NDArray[Any]] = {
        "ref_counts": snapshot.ref_counts,
        "owners": snapshot.owners,
        "cached": snapshot.cached.view(np.uint8),
    }
    total = len(snapshot.owners)
    differs = np.zeros(max(0, total - 1), np.bool_)
    for column in columns.values():
        differs |= column[1:] != column[:-1]
    starts = np.flatnonzero(np.concatenate(([total > 0], differs)))
    lengths = np.diff(starts, append=total)
    return {"lengths": lengths, **{name: column[starts] for name, column in columns.items()}}
