"""Timing of kernels on one GPU, and tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

import torch

PEAK_TB_PER_S: Final = 4.3
"""Of one H200, read plus write, measured by a copy."""

Row = dict[str, str | int | float]


def time_chain(starts: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Microseconds of one of `starts`, all of which one CUDA graph launches: the median of `repeats` sets of replays.

    A set is four, so that only the first waits for the host. Gaps between kernels count.
    """
    for start in starts:
        start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for start in starts:
            start()
    times: list[float] = []
    for _ in range(repeats + 1):
        begin, end = _event(), _event()
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (4 * len(starts)))
    return statistics.median(times[1:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]


def memory_row(name: str, shape: str, num_bytes: int, us: float) -> Row:
    """A line of a table: `num_bytes` read and written in `us` microseconds."""
    rate = num_bytes / us * 1e-6
    return {
        "case": name, "shape": shape, "us": round(us, 2), "tb_per_s": round(rate, 3),
        "percent": round(100 * rate / PEAK_TB_PER_S, 1),
    }  # fmt: skip


def print_rows(rows: Sequence[Row]) -> None:
    """As a table; a line for each row, columns by the names of the first that has most."""
    names = max((list(row) for row in rows), key=len)
    lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
