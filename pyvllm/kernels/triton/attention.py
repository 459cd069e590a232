"""Paged attention in Triton: what a step prepares, and what each layer does with it.

`plan_attention` needs nothing from the device and waits for nothing: lengths are read by the kernels alone. So the
launches of a padded decode step may be captured in a CUDA graph, and replayed for other lengths in the same buffer.

Symbols as in `pyvllm/kernels/interface.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from pyvllm.kernels.interface import Attention
from pyvllm.kernels.triton.attention_config import (
    FEW_MEMBERS,
    PLAN_BLOCK,
    PLAN_LANES,
    AttentionConfig,
    CascadeConfig,
    Constants,
    PrefillConfig,
    cascade_constants,
    cascade_items_constants,
    cascade_warps,
    decode_constants,
    decode_items_constants,
    decode_warps,
    default_config,
    num_processors,
    options,
    prefill_constants,
)
from pyvllm.kernels.triton.cascade_attention import cascade_kernel
from pyvllm.kernels.triton.decode_attention import decode_kernel
from pyvllm.kernels.triton.kv_write import kv_write_kernel
from pyvllm.kernels.triton.pdl import launch_options
from pyvllm.kernels.triton.prefill_attention import prefill_kernel
from pyvllm.kernels.triton.work_list import (
    ITEM_WORDS,
    MAX_SHARED_SLOTS,
    cascade_items_kernel,
    decode_items_kernel,
    prefill_items_kernel,
)
from pyvllm.step import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadePlan:
    """What sequences with one query token each share."""

    num_programs: int
    constants: Constants
    items: Tensor
    num_items: Tensor
    cascade_seqs: Tensor
    seq_lens: Tensor
    shared: Tensor
    """[num_seqs, 2] int32: see `cascade_items_kernel`."""
    stats: Tensor
    """[slots, H, 2] float32: see `cascade_kernel`."""
    outputs: Tensor
    """[slots, H, D] float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Sequences with one query token each: the first of the step."""

    num_programs: int
    constants: Constants
    """With the options of the launch."""
    items: Tensor
    """[items, ITEM_WORDS] int32, and `num_items` [1] of them: see `work_list.py`."""
    num_items: Tensor
    partial_stats: Tensor
    """[2 * target, head tiles, rows, 2] float32: see `decode_kernel`."""
    partial_outputs: Tensor
    """[2 * target, head tiles, rows, D] float32."""
    counters: Tensor
    """[2 * target, head tiles] int32."""
    cascade: CascadePlan | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlan:
    """Sequences with several query tokens."""

    num_programs: int
    constants: Constants
    items: Tensor
    num_items: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """What the layers of a step share that compute the same `attention`."""

    attention: Attention
    slot_mapping: Tensor
    """[T] int32; -1 in padding."""
    block_table_ids: Tensor
    slopes: Tensor
    """[H] float32; without ALiBi any tensor of that dtype."""
    decode: DecodePlan | None
    prefill: PrefillPlan | None


# --- once a step ------------------------------------------------------------------------------------------------------


def plan_attention(
    step: StepView, attention: Attention, kv_layer: Tensor, config: AttentionConfig | None = None
) -> AttentionPlan:
    """Prepare a step of at least one token; see `Kernels.plan`. `config` is that of `default_config` unless given.

    Kernels of layers read the plan without waiting for what makes it: before the first of them another must be launched
    without `pdl.launch_options`, such as the embedding.

    Raises `ValueError` if the scale is not positive or KV memory is not contiguous.
    """
    if attention.scale <= 0:
        raise ValueError(f"attention.scale is {attention.scale}; it must be positive")
    if not kv_layer.is_contiguous():
        raise ValueError(f"kv_layer has strides {kv_layer.stride()}; it must be contiguous")
    device = kv_layer.device
    config = config or default_config(device, attention.head_dim)
    num_decodes = step.graph_size or step.num_decodes
    num_prefills = 0 if step.graph_size else step.num_seqs - num_decodes
    return AttentionPlan(
        attention=attention,
        slot_mapping=step.slot_mapping,
        block_table_ids=_addressable(step.block_table_ids),
        slopes=_slopes(attention.alibi_slopes or (0.0,), device),
        decode=_plan_decode(step, attention, kv_layer, num_decodes, config) if num_decodes else None,
        prefill=_plan_prefill(step, attention, kv_layer, num_prefills, config.prefill) if num_prefills else None,
    )


def _plan_decode(
    step: StepView, attention: Attention, kv_layer: Tensor, num_seqs: int, configs: AttentionConfig
) -> DecodePlan:
    config = configs.decode
    # In a window sequences of different lengths see different keys.
    has_cascades = step.num_cascades > 0 and attention.window is None
    constants = decode_constants(attention, kv_layer, config, cascades=has_cascades)
    cascade = _plan_cascade(step, constants, kv_layer, num_seqs, configs.cascade) if has_cascades else None
    group = attention.num_heads // attention.num_kv_heads
    head_tiles = attention.num_kv_heads * triton.cdiv(group, constants["ROWS"])
    target = max(1, num_processors(kv_layer.device) * config.programs_per_sm // head_tiles)
    items = _int32(kv_layer, num_seqs + target, ITEM_WORDS.value)
    num_items = _int32(kv_layer, 1)
    counters = _int32(kv_layer, 2 * target, head_tiles)
    partials = (2 * target, head_tiles, constants["PARTIAL_ROWS"])
    items_constants = decode_items_constants(constants, target, head_tiles, num_seqs, config)
    decode_items_kernel[(1,)](
        step.seq_lens,
        step.block_table_offsets,
        step.seq_lens if cascade is None else cascade.shared,
        items,
        num_items,
        counters,
        num_seqs,
        **items_constants,
        num_warps=items_constants["BLOCK"] // PLAN_LANES,
        enable_fp_fusion=True,
    )
    num_stages = configs.cascade.own_stages if has_cascades else config.num_stages
    launch = options(decode_warps(constants, kv_layer.dtype, config), num_stages) | launch_options()
    return DecodePlan(
        num_programs=len(items) * head_tiles,
        constants={**constants, **launch},
        items=items,
        num_items=num_items,
        partial_stats=torch.empty(*partials, 2, dtype=torch.float32, device=kv_layer.device),
        partial_outputs=torch.empty(*partials, attention.head_dim, dtype=torch.float32, device=kv_layer.device),
        counters=counters,
        cascade=cascade,
    )


def _plan_cascade(
    step: StepView, decode: Constants, kv_layer: Tensor, num_seqs: int, config: CascadeConfig
) -> CascadePlan:
    constants = cascade_constants(decode, kv_layer.dtype, step.num_decodes // step.num_cascades, config)
    num_warps = cascade_warps(constants)
    num_programs = num_processors(kv_layer.device) * max(1, config.programs_per_sm * 4 // num_warps)
    head_tiles = constants["NUM_KV_HEADS"] * triton.cdiv(constants["GROUP"], constants["HEADS"])
    target = min(max(1, num_programs // head_tiles), MAX_SHARED_SLOTS.value - 1)
    items_constants = cascade_items_constants(constants, target, num_seqs, config)
    items = _int32(kv_layer, num_seqs + target, ITEM_WORDS.value)
    num_items = _int32(kv_layer, 1)
    shared = _int32(kv_layer, num_seqs, 2)
    cascade_items_kernel[(1,)](
        step.cascade_seqs,
        step.cascade_offsets,
        step.cascade_blocks,
        step.block_table_offsets,
        shared,
        items,
        num_items,
        num_seqs,
        num_seqs.bit_length(),
        **items_constants,
        num_warps=4,
        enable_fp_fusion=True,
    )
    slots = num_seqs + min(items_constants["MEMBERS"], num_seqs) * target
    heads = constants["NUM_KV_HEADS"] * constants["GROUP"]
    return CascadePlan(
        num_programs=min(num_programs, len(items) * head_tiles),
        constants={**constants, **options(num_warps, config.num_stages)},
        items=items,
        num_items=num_items,
        cascade_seqs=step.cascade_seqs,
        seq_lens=step.seq_lens,
        shared=shared,
        stats=torch.empty(slots, heads, 2, dtype=torch.float32, device=kv_layer.device),
        outputs=torch.empty(slots, heads, constants["HEAD_DIM"], dtype=torch.float32, device=kv_layer.device),
    )


def _plan_prefill(
    step: StepView, attention: Attention, kv_layer: Tensor, num_seqs: int, config: PrefillConfig
) -> PrefillPlan:
    constants = prefill_constants(attention, kv_layer, config)
    members = constants["MEMBERS"]
    tokens = constants["ROWS"] // members
    # Each sequence's last tile may be part empty.
    max_items = (step.num_tokens - step.num_decodes) // tokens + num_seqs
    items = _int32(kv_layer, max_items, ITEM_WORDS.value)
    num_items = _int32(kv_layer, 1)
    prefill_items_kernel[(1,)](
        step.query_start_loc,
        step.seq_lens,
        step.block_table_offsets,
        items,
        num_items,
        step.num_decodes,
        step.num_seqs,
        max_items,
        step.max_seq_len,
        num_seqs.bit_length(),
        TOKENS=tokens,
        WINDOW=constants["WINDOW"],
        BLOCK=PLAN_BLOCK,
        num_warps=PLAN_BLOCK // PLAN_LANES,
        enable_fp_fusion=True,
    )
    group = attention.num_heads // attention.num_kv_heads
    return PrefillPlan(
        num_programs=max_items * attention.num_kv_heads * triton.cdiv(group, members),
        constants={**constants, **options(config.num_warps, config.num_stages)},
        items=items,
        num_items=num_items,
    )


def _int32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


def _addressable(ids: Tensor) -> Tensor:
    """`ids`, with an address even if empty: a graph captured without any block is replayed with some."""
    last_word = ids.untyped_storage().nbytes() // ids.element_size() - 1
    return ids if len(ids) else ids.as_strided((1,), (1,), min(ids.storage_offset(), last_word))


@cache
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """[len(slopes)] float32. Kept, since a copy to the device can not be captured in a graph."""
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def cascade_kind(step: StepView) -> int:
    """What decides, beside a step's size, how its cascades are launched: 0 without any, 1 for small ones, 2 else."""
    if not step.num_cascades:
        return 0
    return 1 if step.num_decodes // step.num_cascades <= FEW_MEMBERS else 2


