"""Attention of sequences with several query tokens each, over their keys in paged memory.

A program does one tile of a work list (`work_list.py`) for one KV head: some query tokens times the query heads that
share the KV head, as the rows of one matrix. Tiles of keys that all rows see whole need no mask.
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
from pyvllm.kernels.triton.work_list import ITEM_WORDS


@triton.jit
def attend_rows(
    row_max: tl.tensor,
    row_sum: tl.tensor,
    output: tl.tensor,
    query: tl.tensor,
    query_position: tl.tensor,
    kv_layer: tl.tensor,
    block_table: tl.tensor,
    first_tile: tl.tensor,
    last_tile: tl.tensor,
    end: tl.tensor,
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
    MASK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go on with `accumulate` over tiles [first_tile, last_tile) of keys before position `end`.

    `query` [ROWS, D padded], `query_position` [ROWS]. Without MASK all rows see all keys of these tiles.
    """
    dims = tl.arange(0, query.shape[1])
    in_head = dims[None, :] < HEAD_DIM
    factor = log2_factor(scale, SOFTCAP, HAS_SLOPES)
    # The next block's id is loaded a tile ahead: see decode_attention.py.
    block = tile_block(block_table, first_tile, end, TILE, BLOCK_SIZE)
    for tile in range(first_tile, last_tile):
        next_block = tile_block(block_table, tile + 1, end, TILE, BLOCK_SIZE)
        rows = tile_rows(block, tile, kv_head, NUM_KV_HEADS, HEAD_DIM, TILE, BLOCK_SIZE)
        pointers = kv_layer + rows[:, None] + dims[None, :]
        position = tile * TILE + tl.arange(0, TILE)
        in_value = in_head
        if MASK:  # memory behind the end may hold NaN, and 0 * NaN is no 0
            in_value = in_head & (position[:, None] < end)
        key = tl.load(pointers, mask=in_head, other=0.0)
        value = tl.load(pointers + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=in_value, other=0.0)
        distance = query_position[:, None] - position[None, :]
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = transform(products, distance, slopes, scale, SOFTCAP, HAS_SLOPES)
        if MASK:
            scores = mask_scores(scores, distance, WINDOW)
        row_max, row_sum, output = accumulate(scores, factor, value, row_max, row_sum, output, PRECISION)
        block = next_block
    return row_max, row_sum, output


@triton.jit(do_not_specialize_on_alignment=["block_table_ids", "items", "num_items"])
def prefill_kernel(
    query: tl.tensor,
    kv_layer: tl.tensor,
    output: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    block_table_ids: tl.tensor,
    slopes: tl.tensor,
    sinks: tl.tensor | None,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid: bound of the items * head tiles: KV heads * tiles of MEMBERS heads of a group.

    Row r is member r % MEMBERS of the group at token r // MEMBERS of the item. `query` [T, H, D] with strides,
    `kv_layer` [N, 2, K, B, D], `output` [T, H, D], `items` and `num_items` of `prefill_items_kernel` with
    ROWS // MEMBERS tokens, `slopes` [H] float32, `sinks` [H] of any float type or None.
    """
    MEMBER_TILES: tl.constexpr = (GROUP + MEMBERS - 1) // MEMBERS
    HEAD_TILES: tl.constexpr = NUM_KV_HEADS * MEMBER_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    item_index = tl.program_id(0) // HEAD_TILES
    item = items + item_index * ITEM_WORDS
    # Loaded before the test: see decode_attention.py.
    first_token = tl.load(item)
    tokens = tl.load(item + 1)
    first_position = tl.load(item + 2)
    table = tl.load(item + 3)
    if item_index >= tl.load(num_items):
        return

    kv_head = head_tile // MEMBER_TILES
    row = tl.arange(0, ROWS)
    token = row // MEMBERS
    member = (head_tile % MEMBER_TILES) * MEMBERS + row % MEMBERS
    head = kv_head * GROUP + member
    dims = tl.arange(0, HEAD_PAD)
    valid_row = (token < tokens) & (member < GROUP)
    valid = valid_row[:, None] & (dims < HEAD_DIM)[None, :]
    step_token = (first_token + token).to(tl.int64)
    own_query = tl.load(
        query + (step_token * token_stride + head * head_stride)[:, None] + dims[None, :], mask=valid, other=0.0
    )
    own_slopes = row.to(tl.float32)
    if HAS_SLOPES:
        own_slopes = tl.load(slopes + head, mask=valid_row, other=0.0)

    # Tiles [full_start, full_end) are seen whole by all rows.
    end = first_position + tokens
    start_tile = 0
    full_start = 0
    full_end = (first_position + 1) // TILE
    end_tile = tl.cdiv(end, TILE)
    if WINDOW > 0:
        start_tile = tl.maximum(first_position - WINDOW + 1, 0) // TILE
        full_start = tl.cdiv(tl.maximum(end - WINDOW, 0), TILE)
        full_end = tl.maximum(full_end, start_tile)
        full_start = tl.minimum(full_start, full_end)
    row_max = tl.full([ROWS], MASKED, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    if sinks is not None:
        own_sinks = tl.load(sinks + head, mask=valid_row, other=float("-inf"))
        row_max, row_sum, result = accumulate_sinks(own_sinks, row_max, row_sum, result)
    for part in tl.static_range(3):
        if WINDOW > 0 or part > 0:
            row_max, row_sum, result = attend_rows(
                row_max,
                row_sum,
                result,
                own_query,
                first_position + token,
                kv_layer,
                block_table_ids + table,
                start_tile if part == 0 else full_start if part == 1 else full_end,
                full_start if part == 0 else full_end if part == 1 else end_tile,
                end,
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
                part != 1,
            )
    # Rows of no token may have seen nothing.
    result = result / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    pointers = output + (step_token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(pointers, result.to(output.dtype.element_ty), mask=valid)
