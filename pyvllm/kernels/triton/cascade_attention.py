"""Attention over the keys that the sequences of a cascade share, read once for all of them.

A program does items of the work list (`work_list.py`) for KV heads: the queries of some members, one token each, times
the query heads that share a KV head, are the rows of one matrix, as in prefill. What comes out is partial: decode
attention, which begins on processors that have room while this still runs, adds it to what it has computed of the keys
that each sequence has for itself.

Every query is behind all shared keys, since a step writes no block that another sequence has too: nothing is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyvllm.kernels.triton.attention_tiles import MASKED
from pyvllm.kernels.triton.pdl import allow_next
from pyvllm.kernels.triton.prefill_attention import attend_rows
from pyvllm.kernels.triton.work_list import ITEM_WORDS


@triton.jit(
    do_not_specialize_on_alignment=["items", "num_items", "cascade_seqs", "seq_lens", "block_table_ids"],
)
def cascade_kernel(
    query: tl.tensor,
    kv_layer: tl.tensor,
    shared_stats: tl.tensor,
    shared_outputs: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    cascade_seqs: tl.tensor,
    seq_lens: tl.tensor,
    block_table_ids: tl.tensor,
    slopes: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid: any number of programs; each does every so many of the items * head tiles: KV heads * tiles of HEADS heads.

    Row r is head r % HEADS of a group for member r // HEADS of the item. `query` [S, H, D] with strides, `kv_layer`
    [N, 2, K, B, D], `items` and `num_items` of `cascade_items_kernel` with ROWS // HEADS members, `slopes` [H] float32.
    By slot and head: `shared_stats` [slots, H, 2], maximum and sum, and `shared_outputs` [slots, H, D], float32, as
    `accumulate` leaves them.
    """
    allow_next()
    HEAD_TILES: tl.constexpr = NUM_KV_HEADS * ((GROUP + HEADS - 1) // HEADS)
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PAD)
    in_head = (dims < HEAD_DIM)[None, :]
    for index in range(tl.program_id(0), tl.load(num_items) * HEAD_TILES, tl.num_programs(0)):
        item = items + index // HEAD_TILES * ITEM_WORDS
        place = tl.load(item)
        members = tl.load(item + 1)
        table = tl.load(item + 2)
        first_tile = tl.load(item + 3)
        last_tile = tl.load(item + 4)
        first_slot = tl.load(item + 5)
        slot_stride = tl.load(item + 6)

        head_tile = index % HEAD_TILES
        kv_head = head_tile % NUM_KV_HEADS
        member = row // HEADS
        in_group = head_tile // NUM_KV_HEADS * HEADS + row % HEADS
        head = kv_head * GROUP + in_group
        valid = (member < members) & (in_group < GROUP)
        seq = tl.load(cascade_seqs + place + member, mask=valid, other=0)
        own_query = tl.load(
            query + (seq.to(tl.int64) * token_stride + head * head_stride)[:, None] + dims[None, :],
            mask=valid[:, None] & in_head,
            other=0.0,
        )
        position = row
        own_slopes = row.to(tl.float32)
        if HAS_SLOPES:
            position = tl.load(seq_lens + seq, mask=valid, other=1) - 1
            own_slopes = tl.load(slopes + head, mask=valid, other=0.0)
        row_max, row_sum, result = attend_rows(
            tl.full([ROWS], MASKED, tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, HEAD_PAD], tl.float32),
            own_query,
            position,
            kv_layer,
            block_table_ids + table,
            first_tile,
            last_tile,
            last_tile * TILE,
            kv_head,
            own_slopes,
            scale,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            TILE,
            0,
            SOFTCAP,
            HAS_SLOPES,
            PRECISION,
            False,
        )
        at = (first_slot + member * slot_stride).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
        tl.store(shared_stats + 2 * at, row_max, mask=valid)
        tl.store(shared_stats + 2 * at + 1, row_sum, mask=valid)
        tl.store(shared_outputs + at[:, None] * HEAD_DIM + dims[None, :], result, mask=valid[:, None] & in_head)
