"""Rows of the embedding table."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# One load of 16 bytes of half precision for each thread of four warps.
BLOCK: Final = 1024
NUM_WARPS: Final = 4


def embed(token_ids: Tensor, previous: Tensor, table: Tensor) -> Tensor:
    """See `Kernels.embed`; all contiguous."""
    size = table.shape[1]
    output = torch.empty(len(token_ids), size, dtype=table.dtype, device=table.device)
    embed_kernel[(len(token_ids), triton.cdiv(size, BLOCK))](
        token_ids, previous, table, output, SIZE=size, BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return output


@triton.jit
def embed_kernel(
    token_ids: tl.tensor,
    previous: tl.tensor,
    table: tl.tensor,
    output: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (tokens, blocks of a row). `table` [V, SIZE], `output` [T, SIZE]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    row = tl.load(token_ids + token)
    if row < 0:
        row = tl.load(previous + (-1 - row))
    x = tl.load(table + row.to(tl.int64) * SIZE + column, mask=inside)
    tl.store(output + token * SIZE + column, x, mask=inside)