# --- every layer ------------------------------------------------------------------------------------------------------


def write_kv(kv_layer: Tensor, key_value: Tensor, plan: AttentionPlan) -> None:
    """See `Kernels.write_kv`. The last dimension of `key_value` must be contiguous."""
    num_tokens, _, num_kv_heads, head_dim = key_value.shape
    kv_write_kernel[(num_tokens, 2)](
        kv_layer,
        key_value,
        plan.slot_mapping,
        key_value.stride(0),
        key_value.stride(1),
        key_value.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=kv_layer.shape[3],
        enable_fp_fusion=True,
    )


def paged_attention(query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
    """See `Kernels.paged_attention`, and with `sinks` `[H]` `Kernels.paged_attention_with_sinks`.

    The last dimension of `query` must be contiguous.
    """
    output = torch.empty(len(query), query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
    strides = query.stride(0), query.stride(1)
    scale = plan.attention.scale
    if (decode := plan.decode) is not None:
        shared = (decode.partial_stats, decode.partial_outputs)  # not looked at
        if (cascade := decode.cascade) is not None:
            shared = (cascade.stats, cascade.outputs)
            cascade_kernel[(cascade.num_programs,)](
                query,
                kv_layer,
                *shared,
                cascade.items,
                cascade.num_items,
                cascade.cascade_seqs,
                cascade.seq_lens,
                plan.block_table_ids,
                plan.slopes,
                *strides,
                scale,
                **cascade.constants,
            )
        decode_kernel[(decode.num_programs,)](
            query,
            kv_layer,
            output,
            decode.items,
            decode.num_items,
            plan.block_table_ids,
            plan.slopes,
            sinks,
            decode.partial_stats,
            decode.partial_outputs,
            decode.counters,
            *shared,
            *strides,
            scale,
            **decode.constants,
        )
    if (prefill := plan.prefill) is not None:
        prefill_kernel[(prefill.num_programs,)](
            query,
            kv_layer,
            output,
            prefill.items,
            prefill.num_items,
            plan.block_table_ids,
            plan.slopes,
            sinks,
            *strides,
            scale,
            **prefill.constants,
        )
    return output
