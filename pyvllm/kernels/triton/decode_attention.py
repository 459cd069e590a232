"""Attention of sequences with one query token each, over their keys in paged memory.

A program does one item of the work list (`work_list.py`) for one tile of the query heads that share a KV head. A
sequence of several items leaves partial results in float32, and the last program to arrive combines them: its own
counter tells it, so that no second kernel is needed.

Of a sequence in a cascade, items have only the keys that it has for itself, and the first one adds the partial results
over the others, which `cascade_attention.py` left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyvllm.kernels.triton.attention_tiles import (
    MASKED,
    accumulate,
    accumulate_sinks,
    is_seen,
    log2_factor,
    mask_scores,
    tile_block,
    tile_rows,
    transform,
)
from pyvllm.kernels.triton.pdl import allow_next, wait_for_previous
from pyvllm.kernels.triton.work_list import ITEM_WORDS, MAX_SHARED_SLOTS


@triton.jit
def _attend(
    row_max: tl.tensor,
    row_sum: tl.tensor,
    output: tl.tensor,
    query: tl.tensor,
    kv_layer: tl.tensor,
    block_table: tl.tensor,
    block: tl.tensor,
    seq_len: tl.tensor,
    first_tile: tl.tensor,
    last_tile: tl.tensor,
    kv_head: tl.tensor,
    slopes: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go on with `accumulate` for `query` [ROWS, D padded] over tiles [first_tile, last_tile), `block` the first's."""
    dims = tl.arange(0, query.shape[1])
    in_head = dims[None, :] < HEAD_DIM
    factor = log2_factor(scale, SOFTCAP, HAS_SLOPES)
    # The next block's id is loaded a tile ahead: with one more level of indirection the compiler would not overlap
    # loads of keys with products.
    for tile in range(first_tile, last_tile):
        next_block = tile_block(block_table, tile + 1, seq_len, TILE, BLOCK_SIZE)
        rows = tile_rows(block, tile, kv_head, NUM_KV_HEADS, HEAD_DIM, TILE, BLOCK_SIZE)
        pointers = kv_layer + rows[:, None] + dims[None, :]
        distance = seq_len - 1 - tile * TILE - tl.arange(0, TILE)
        # Only what is seen is read. Memory behind the sequence's end may hold anything, NaN too, and 0 * NaN is no 0.
        seen = is_seen(distance, WINDOW)[:, None] & in_head
        key = tl.load(pointers, mask=seen, other=0.0)
        value = tl.load(pointers + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=seen, other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = transform(products, distance[None, :], slopes, scale, SOFTCAP, HAS_SLOPES)
        scores = mask_scores(scores, distance[None, :], WINDOW)
        row_max, row_sum, output = accumulate(scores, factor, value, row_max, row_sum, output, PRECISION)
        block = next_block
    return row_max, row_sum, output


@triton.jit
def _join(
    max_a: tl.tensor, sum_a: tl.tensor, output_a: tl.tensor, max_b: tl.tensor, sum_b: tl.tensor, output_b: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What `accumulate` would leave of the keys of both."""
    row_max = tl.maximum(max_a, max_b)
    weight_a = tl.exp2(max_a - row_max)
    weight_b = tl.exp2(max_b - row_max)
    return row_max, sum_a * weight_a + sum_b * weight_b, output_a * weight_a[:, None] + output_b * weight_b[:, None]


@triton.jit
def _combine(
    stats: tl.tensor,
    outputs: tl.tensor,
    slots: tl.tensor,
    slot_rows: tl.tensor,
    num_rows: tl.tensor,
    PARTIAL_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The partial results of some slots together: maximum and sum [PARTIAL_ROWS], output [PARTIAL_ROWS, HEAD_PAD], of
    which the first `num_rows` rows matter.

    `stats` and `outputs` are at this program's rows of the first slot; the next slot's are `slot_rows` rows behind.
    """
    row = tl.arange(0, PARTIAL_ROWS)
    dims = tl.arange(0, HEAD_PAD)
    real = row < num_rows
    row_max = tl.full([PARTIAL_ROWS], MASKED, tl.float32)
    row_sum = tl.zeros([PARTIAL_ROWS], tl.float32)
    output = tl.zeros([PARTIAL_ROWS, HEAD_PAD], tl.float32)
    # Most often there is one slot: a tensor of several would mostly be masked, and take registers of every program, so
    # that fewer fit on a processor.
    for slot in tl.range(slots, loop_unroll_factor=4):
        at = slot * slot_rows + row
        # Written by other programs: not to be read through this processor's own cache.
        slot_max = tl.load(stats + 2 * at, mask=real, other=MASKED, cache_modifier=".cg")
        slot_sum = tl.load(stats + 2 * at + 1, mask=real, other=0.0, cache_modifier=".cg")
        slot_output = tl.load(
            outputs + at[:, None] * HEAD_DIM + dims[None, :],
            mask=real[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        row_max, row_sum, output = _join(row_max, row_sum, output, slot_max, slot_sum, slot_output)
    return row_max, row_sum, output


@triton.jit
def _repeat_rows(values: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """[ROWS, ...] of which row r is row r % M of `values` [M, ...]."""
    TIMES: tl.constexpr = ROWS // values.shape[0]
    if len(values.shape) == 1:
        return tl.broadcast_to(values[None, :], (TIMES, values.shape[0])).reshape(ROWS)
    else:
        return tl.broadcast_to(values[None, :, :], (TIMES, values.shape[0], values.shape[1])).reshape(
            ROWS, values.shape[1]
        )


@triton.jit(do_not_specialize_on_alignment=["block_table_ids", "items", "num_items", "counters"])
def decode_kernel(
    query: tl.tensor,
    kv_layer: tl.tensor,
    output: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    block_table_ids: tl.tensor,
    slopes: tl.tensor,
    sinks: tl.tensor | None,
    partial_stats: tl.tensor,
    partial_outputs: tl.tensor,
    counters: tl.tensor,
    shared_stats: tl.tensor,
    shared_outputs: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CASCADES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid: bound of the items * head tiles: KV heads * tiles of ROWS heads of a group. Heads of an item lie together.

    `query` [S, H, D] with strides, `kv_layer` [N, 2, K, B, D], `output` [S, H, D], `items` and `num_items` of
    `decode_items_kernel`, `slopes` [H] float32, `sinks` [H] of any float type or None. By slot, head tile and row of
    it, of which the first PARTIAL_ROWS matter: `partial_stats` (maximum, sum) and `partial_outputs` [D], float32.
    `counters` by slot and head tile: 0 before and after. CASCADES: the launch before this one is that of
    `cascade_kernel`, which see for `shared_stats` and `shared_outputs`; else these are not looked at.
    """
    allow_next()
    GROUP_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    HEAD_TILES: tl.constexpr = NUM_KV_HEADS * GROUP_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    item_index = tl.program_id(0) // HEAD_TILES
    item = items + item_index * ITEM_WORDS
    # Loaded before the test: what lies behind the last item is not looked at, and one round trip is saved.
    seq = tl.load(item)
    seq_len = tl.load(item + 1)
    table = tl.load(item + 2)
    first_tile = tl.load(item + 3)
    last_tile = tl.load(item + 4)
    split = tl.load(item + 5)
    splits = tl.load(item + 6)
    if item_index >= tl.load(num_items):
        # Without waiting, so that the many programs without an item are gone when those with one begin to work.
        return

    kv_head = head_tile // GROUP_TILES
    row = tl.arange(0, ROWS)
    member = (head_tile % GROUP_TILES) * ROWS + row
    head = kv_head * GROUP + member
    dims = tl.arange(0, HEAD_PAD)
    valid = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    own_slopes = row.to(tl.float32)
    if HAS_SLOPES:
        own_slopes = tl.load(slopes + head, mask=member < GROUP, other=0.0)
    block = tile_block(block_table_ids + table, first_tile, seq_len, TILE, BLOCK_SIZE)
    if not CASCADES:
        wait_for_previous()
    # else the kernel before only reads them, and was launched without `launch_options`
    own_query = tl.load(
        query + seq.to(tl.int64) * token_stride + head[:, None] * head_stride + dims[None, :], mask=valid, other=0.0
    )
    row_max = tl.full([ROWS], MASKED, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    if sinks is not None:
        # Once for each sequence, whose items are combined.
        own_sinks = tl.load(sinks + head, mask=member < GROUP, other=float("-inf"))
        own_sinks = tl.where(split == 0, own_sinks, float("-inf"))
        row_max, row_sum, result = accumulate_sinks(own_sinks, row_max, row_sum, result)
    row_max, row_sum, result = _attend(
        row_max,
        row_sum,
        result,
        own_query,
        kv_layer,
        block_table_ids + table,
        block,
        seq_len,
        first_tile,
        last_tile,
        kv_head,
        own_slopes,
        scale,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
        WINDOW,
        SOFTCAP,
        HAS_SLOPES,
        PRECISION,
    )
    if CASCADES:
        shared = tl.load(item + 7)
        first_shared = (shared // MAX_SHARED_SLOTS).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
        first_shared += (head_tile % GROUP_TILES) * ROWS
        wait_for_previous()
        shared_max, shared_sum, shared_result = _combine(
            shared_stats + 2 * first_shared,
            shared_outputs + first_shared * HEAD_DIM,
            shared % MAX_SHARED_SLOTS,
            NUM_KV_HEADS * GROUP,
            GROUP - (head_tile % GROUP_TILES) * ROWS,
            PARTIAL_ROWS,
            HEAD_DIM,
            HEAD_PAD,
        )
        shared_max = _repeat_rows(shared_max, ROWS)
        shared_sum = _repeat_rows(shared_sum, ROWS)
        shared_result = _repeat_rows(shared_result, ROWS)
        row_max, row_sum, result = _join(row_max, row_sum, result, shared_max, shared_sum, shared_result)
    output += seq.to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    if splits == 1:
        # Padding has no keys and a sum of 0; its output must be finite.
        result = result / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        tl.store(output + head[:, None] * HEAD_DIM + dims[None, :], result.to(output.dtype.element_ty), mask=valid)
        return

    slot_rows = HEAD_TILES * PARTIAL_ROWS
    partial_stats += head_tile * PARTIAL_ROWS * 2
    partial_outputs += head_tile * PARTIAL_ROWS * HEAD_DIM
    at = item_index * slot_rows + row
    tl.store(partial_stats + 2 * at, row_max, mask=row < PARTIAL_ROWS)
    tl.store(partial_stats + 2 * at + 1, row_sum, mask=row < PARTIAL_ROWS)
    in_partial = (row < PARTIAL_ROWS)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(partial_outputs + at[:, None] * HEAD_DIM + dims[None, :], result, mask=in_partial)

    # All threads' stores, then the count that publishes them.
    tl.debug_barrier()
    first_slot = item_index - split
    counter = counters + first_slot * HEAD_TILES + head_tile
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < splits - 1:
        return
    first_row = first_slot * slot_rows
    _, row_sum, combined = _combine(
        partial_stats + 2 * first_row,
        partial_outputs + first_row * HEAD_DIM,
        splits,
        slot_rows,
        PARTIAL_ROWS,
        PARTIAL_ROWS,
        HEAD_DIM,
        HEAD_PAD,
    )
    combined = combined / row_sum[:, None]
    tl.store(counter, 0)  # for the next layer
    row = tl.arange(0, PARTIAL_ROWS)
    member = (head_tile % GROUP_TILES) * ROWS + row
    valid = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = output + (kv_head * GROUP + member)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, combined.to(output.dtype.element_ty), mask=valid)
