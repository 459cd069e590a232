"""Repetition, frequency and presence penalties, on the logits of the tokens listed alone."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyvllm.kernels.triton.sampling import FIELDS, float_field
from pyvllm.step import RowParam, StepView

_BLOCK: Final = 256
# Programs that share a row's list, whose length only the device knows.
_SHARES: Final = 8

PRESENCE = tl.constexpr(int(RowParam.PRESENCE_PENALTY))
FREQUENCY = tl.constexpr(int(RowParam.FREQUENCY_PENALTY))
REPETITION = tl.constexpr(int(RowParam.REPETITION_PENALTY))
# What a token's count starts with when it is listed: above the number of times that a context can hold.
LISTED = tl.constexpr(1 << 20)


def penalise_(values: Tensor, step: StepView, previous: Tensor | None) -> None:
    """See `Kernels.penalise_`."""
    num_rows, vocab_size = len(step.penalty_rows), values.shape[1]
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=values.device)
    lists = (step.penalty_offsets, step.penalty_tokens, previous if previous is not None and len(previous) else None)
    grid = (_SHARES, num_rows)
    count_kernel[grid](*lists, counts, vocab_size, SHARES=_SHARES, BLOCK=_BLOCK)
    penalise_kernel[grid](
        *lists, counts, step.penalty_rows, step.row_params, values, values.stride(0), vocab_size,
        SHARES=_SHARES, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit
def count_kernel(
    offsets: tl.tensor,
    tokens: tl.tensor,
    previous: tl.tensor,
    counts: tl.tensor,
    vocab_size: tl.tensor,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (SHARES, lists). Adds up the times of each token in `counts` [lists, vocab_size], and LISTED each time."""
    counts += tl.program_id(1).to(tl.int64) * vocab_size
    end = tl.load(offsets + tl.program_id(1) + 1)
    first = tl.load(offsets + tl.program_id(1)) + tl.program_id(0) * BLOCK
    for start in range(first, end, SHARES * BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = listed_tokens(tokens, previous, at, end)
        times = tl.load(tokens + at * 2 + 1, mask=at < end, other=0)
        tl.atomic_add(counts + token, times + LISTED, mask=at < end, sem="relaxed")


@triton.jit
def penalise_kernel(
    offsets: tl.tensor,
    tokens: tl.tensor,
    previous: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    row_params: tl.tensor,
    values: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid as for `count_kernel`. Whoever takes a token's count, which is 0 then, changes its value."""
    row = tl.load(rows + tl.program_id(1)).to(tl.int64)
    params = row_params + row * FIELDS
    presence, frequency = float_field(params, PRESENCE), float_field(params, FREQUENCY)
    repetition = float_field(params, REPETITION)
    counts += tl.program_id(1).to(tl.int64) * vocab_size
    values += row * row_stride
    end = tl.load(offsets + tl.program_id(1) + 1)
    first = tl.load(offsets + tl.program_id(1)) + tl.program_id(0) * BLOCK
    for start in range(first, end, SHARES * BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = listed_tokens(tokens, previous, at, end)
        count = tl.atomic_xchg(counts + token, 0, mask=at < end, sem="relaxed")
        mine = (at < end) & (count != 0)
        times = count % LISTED
        value = tl.load(values + token, mask=mine, other=0.0)
        value = tl.where(value > 0, value / repetition, value * repetition)
        value -= frequency * times
        value -= tl.where(times > 0, presence, 0.0)
        tl.store(values + token, value, mask=mine)


@triton.jit
def listed_tokens(tokens: tl.tensor, previous: tl.tensor, at: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Tokens of the entries `at`, those before `end`: negative ones are looked up in `previous`."""
    token = tl.load(tokens + at * 2, mask=at < end, other=0)
    if previous is not None:
        sampled = tl.load(previous - 1 - token, mask=token < 0, other=0)
        token = tl.where(token < 0, sampled, token)
    return token
