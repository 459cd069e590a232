"""Attention of sequences with one query token each, over their keys in paged memory.

A program does one item of the work list (`work_list.py`) for one tile of the query heads that share a KV head. A
sequence of several items leaves partial results in float32, and the last program to arrive combines them: its own
counter tells it, so that no second kernel is needed.

Of a sequence in a cascade, items have only the keys that it has for itself, and the first one starts from the partial
results over the others, which `cascade_attention.py` left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyvllm.kernels.triton.attention_tiles import (
    MASKED,
    accumulate,
    accumulate_sinks,
    log2_factor,
    mask_scores,
    tile_block,
    tile_rows,
    transform,
)
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
        position = tile * TILE + tl.arange(0, TILE)
        key = tl.load(pointers, mask=in_head, other=0.0)
        # Memory behind the sequence's end may hold anything, NaN too, and 0 * NaN is no 0.
        value = tl.load(
            pointers + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
            mask=(position[:, None] < seq_len) & in_head,
            other=0.0,
        )
        distance = (seq_len - 1 - position)[None, :]
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = transform(products, distance, slopes, scale, SOFTCAP, HAS_SLOPES)
        scores = mask_scores(scores, distance, WINDOW)
        row_max, row_sum, output = accumulate(scores, factor, value, row_max, row_sum, output, PRECISION)
        block = next_block
    return row_max, row_sum, output


@triton.jit
def _combine(
    partial_stats: tl.tensor,
    partial_outputs: tl.tensor,
    first_slot: tl.tensor,
    slots: tl.tensor,
    slot_rows: tl.tensor,
    num_rows: tl.tensor,
    PARTIAL_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The partial results of slots [first_slot, first_slot + slots) together, as `accumulate` would leave them:
    maximum and sum [PARTIAL_ROWS], output [PARTIAL_ROWS, HEAD_PAD], of which the first `num_rows` rows matter.

    `slot_rows`: rows from one slot to the next; the pointers are at this program's rows of slot 0.
    """
    row = tl.arange(0, PARTIAL_ROWS)
    dims = tl.arange(0, HEAD_PAD)
    row_max = tl.full([PARTIAL_ROWS], MASKED, tl.float32)
    row_sum = tl.zeros([PARTIAL_ROWS], tl.float32)
    output = tl.zeros([PARTIAL_ROWS, HEAD_PAD], tl.float32)
    for start in range(0, slots, AT_ONCE):
        slot = start + tl.arange(0, AT_ONCE)
        at = (first_slot + slot)[:, None] * slot_rows + row[None, :]
        real = (slot < slots)[:, None] & (row < num_rows)[None, :]
        # Written by other programs: not to be read through this processor's own cache.
        maxima = tl.load(partial_stats + 2 * at, mask=real, other=MASKED, cache_modifier=".cg")
        sums = tl.load(partial_stats + 2 * at + 1, mask=real, other=0.0, cache_modifier=".cg")
        outputs = tl.load(
            partial_outputs + at[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=real[:, :, None] & (dims[None, None, :] < HEAD_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        weights = tl.exp2(maxima - new_max[None, :])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(sums * weights, 0)
        output = output * decay[:, None] + tl.sum(outputs * weights[:, :, None], 0)
        row_max = new_max
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


@triton.jit
def _shared_results(
    shared_stats: tl.tensor,
    shared_outputs: tl.tensor,
    shared: tl.tensor,
    kv_head: tl.tensor,
    first_member: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What `accumulate` goes on from, of ROWS heads of a group from `first_member` on: the partial results of a cascade
    that `shared`, the last word of an item, stands for. Rows behind the group's heads have no meaning.
    """
    first_head = kv_head * GROUP + first_member
    row_max, row_sum, output = _combine(
        shared_stats + 2 * first_head,
        shared_outputs + first_head * HEAD_DIM,
        shared // MAX_SHARED_SLOTS,
        shared % MAX_SHARED_SLOTS,
        NUM_KV_HEADS * GROUP,
        GROUP - first_member,
        PARTIAL_ROWS,
        HEAD_DIM,
        HEAD_PAD,
        AT_ONCE,
    )
    return _repeat_rows(row_max, ROWS), _repeat_rows(row_sum, ROWS), _repeat_rows(output, ROWS)


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
    AT_ONCE: tl.constexpr,
    SHARED_AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid: bound of the items * head tiles: KV heads * tiles of ROWS heads of a group. Heads of an item lie together.

    `query` [S, H, D] with strides, `kv_layer` [N, 2, K, B, D], `output` [S, H, D], `items` and `num_items` of
    `decode_items_kernel`, `slopes` [H] float32, `sinks` [H] of any float type or None. By slot, head tile and row of
    it, of which the first PARTIAL_ROWS matter: `partial_stats` (maximum, sum) and `partial_outputs` [D], float32.
    `counters` by slot and head tile: 0 before and after. `shared_stats` and `shared_outputs`: see `cascade_kernel`; of
    no cascades SHARED_AT_ONCE is 0.
    """
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
        return

    kv_head = head_tile // GROUP_TILES
    row = tl.arange(0, ROWS)
    member = (head_tile % GROUP_TILES) * ROWS + row
    head = kv_head * GROUP + member
    dims = tl.arange(0, HEAD_PAD)
    valid = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    own_query = tl.load(
        query + seq.to(tl.int64) * token_stride + head[:, None] * head_stride + dims[None, :], mask=valid, other=0.0
    )
    own_slopes = row.to(tl.float32)
    if HAS_SLOPES:
        own_slopes = tl.load(slopes + head, mask=member < GROUP, other=0.0)
    block = tile_block(block_table_ids + table, first_tile, seq_len, TILE, BLOCK_SIZE)
    row_max = tl.full([ROWS], MASKED, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    if SHARED_AT_ONCE > 0:
        row_max, row_sum, result = _shared_results(
            shared_stats,
            shared_outputs,
            tl.load(item + 7),
            kv_head,
            (head_tile % GROUP_TILES) * ROWS,
            NUM_KV_HEADS,
            GROUP,
            HEAD_DIM,
            HEAD_PAD,
            ROWS,
            PARTIAL_ROWS,
            SHARED_AT_ONCE,
        )
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
    _, row_sum, combined = _combine(
        partial_stats,
        partial_outputs,
        first_slot,
        splits,
        slot_rows,
        PARTIAL_ROWS,
        PARTIAL_ROWS,
        HEAD_DIM,
        HEAD_PAD,
        AT_ONCE,
    )
    combined = combined / row_sum[:, None]
    tl.store(counter, 0)  # for the next layer
    row = tl.arange(0, PARTIAL_ROWS)
    member = (head_tile % GROUP_TILES) * ROWS + row
    valid = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = output + (kv_head * GROUP + member)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, combined.to(output.dtype.element_ty), mask=valid)
