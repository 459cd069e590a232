"""Paged attention of sequences with several query tokens each: `prefill_attention.cu`.

It takes the plan of `pyvllm/kernels/triton/attention.py`, so that it stands in for the kernel in Triton, which serves
what this one does not. Symbols as in `pyvllm/kernels/interface.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from pyvllm.kernels.cuda.compile import Argument, Variant, load
from pyvllm.kernels.cuda.tensor_map import TensorMap, tensor_map
from pyvllm.kernels.interface import Attention
from pyvllm.kernels.triton.attention import AttentionPlan, PrefillPlan
from pyvllm.kernels.triton.attention_config import num_processors

# Rows that two warp groups multiply, and that the work list must be cut for.
ROWS: Final = 128
_WARP_GROUPS: Final = 2
# Keys of a tile.
_KEYS: Final = 128
# Swizzled rows repeat every 8, so that is where copies may begin.
_MIN_BOX: Final = 8
_HEAD_DIMS: Final = (64, 128)
# Tiles of keys or of values in shared memory: as many as fit beside two items' queries.
_SLOTS: Final = 5
# Registers of a thread: the three warp groups share those that the block starts with, 3 * 168.
_FEEDER_REGISTERS: Final = 40
_CONSUMER_REGISTERS: Final = 232


@dataclass(frozen=True, kw_only=True)
class PrefillLaunch:
    """How to launch `prefill_attention.cu`."""

    variant: Variant
    box: tuple[int, ...]
    """Of KV memory, that one copy brings."""
    threads: int
    shared_bytes: int


def supports(attention: Attention, kv_layer: Tensor) -> bool:
    """Whether `prefill_attention` serves it: bfloat16 or float16, D of 64 or 128, groups of a power of two of at most
    128 query heads, blocks of a multiple of 8 tokens; no window, cap, ALiBi or sinks.
    """
    group = attention.num_heads // attention.num_kv_heads
    return (
        kv_layer.dtype in (torch.bfloat16, torch.float16)
        and kv_layer.is_contiguous()
        and kv_layer.data_ptr() % 16 == 0
        and attention.head_dim in _HEAD_DIMS
        and ROWS % group == 0
        and kv_layer.shape[3] % _MIN_BOX == 0
        and attention.window is None
        and attention.softcap is None
        and attention.alibi_slopes is None
        and not attention.sinks
    )


def serves(plan: AttentionPlan, kv_layer: Tensor) -> bool:
    """Whether `supports` holds and the plan has sequences with several query tokens, cut for `ROWS` rows."""
    return plan.prefill is not None and plan.prefill.constants["ROWS"] == ROWS and supports(plan.attention, kv_layer)


def prefill_attention(query: Tensor, kv_layer: Tensor, output: Tensor, plan: AttentionPlan) -> None:
    """Attention of the step's sequences with several query tokens each; their KV is written before.

    `query` `[T, H, D]`, the elements of a head together; `kv_layer` `[N, 2, K, B, D]`; `output` `[T, H * D]`, of which
    the rows of those sequences are written. `serves` must hold. Compiled at the first call. Raises `ValueError` if the
    plan has no such sequences or is cut for other rows, or `query` has other strides.
    """
    if plan.prefill is None or plan.prefill.constants["ROWS"] != ROWS:
        raise ValueError(f"the plan has no sequence with several query tokens, or is not cut for {ROWS} rows")
    if query.stride(2) != 1 or query.stride(0) % 8 or query.stride(1) % 8 or query.data_ptr() % 16:
        raise ValueError(f"strides are {query.stride()}: heads must begin at 16 bytes, their elements lie together")
    launch = plan_launch(plan.attention, kv_layer.shape[3], kv_layer.dtype)
    work = len(plan.prefill.items) * plan.attention.num_kv_heads
    load(launch.variant, kv_layer.device.index).launch(
        arguments(query, tensor_map(kv_layer, launch.box), output, plan, plan.prefill),
        grid=(min(num_processors(kv_layer.device), work), 1, 1),
        threads=launch.threads,
        shared_bytes=launch.shared_bytes,
    )


def arguments(
    query: Tensor, kv_map: TensorMap, output: Tensor, plan: AttentionPlan, prefill: PrefillPlan
) -> tuple[Argument, ...]:
    """Of the kernel, in its order. `kv_map`: of KV memory, in boxes of `PrefillLaunch.box`."""
    attention = plan.attention
    return (
        *(kv_map, query, output, prefill.items, prefill.num_items, plan.block_table_ids),
        *(query.stride(0), query.stride(1), attention.num_kv_heads, float(attention.scale)),
    )


@lru_cache(maxsize=64)
def plan_launch(attention: Attention, block_size: int, dtype: torch.dtype) -> PrefillLaunch:
    """Sizes, the same for all layers and steps."""
    head_dim = attention.head_dim
    box = math.gcd(block_size, _KEYS)
    defines = {
        "FLOAT16": int(dtype == torch.float16),
        "HEAD_DIM": head_dim,
        "GROUP": attention.num_heads // attention.num_kv_heads,
        "BLOCK_SIZE": block_size,
        "BOX": box,
        "KEYS": _KEYS,
        "WARP_GROUPS": _WARP_GROUPS,
        "SLOTS": _SLOTS,
        "FEEDER_REGISTERS": _FEEDER_REGISTERS,
        "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
    }
    # `Shared` of prefill_attention.cu, and room to align it.
    shared_bytes = 2 * head_dim * (2 * ROWS + _SLOTS * _KEYS) + 8 * (4 + 2 * _SLOTS) + 1024
    return PrefillLaunch(
        variant=Variant(source="prefill_attention.cu", defines=tuple(defines.items())),
        box=(1, 1, 1, box, 64),
        threads=128 * (1 + _WARP_GROUPS),
        shared_bytes=shared_bytes,
    )
