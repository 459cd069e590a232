"""Paged attention of sequences with one query token each: `decode_attention.cu`.

It takes the plan of `pyvllm/kernels/triton/attention.py`, so that it stands in for the kernel in Triton, which serves
what this one does not. Symbols as in `pyvllm/kernels/interface.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pyvllm.kernels.cuda.compile import Argument, Variant, load
from pyvllm.kernels.interface import Attention
from pyvllm.kernels.plain import Heads, Norm
from pyvllm.kernels.triton.attention import AttentionPlan, DecodePlan

# Positions of a warp's part of a tile, and the most query heads of a KV head: the shape of the tensor cores.
_WARP_POSITIONS: Final = 16
_MAX_GROUP: Final = 8
_MAX_HEAD_DIM: Final = 256
# Bytes on their way from memory for each block, if its stages are no larger. Three blocks share a multiprocessor, as
# many as the work list is cut for.
_RING_BYTES: Final = 64 * 1024
_MIN_STAGES: Final = 2
_NO_WINDOW: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class DecodeLaunch:
    """How to launch `decode_attention.cu`."""

    variant: Variant
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


def supports(attention: Attention, kv_layer: Tensor) -> bool:
    """Whether `decode_attention` serves it: bfloat16 or float16, D of 64, 128, 192 or 256, groups of at most 8 query
    heads, blocks of a multiple of 16 tokens, no sinks.
    """
    block_size, head_dim = kv_layer.shape[3:]
    return (
        kv_layer.dtype in (torch.bfloat16, torch.float16)
        and kv_layer.is_contiguous()
        and block_size % _WARP_POSITIONS == 0
        and head_dim % 64 == 0
        and head_dim <= _MAX_HEAD_DIM
        and attention.num_heads // attention.num_kv_heads <= _MAX_GROUP
        and not attention.sinks
    )


def serves(plan: AttentionPlan, kv_layer: Tensor) -> bool:
    """Whether `supports` holds and the plan has sequences with one query token, and no cascades of them."""
    return plan.decode is not None and plan.decode.cascade is None and supports(plan.attention, kv_layer)


def supports_heads(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether `fused_decode_attention` serves what stands before attention: no norms of heads, or both RMSNorms of one
    rule, with weights of the model's dtype.
    """
    norms = [norm for norm in (heads.query_norm, heads.key_norm) if norm is not None]
    return len(norms) != 1 and all(
        not norm.centred
        and norm.bias is None
        and norm.weight.dtype == dtype
        and norm.weight_in_float32 == norms[0].weight_in_float32
        for norm in norms
    )


def decode_attention(query: Tensor, kv_layer: Tensor, output: Tensor, plan: AttentionPlan) -> None:
    """Attention of the step's sequences with one query token each, the first of the step; their KV is written before.

    `query` `[T, H, D]`, the elements of a head together; `kv_layer` `[N, 2, K, B, D]`; `output` `[T, H * D]`, of which
    the first rows are written. `supports` must hold. Compiled at the first call: run once before capturing a graph.
    Raises `ValueError` if the plan has no such sequences, or has cascades, or `query` has other strides.
    """
    _launch(query, query.stride(1), None, kv_layer, output, plan)


def fused_decode_attention(qkv: Tensor, heads: Heads, kv_layer: Tensor, output: Tensor, plan: AttentionPlan) -> None:
    """`Kernels.rotate_and_store`, then `decode_attention`, in one kernel.

    `qkv` `[T, (H + 2K) * D]`, contiguous, its first rows those of sequences with one query token each; only their keys
    and values are stored. `supports` and `supports_heads` must hold. Else as `decode_attention`.
    """
    _launch(qkv, heads.head_dim, heads, kv_layer, output, plan)


