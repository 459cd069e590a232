"""From the fused projection to attention: norms of heads, rotation, keys and values into paged memory; one launch.

Symbols as in `pyvllm/kernels/interface.py`; r rotated dimensions of a head.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyvllm.kernels.plain import Heads, Norm
from pyvllm.kernels.triton.norm import normalise, rule, statistics
from pyvllm.kernels.triton.pdl import allow_next, launch_options, wait_for_previous

# 1024 numbers of half precision: 16 for each thread of two warps.
_TILE: Final = 1024
NUM_WARPS: Final = 2


def rotate_and_store(qkv: Tensor, heads: Heads, positions: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> Tensor:
    """See `Kernels.rotate_and_store`; `qkv` and `kv_layer` are contiguous.

    `positions` and `slot_mapping` are `[T]` int32; slot -1: stored nowhere. Queries are a new contiguous tensor, or a
    view of `qkv` where nothing changes them.
    """
    num_tokens = len(qkv)
    shape = (num_tokens, heads.num_heads, heads.head_dim)
    constants = head_constants(heads, kv_layer.shape[3])
    group, _, query_groups = constants["TILE"]
    if query_groups:
        query = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    else:
        query = qkv[:, : heads.num_heads * heads.head_dim].view(shape)
    heads_kernel[(num_tokens, query_groups + 2 * triton.cdiv(heads.num_kv_heads, group))](
        qkv,
        query,
        kv_layer,
        positions,
        slot_mapping,
        None if heads.rope is None else heads.rope.cos,
        None if heads.rope is None else heads.rope.sin,
        *_parameters(heads.query_norm),
        *_parameters(heads.key_norm),
        **constants,
        num_warps=NUM_WARPS,
        **launch_options(),
    )
    return query


def head_constants(heads: Heads, block_size: int) -> dict[str, Any]:
    """The compile-time arguments of `heads_kernel`."""
    rope, changed = heads.rope, heads.query_norm is not None or heads.rope is not None
    width = triton.next_power_of_2(heads.head_dim)
    group = min(max(_TILE // width, 1), triton.next_power_of_2(max(heads.num_heads, heads.num_kv_heads)))
    return {
        "SHAPE": (heads.num_heads, heads.num_kv_heads, heads.head_dim, block_size),
        "ROPE": (0, False) if rope is None else (rope.cos.shape[1], rope.interleaved),
        "QUERY_RULE": None if heads.query_norm is None else rule(heads.query_norm),
        "KEY_RULE": None if heads.key_norm is None else rule(heads.key_norm),
        "TILE": (group, width, triton.cdiv(heads.num_heads, group) if changed else 0),
    }


def _parameters(of: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias."""
    return (None, None) if of is None else (of.weight, of.bias if of.centred else None)


