"""Moving blocks of KV memory: one launch for all blocks and layers, whatever their dtype."""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# 8 KB: four loads of 16 bytes for each thread of four warps.
CHUNK: Final = 1024
NUM_WARPS: Final = 4


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """See `Kernels.copy_blocks`; `pairs` `[n, 2]` int32 on the device of `pool`.

    Blocks are copied at the same time: a step's copies name no block as both source and target.
    """
    swap_blocks(pool, pool, pairs)


def swap_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """See `Kernels.swap_blocks`; `pairs` `[n, 2]` int32 on the device.

    One of the pools may be in pinned host memory, which the device reads and writes at its own address. All at the same
    time, as in `copy_blocks`.
    """
    source_words, target_words = _words(source), _words(target)
    num_layers, num_blocks, size = source_words.shape
    blocks_kernel[(len(pairs), num_layers, triton.cdiv(size, CHUNK))](
        source_words,
        target_words,
        pairs,
        num_blocks,
        target_words.shape[1],
        SIZE=size,
        CHUNK=CHUNK,
        num_warps=NUM_WARPS,
    )


def _words(pool: Tensor) -> Tensor:
    """[L, N, words of a block]: the pool `[L, N, 2, K, B, D]` as the largest integers that a block is made of."""
    blocks = pool.view(*pool.shape[:2], -1)
    block_bytes = blocks.shape[2] * pool.element_size()
    sizes = {dtype.itemsize: dtype for dtype in (torch.int16, torch.int32, torch.int64)}
    return blocks.view(sizes[math.gcd(block_bytes, 8)])


@triton.jit(do_not_specialize=["source_blocks", "target_blocks"])
def blocks_kernel(
    source: tl.tensor,
    target: tl.tensor,
    pairs: tl.tensor,
    source_blocks: tl.tensor,
    target_blocks: tl.tensor,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Grid: (pairs, layers, chunks of a block). Pools [L, blocks, SIZE]."""
    pair = pairs + tl.program_id(0) * 2
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = word < SIZE
    from_block = layer * source_blocks + tl.load(pair)
    to_block = layer * target_blocks + tl.load(pair + 1)
    words = tl.load(source + from_block * SIZE + word, mask=inside)
    tl.store(target + to_block * SIZE + word, words, mask=inside)
