"""The sampler on one GPU: µs of a call, and the share of the time in which memory gives the logits once.

A CUDA graph of several calls, each with logits of its own, is replayed; a call's time is the graph's by their number,
so gaps between kernels count. `python -m benches.kernels.sampling [--only TEXT] [--plain]`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benches.kernels.timing import Row, memory_row, print_rows, time_chain
from pyvllm.kernels import AnyKernels
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.kernels import TritonKernels
from pyvllm.step import Flags
from tests import sampler_rows

NUM_ROWS: Final = (1, 64, 256, 1024)
VOCAB_SIZE: Final = 128256
# Several times the 60 MB of a level 2 cache.
_BYTES: Final = 400 * 2**20
_MAX_COPIES: Final = 32
# Standard deviations of logits. 0.9 of the mass lies with about 90 tokens, as in a language model, or with 78,000, as
# in one of random weights.
PEAKED: Final = 5.0
FLAT: Final = 1.0
KINDS: Final = {
    "greedy": (sampler_rows.Row(), PEAKED),
    "temperature": (sampler_rows.Row(temperature=0.8), PEAKED),
    "top_k 50": (sampler_rows.Row(temperature=1.0, top_k=50), PEAKED),
    "top_p 0.9": (sampler_rows.Row(temperature=1.0, top_p=0.9), PEAKED),
    "top_k 50, top_p 0.9": (sampler_rows.Row(temperature=1.0, top_k=50, top_p=0.9), PEAKED),
    "min_p 0.1": (sampler_rows.Row(temperature=1.0, min_p=0.1), PEAKED),
    "top_p 0.9, flat": (sampler_rows.Row(temperature=1.0, top_p=0.9), FLAT),
    "top_k 50, top_p 0.9, flat": (sampler_rows.Row(temperature=1.0, top_k=50, top_p=0.9), FLAT),
}
LOGPROBS: Final = {"logprobs 0": 0, "logprobs 5": 5, "logprobs 20": 20}


def cases(only: str = "", kernels: AnyKernels | None = None) -> list[Row]:
    """One line for each kind of rows whose name contains `only`, and each of `NUM_ROWS`."""
    kernels = kernels or TritonKernels()
    rows = [_pick_case(name, num_rows, kernels) for name in KINDS if only in name for num_rows in NUM_ROWS]
    return rows + [_logprob_case(name, num_rows, kernels) for name in LOGPROBS if only in name for num_rows in NUM_ROWS]


def _pick_case(name: str, num_rows: int, kernels: AnyKernels) -> Row:
    row, spread = KINDS[name]
    step = sampler_rows.many(row, num_rows)
    params = step.row_params.cuda()

    def start(logits: Tensor, flags: Flags = step.flags) -> object:
        return kernels.pick(logits, params, flags, VOCAB_SIZE)

    return _case(name, num_rows, spread, start)


def _logprob_case(name: str, num_rows: int, kernels: AnyKernels) -> Row:
    wanted = torch.ones(num_rows, dtype=torch.bool, device="cuda")
    tokens = torch.zeros(num_rows, dtype=torch.int32, device="cuda")

    def start(logits: Tensor) -> object:
        return kernels.logprobs(logits, tokens, wanted, LOGPROBS[name], VOCAB_SIZE)

    return _case(name, num_rows, PEAKED, start)


def _case(name: str, num_rows: int, spread: float, start: Callable[[Tensor], object]) -> Row:
    num_bytes = num_rows * VOCAB_SIZE * 2
    generator = torch.Generator("cuda").manual_seed(0)
    copies = [
        (torch.randn(num_rows, VOCAB_SIZE, device="cuda", generator=generator) * spread).bfloat16()
        for _ in range(min(_MAX_COPIES, max(2, _BYTES // num_bytes)))
    ]
    us = time_chain([partial(start, logits) for logits in copies])
    return memory_row(name, f"{num_rows}x{VOCAB_SIZE}", num_bytes, us)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--plain", action="store_true", help="plain torch, which sorts, instead of Triton")
    arguments = parser.parse_args()
    print_rows(cases(arguments.only, ReferenceKernels() if arguments.plain else None))


if __name__ == "__main__":
    main()
