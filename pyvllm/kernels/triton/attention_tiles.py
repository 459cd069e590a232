"""What the attention kernels share: addresses of tiles of keys in paged memory, and scores in units of log2.

A tile is `TILE` consecutive positions of one sequence. Where a block holds whole tiles, one block id gives its address
(`PAGED_ROWS` false); else each of its rows has its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Where the maximum of a row starts. Finite: a row that sees nothing in its first tile must not compute inf - inf.
MASKED = tl.constexpr(-1e30)


@triton.jit
def tile_block(
    block_table: tl.tensor, tile: tl.tensor, end: tl.tensor, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """The block of a tile, or of each of its rows; 0 for what lies at or behind position `end`.

    `block_table`: pointer to the sequence's block ids.
    """
    if BLOCK_SIZE % TILE == 0:
        return tl.load(block_table + tile // (BLOCK_SIZE // TILE), mask=tile * TILE < end, other=0)
    else:
        position = tile * TILE + tl.arange(0, TILE)
        return tl.load(block_table + position // BLOCK_SIZE, mask=position < end, other=0)


@triton.jit
def tile_rows(
    block: tl.tensor,
    tile: tl.tensor,
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """[TILE] int64: offset in a layer's KV memory of each key of a tile. `block` is what `tile_block` gave."""
    row = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        in_block = (tile % (BLOCK_SIZE // TILE)) * TILE + row
    else:
        in_block = (tile * TILE + row) % BLOCK_SIZE
    block_start = block.to(tl.int64) * (2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    return block_start + (kv_head * (BLOCK_SIZE * HEAD_DIM) + in_block * HEAD_DIM)


@triton.jit
def log2_factor(scale: tl.tensor, SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr) -> tl.tensor:
    """What turns the scores of `transform` into units of log2."""
    if SOFTCAP > 0 or HAS_SLOPES:
        return 1.0
    else:
        return scale * LOG2_E


@triton.jit
def transform(
    products: tl.tensor,
    distance: tl.tensor,
    slopes: tl.tensor,
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
) -> tl.tensor:
    """Scores from products of queries and keys [M, N]: with cap and bias, but not times `log2_factor` yet.

    `distance` [M, N]: query position - key position. `slopes` [M] float32. `SOFTCAP`: 0 for none.
    """
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); exp(2 x) may be inf.
        power = tl.exp2(products * (scale * (2 * LOG2_E / SOFTCAP)))
        products = (1 - 2 / (power + 1)) * (SOFTCAP * LOG2_E)
    elif HAS_SLOPES:
        products = products * (scale * LOG2_E)
    if HAS_SLOPES:
        products -= slopes[:, None] * LOG2_E * distance
    return products


@triton.jit
def is_seen(distance: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Whether a key is neither behind the query nor before its window. `WINDOW`: 0 for none."""
    seen = distance >= 0
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
    return seen


@triton.jit
def mask_scores(scores: tl.tensor, distance: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Hide the keys that are not seen."""
    return tl.where(is_seen(distance, WINDOW), scores, float("-inf"))


@triton.jit
def accumulate(
    scores: tl.tensor,
    factor: tl.tensor,
    value: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    output: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of online softmax: `scores` [M, N] float32, `value` [N, D].

    `factor` > 0 is applied after the maximum, so that it costs no operation of its own. `row_max`, in units of log2,
    and `row_sum` [M] and `output` [M, D], not divided by the sum yet, are float32 and start as MASKED, 0 and 0.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    output = tl.dot(weights.to(value.dtype), value, output * decay[:, None], input_precision=PRECISION)
    return new_max, row_sum, output


@triton.jit
def accumulate_sinks(
    sinks: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor, output: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One more score for each row, which no value belongs to: `sinks` [M], -inf for none. See `accumulate`."""
    sinks = sinks.to(tl.float32) * LOG2_E
    new_max = tl.maximum(row_max, sinks)
    decay = tl.exp2(row_max - new_max)
    return new_max, row_sum * decay + tl.exp2(sinks - new_max), output * decay[:, None]