def _launch(
    tokens: Tensor, head_stride: int, heads: Heads | None, kv_layer: Tensor, output: Tensor, plan: AttentionPlan
) -> None:
    if plan.decode is None or plan.decode.cascade is not None:
        raise ValueError("the plan has no sequence with one query token, or has cascades")
    if tokens.stride(-1) != 1 or tokens.stride(0) % 8 or head_stride % 8 or tokens.data_ptr() % 16:
        raise ValueError(f"strides are {tokens.stride()}: heads must begin at 16 bytes, their elements lie together")
    launch = plan_launch(plan.attention, plan.decode.constants, len(plan.decode.items), kv_layer, heads)
    load(launch.variant, kv_layer.device.index).launch(
        arguments(tokens, head_stride, heads, kv_layer, output, plan, plan.decode),
        grid=launch.grid,
        threads=launch.threads,
        shared_bytes=launch.shared_bytes,
    )


def plan_launch(
    attention: Attention, constants: Mapping[str, Any], max_items: int, kv_layer: Tensor, heads: Heads | None
) -> DecodeLaunch:
    """Sizes for a step, the same for all layers.

    `constants`: those of the kernel in Triton; `max_items`: length of its work list; `heads`: None if not fused.
    """
    warps, head_dim = constants["TILE"] // _WARP_POSITIONS, attention.head_dim
    stage_bytes = 2 * constants["TILE"] * head_dim * kv_layer.element_size()
    stages = max(_MIN_STAGES, _RING_BYTES // stage_bytes)
    # At the end the ring holds what the warps combine: stats and outputs of 8 heads each, and a flag.
    combine_bytes = warps * _MAX_GROUP * 4 * (2 + head_dim + 4) + 16
    # `Extra` of decode_attention.cu: queries, key, value, scores, a row for each warp.
    extra_bytes = 2 * _MAX_GROUP * (head_dim + 8) + 2 * head_dim + 4 * (head_dim + _MAX_GROUP + warps * head_dim)
    rope = None if heads is None else heads.rope
    defines = {
        "FLOAT16": int(kv_layer.dtype == torch.float16),
        "HEAD_DIM": head_dim,
        "GROUP": attention.num_heads // attention.num_kv_heads,
        "PARTIAL_ROWS": constants["PARTIAL_ROWS"],
        "BLOCK_SIZE": kv_layer.shape[3],
        "WARPS": warps,
        "STAGES": stages,
        "SOFTCAP": int(attention.softcap is not None),
        "SLOPES": int(attention.alibi_slopes is not None),
        "FUSED": int(heads is not None),
        "NORM": _norm_rule(None if heads is None else heads.query_norm),
        "ROTATED": 0 if rope is None else rope.cos.shape[1],
        "INTERLEAVED": int(rope is not None and rope.interleaved),
    }
    return DecodeLaunch(
        variant=Variant(source="decode_attention.cu", defines=tuple(defines.items())),
        grid=(attention.num_kv_heads, max_items, 1),
        threads=32 * warps,
        shared_bytes=max(stages * stage_bytes, combine_bytes) + (0 if heads is None else extra_bytes),
    )


def _norm_rule(norm: Norm | None) -> int:
    """The macro NORM."""
    return 0 if norm is None else 2 if norm.weight_in_float32 else 1


def arguments(
    tokens: Tensor,
    head_stride: int,
    heads: Heads | None,
    kv_layer: Tensor,
    output: Tensor,
    plan: AttentionPlan,
    decode: DecodePlan,
) -> tuple[Argument, ...]:
    """Of the kernel, in its order."""
    attention = plan.attention
    norms = (None, None) if heads is None else (heads.query_norm, heads.key_norm)
    rope = None if heads is None else heads.rope
    return (
        *(tokens, kv_layer, output, decode.items, decode.num_items, plan.block_table_ids, plan.slopes),
        *(decode.partial_stats, decode.partial_outputs, decode.counters),
        *(None if norm is None else norm.weight for norm in norms),
        *((None, None) if rope is None else (rope.cos, rope.sin)),
        *(tokens.stride(0), head_stride, attention.window or _NO_WINDOW),
        *(float(attention.scale), float(attention.softcap or 0.0)),
        *(0.0 if norm is None else float(norm.eps) for norm in norms),
    )
