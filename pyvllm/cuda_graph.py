"""CUDA graphs: the launches of a step recorded once and replayed with one call.

A graph reads its inputs where they were when it was recorded (`staging.py` and the runner's tensors keep their places)
and is never needed for a correct result. A kind of step is recorded when it comes up for the first time, after it has
run as it is, which compiles and loads all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

OutputT = TypeVar("OutputT")


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that decode steps are padded to: 1, 2, 4, every 8th to 256, 16th to 512, 32nd beyond.

    The last is `max_num_seqs`, so that every decode step has a graph.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class Graphs(Generic[OutputT]):
    """Recorded steps by kind. All share one pool of memory: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, OutputT]] = {}

    def run(self, kind: Hashable, compute: Callable[[], OutputT]) -> OutputT:
        """What `compute` does and returns; replayed if this kind of step was recorded.

        `compute` must launch the same work on the same addresses whenever it is called for a kind, and not wait for
        the device. What it returned when it was recorded is returned by every replay: the same memory, new contents.
        """
        recorded = self._recorded.get(kind)
        if recorded is None:
            output = compute()
            self._recorded[kind] = self._record(compute)
            return output
        graph, output = recorded
        graph.replay()
        return output

    def _record(self, compute: Callable[[], OutputT]) -> tuple[torch.cuda.CUDAGraph, OutputT]:
        # Not `with torch.cuda.graph(...)`, which first waits for the device and collects garbage: most of its time.
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = compute()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, output
