"""How paged attention in Triton is cut: what may be tuned, and the compile-time arguments that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from pyvllm.kernels.interface import Attention

Constants = dict[str, Any]
"""A kernel's compile-time arguments."""

PLAN_BLOCK = 512
"""Sequences or tiles that a planning kernel looks at together."""
PLAN_LANES = 32
"""For each, in a warp: 16 buckets of it are 16 registers of a thread."""

FEW_MEMBERS = 8
"""Sequences whose rows a program multiplies at once where cascades have no more on average. Fewer rows take less of a
processor, which then has more keys on their way from memory; more rows read keys less often."""

# Tensor cores multiply at least 16 rows.
_MIN_ROWS = 16
# Products in full float32 take operands from registers, which more rows or longer tiles would overflow.
_FLOAT32_ROWS = 32
_FLOAT32_TILE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How decode attention is cut. Bytes count a position's keys of one head, padded to a power of two."""

    programs_per_sm: int = 3
    """Programs per processor that sequences are cut for; more even out unequal lengths, fewer save combining."""
    min_tiles: int = 2
    """Tiles that a program does at least before a sequence is cut further."""
    tile_bytes: int = 1 << 14
    """Of a tile of keys: with values and two stages, 64 KB in flight keep the memory of one processor busy."""
    max_tile: int = 64
    """Positions of a tile: no more than a block of the usual size, so that one block id serves a tile."""
    num_warps: int = 2
    """Of programs whose registers suffice; twice as many else. Fewer warps wait less for one another."""
    num_stages: int = 3
    """One more than the buffers that the compiler makes of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """How prefill attention is cut."""

    rows: int = 128
    """Rows of queries: with 8 warps two times the 64 that warp groups of sm_90 multiply."""
    tile_bytes: int = 1 << 14
    """As in `DecodeConfig`."""
    max_tile: int = 64
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeConfig:
    """How attention over what sequences share is cut. Tiles are those of `DecodeConfig`."""

    rows: int = 128
    """Most rows of queries: see `PrefillConfig`."""
    programs_per_sm: int = 2
    """Programs of 4 warps, which 64 rows have, per processor; half as many of 8."""
    min_tiles: int = 4
    """Tiles that a program does at least before what is shared is cut: each cut is a partial result for each row."""
    num_stages: int = 3
    """As in `DecodeConfig`."""
    own_stages: int = 2
    """Of decode attention beside it: sequences often have a tile or two for themselves, and then more programs on a
    processor keep memory busier than more tiles of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """What may be tuned; results differ by rounding only."""

    decode: DecodeConfig = field(default_factory=DecodeConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    cascade: CascadeConfig = field(default_factory=CascadeConfig)


@cache
def default_config(device: torch.device, head_dim: int) -> AttentionConfig:
    """What suits a device.

    Without products of warp groups, which sm_90 alone has, 128 rows of wide heads overflow registers, and the shared
    memory of small GPUs.
    """
    if device.type == "cuda" and head_dim > 128 and torch.cuda.get_device_capability(device)[0] != 9:
        return AttentionConfig(
            prefill=PrefillConfig(rows=64, num_stages=2), cascade=CascadeConfig(rows=64, num_stages=2)
        )
    return AttentionConfig()


def decode_constants(
    attention: Attention, kv_layer: Tensor, config: DecodeConfig, *, cascades: bool = False
) -> Constants:
    """The constants of `decode_kernel`. `cascades`: whether the step has any."""
    group = attention.num_heads // attention.num_kv_heads
    rows = min(max(triton.next_power_of_2(group), _MIN_ROWS), 64)
    partial_rows = min(triton.next_power_of_2(group), rows)
    common = _common_constants(attention, kv_layer, config.tile_bytes, config.max_tile)
    return {
        **common,
        "ROWS": rows,
        "PARTIAL_ROWS": partial_rows,
        "CASCADES": cascades,
    }


def decode_warps(constants: Constants, dtype: torch.dtype, config: DecodeConfig) -> int:
    """Warps of a program of `decode_kernel`."""
    few = constants["ROWS"] == _MIN_ROWS and dtype != torch.float32
    return config.num_warps if few else 2 * config.num_warps


def decode_items_constants(
    constants: Constants, target: int, head_tiles: int, num_seqs: int, config: DecodeConfig
) -> Constants:
    """The constants of `decode_items_kernel`, from those of `decode_kernel`."""
    return {
        "TARGET": target,
        "MIN_TILES": config.min_tiles,
        "NUM_COUNTERS": 2 * target * head_tiles,
        "WINDOW": constants["WINDOW"],
        "CASCADES": constants["CASCADES"],
        "TILE": constants["TILE"],
        "BLOCK": _plan_block(num_seqs),
    }


def prefill_constants(attention: Attention, kv_layer: Tensor, config: PrefillConfig) -> Constants:
    """The constants of `prefill_kernel`."""
    group = attention.num_heads // attention.num_kv_heads
    rows = config.rows if kv_layer.dtype != torch.float32 else min(config.rows, _FLOAT32_ROWS)
    return {
        **_common_constants(attention, kv_layer, config.tile_bytes, config.max_tile),
        "ROWS": rows,
        "MEMBERS": min(group, rows),
    }


def cascade_constants(constants: Constants, dtype: torch.dtype, members: int, config: CascadeConfig) -> Constants:
    """The constants of `cascade_kernel`, from those of `decode_kernel`. `members`: of a cascade, on average."""
    group = constants["GROUP"]
    few = triton.next_power_of_2(FEW_MEMBERS * group)
    rows = config.rows if members > FEW_MEMBERS else min(max(few, _MIN_ROWS), config.rows)
    rows = rows if dtype != torch.float32 else min(rows, _FLOAT32_ROWS)
    others = ("ROWS", "PARTIAL_ROWS", "CASCADES", "WINDOW")
    common = {name: value for name, value in constants.items() if name not in others}
    # Of a very large group only a part of the heads, so that there are rows of several sequences.
    return {**common, "ROWS": rows, "HEADS": min(group, max(rows // 4, _MIN_ROWS))}


def cascade_warps(constants: Constants) -> int:
    """Warps of a program of `cascade_kernel`."""
    return 8 if constants["ROWS"] > 64 else 4


def cascade_items_constants(constants: Constants, target: int, num_seqs: int, config: CascadeConfig) -> Constants:
    """The constants of `cascade_items_kernel`, from those of `cascade_kernel`."""
    return {
        "TARGET": target,
        "MIN_TILES": config.min_tiles,
        "MEMBERS": constants["ROWS"] // constants["HEADS"],
        "BLOCK_SIZE": constants["BLOCK_SIZE"],
        "TILE": constants["TILE"],
        "BLOCK": _plan_block(num_seqs),
    }


def _plan_block(num_seqs: int) -> int:
    return min(max(1 << (num_seqs - 1).bit_length(), 128), PLAN_BLOCK)


def _common_constants(attention: Attention, kv_layer: Tensor, tile_bytes: int, max_tile: int) -> Constants:
    head_pad = max(triton.next_power_of_2(attention.head_dim), 16)
    tile = min(max(tile_bytes // (head_pad * kv_layer.element_size()), 16), max_tile)
    if kv_layer.dtype == torch.float32:
        tile = min(tile, _FLOAT32_TILE)
    return {
        "NUM_KV_HEADS": attention.num_kv_heads,
        "GROUP": attention.num_heads // attention.num_kv_heads,
        "HEAD_DIM": attention.head_dim,
        "HEAD_PAD": head_pad,
        "BLOCK_SIZE": kv_layer.shape[3],
        "TILE": tile,
        "WINDOW": attention.window or 0,
        "SOFTCAP": attention.softcap or 0.0,
        "HAS_SLOPES": attention.alibi_slopes is not None,
        # float32 models promise the tokens of other float32 engines: no shorter products.
        "PRECISION": "ieee" if kv_layer.dtype == torch.float32 else "tf32",
    }


def options(num_warps: int, num_stages: int) -> Constants:
    """Of a launch, beside its constants."""
    # Fused multiply-add is in the kernels' favour; what Triton does unasked depends on its version.
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for the interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
