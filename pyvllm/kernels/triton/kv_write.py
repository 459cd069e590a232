"""Storing keys and values of a step in paged memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def kv_write_kernel(
    kv_layer: tl.tensor,
    key_value: tl.tensor,
    slot_mapping: tl.tensor,
    token_stride: tl.tensor,
    kind_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Grid: (tokens, 2). `key_value` [T, 2, K, D] with strides to `kv_layer` [N, 2, K, B, D]; slot -1: nowhere."""
    token = tl.program_id(0)
    kind = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PAD)[:, None]
    dims = tl.arange(0, HEAD_PAD)[None, :]
    valid = (head < NUM_KV_HEADS) & (dims < HEAD_DIM)
    source = key_value + token.to(tl.int64) * token_stride + kind * kind_stride + head * head_stride + dims
    first_row = (slot // BLOCK_SIZE * 2 + kind) * (NUM_KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
    target = kv_layer + first_row * HEAD_DIM + head * (BLOCK_SIZE * HEAD_DIM) + dims
    tl.store(target, tl.load(source, mask=valid), mask=valid)