@triton.jit
def heads_kernel(
    qkv: tl.tensor,
    query: tl.tensor,
    kv_layer: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_weight: tl.tensor,
    query_bias: tl.tensor,
    key_weight: tl.tensor,
    key_bias: tl.tensor,
    SHAPE: tl.constexpr,
    ROPE: tl.constexpr,
    QUERY_RULE: tl.constexpr,
    KEY_RULE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid: (tokens, groups of heads): first groups of queries, then of keys, then of values.

    `SHAPE`: H, K, D, B. `ROPE`: r, interleaved. `TILE`: heads of a group and width of a head, powers of two, and how
    many groups queries have, 0 if they stay as they are. `QUERY_RULE`, `KEY_RULE`: `NormRule` or None.
    """
    NUM_HEADS: tl.constexpr = SHAPE[0]
    NUM_KV_HEADS: tl.constexpr = SHAPE[1]
    HEAD_DIM: tl.constexpr = SHAPE[2]
    BLOCK_SIZE: tl.constexpr = SHAPE[3]
    GROUP: tl.constexpr = TILE[0]
    QUERY_GROUPS: tl.constexpr = TILE[2]
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + GROUP - 1) // GROUP
    allow_next()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    head = tl.arange(0, GROUP)[:, None]
    # For each head, so that what all heads share is loaded for each: from cache, and where a thread needs it. A single
    # row of it would be laid out otherwise, and all else with it, by way of shared memory.
    column = tl.arange(0, TILE[1])[None, :] + tl.zeros([GROUP, 1], dtype=tl.int32)
    source = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    if group < QUERY_GROUPS:
        head += group * GROUP
        valid = (head < NUM_HEADS) & (column < HEAD_DIM)
        row = source + head * HEAD_DIM
        x = load_head(
            row, column, valid, query_weight, query_bias, positions + token, cos, sin, HEAD_DIM, ROPE, QUERY_RULE
        )
        tl.store(query + (token * NUM_HEADS + head) * HEAD_DIM + column, x, mask=valid)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        is_value = (group >= QUERY_GROUPS + KV_GROUPS).to(tl.int32)
        head += (group - QUERY_GROUPS - is_value * KV_GROUPS) * GROUP
        valid = (head < NUM_KV_HEADS) & (column < HEAD_DIM)
        row = source + (NUM_HEADS + is_value * NUM_KV_HEADS + head) * HEAD_DIM
        if is_value:
            wait_for_previous()
            x = tl.load(row + column, mask=valid)
        else:
            x = load_head(
                row, column, valid, key_weight, key_bias, positions + token, cos, sin, HEAD_DIM, ROPE, KEY_RULE
            )
        # Only the store waits for the slot.
        num_stored = tl.where(slot < 0, 0, NUM_KV_HEADS)
        valid = valid & (head < num_stored)
        half = (slot // BLOCK_SIZE * 2 + is_value) * NUM_KV_HEADS
        tl.store(kv_layer + ((half + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + column, x, mask=valid)


@triton.jit
def load_head(
    row: tl.tensor,
    column: tl.tensor,
    valid: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    position: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    RULE: tl.constexpr,
) -> tl.tensor:
    """Heads, normed and turned, in their own dtype: `row` [heads, 1] points to them, `column` [heads, width].

    All that depends on the step's plan alone is loaded before the kernel before this one has ended.
    """
    ROTATED: tl.constexpr = ROPE[0]
    DTYPE: tl.constexpr = row.dtype.element_ty
    if RULE is not None:
        factors = load_parameter(weight, column, column < HEAD_DIM)
        terms = None
        if bias is not None:
            terms = load_parameter(bias, column, column < HEAD_DIM)
    if ROTATED > 0:
        turned = column < ROTATED
        if ROPE[1]:
            partner = column ^ 1
        else:
            partner = tl.where(column < ROTATED // 2, column + ROTATED // 2, column - ROTATED // 2)
        if RULE is not None:
            partner_factors = load_parameter(weight, partner, turned)
            partner_terms = None
            if bias is not None:
                partner_terms = load_parameter(bias, partner, turned)
        angle = tl.load(position).to(tl.int64) * ROTATED + column
        cosine = tl.load(cos + angle, mask=turned, other=1).to(tl.float32)
        sine = tl.load(sin + angle, mask=turned, other=0).to(tl.float32)
    wait_for_previous()
    x = tl.load(row + column, mask=valid, other=0).to(tl.float32)
    if ROTATED > 0:
        # The second read of what has just been read: from cache.
        y = tl.load(row + partner, mask=valid & turned, other=0).to(tl.float32)
    if RULE is not None:
        mean, scale = statistics(x, valid, HEAD_DIM, RULE)
        x = normalise(x, mean, scale, factors, terms, DTYPE, RULE).to(DTYPE).to(tl.float32)
        if ROTATED > 0:
            y = normalise(y, mean, scale, partner_factors, partner_terms, DTYPE, RULE).to(DTYPE).to(tl.float32)
    if ROTATED > 0:
        x = x * cosine + y * sine
    return x.to(DTYPE)


@triton.jit
def load_parameter(values: tl.tensor, column: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """A norm's weight or bias at `column`, float32."""
    return tl.load(values + column, mask=inside, other=0).to(tl.float32)
