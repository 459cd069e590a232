"""Comparing decode attention in CUDA C++ with the reference, on a GPU or with the kernel's source run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyvllm.kernels.cuda import decode
from pyvllm.kernels.interface import Attention
from pyvllm.kernels.plain import Heads, Norm, RopeTables
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.attention import AttentionPlan, plan_attention
from pyvllm.kernels.triton.attention_config import AttentionConfig, DecodeConfig
from tests.attention_cases import DEVICE, TOLERANCES, blocks_for, features, spec, step_buffer, used_kv, view

Run = Callable[[Tensor, Tensor, Tensor, AttentionPlan], None]
"""`decode.decode_attention`, or what stands in for it."""
RunFused = Callable[[Tensor, Heads, Tensor, Tensor, AttentionPlan], None]
"""`decode.fused_decode_attention`, or what stands in for it."""


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """Sequences of one query token each, of `lens` tokens that have KV already."""

    name: str
    attention: Attention
    lens: Sequence[int]
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    config: DecodeConfig = field(default_factory=lambda: DecodeConfig(programs_per_sm=16, min_tiles=1))
    """Cuts even short sequences in several pieces, on a device of one processor."""
    pad_to: int = 0
    norm: Norm | None = None
    """Of query and key heads, with its weight still to be drawn."""
    rotated: int = 0
    """Dimensions of a head that position turns."""
    interleaved: bool = False


_WHOLE = DecodeConfig(min_tiles=1 << 20)
_ONE_WARP = DecodeConfig(programs_per_sm=16, min_tiles=1, max_tile=16)

CASES = [
    DecodeCase(name="a query head for each KV head", attention=spec(2, 2, 64), lens=[36, 0, 70]),
    DecodeCase(name="float16", attention=spec(8, 2, 64), lens=[36, 0, 70], dtype=torch.float16),
    DecodeCase(name="groups of 8, ends of blocks", attention=spec(8, 1, 128), lens=[136, 15, 16, 31], block_size=32),
    DecodeCase(name="groups of 3, padding", attention=spec(6, 2, 64), lens=[36, 200, 70], pad_to=5, config=_WHOLE),
    DecodeCase(name="one warp", attention=spec(5, 1, 64), lens=[36, 16, 100], config=_ONE_WARP),
    DecodeCase(name="heads of 192", attention=spec(4, 1, 192), lens=[100, 9], block_size=48),
    DecodeCase(name="heads of 256", attention=spec(2, 1, 256), lens=[300], block_size=64),
    DecodeCase(name="more blocks than a warp has lanes", attention=spec(2, 1, 64), lens=[2500], config=_WHOLE),
    DecodeCase(
        name="many pieces", attention=spec(4, 1, 128), lens=[1300], config=replace(_ONE_WARP, programs_per_sm=21)
    ),
    *(
        DecodeCase(name=name, attention=replace(spec(6, 2, 64), **changes), lens=[36, 7, 170])
        for name, changes in features(6, 3.0).items()
        if "sinks" not in changes
    ),
]


def _norm(*, weight_in_float32: bool) -> Norm:
    return Norm(weight=torch.empty(0), eps=1e-3, weight_in_float32=weight_in_float32)


FUSED_CASES = [
    DecodeCase(name="Llama", attention=spec(8, 2, 128), lens=[36, 0, 128, 700], rotated=128, block_size=64),
    DecodeCase(
        name="Qwen3, one piece each, padding",
        attention=spec(4, 2, 128),
        lens=[63, 64, 0, 200],
        rotated=128,
        norm=_norm(weight_in_float32=False),
        config=_WHOLE,
        pad_to=6,
    ),
    DecodeCase(
        name="interleaved part of a head, float16",
        attention=spec(3, 1, 64),
        lens=[36, 15, 129],
        rotated=32,
        interleaved=True,
        norm=_norm(weight_in_float32=True),
        dtype=torch.float16,
    ),
    DecodeCase(name="no rotation", attention=replace(spec(6, 2, 64), **features(6, 3.0)["all"]), lens=[36, 8, 170]),
    DecodeCase(name="one warp, heads of 256", attention=spec(2, 1, 256), lens=[31, 33], rotated=64, config=_ONE_WARP),
]


def compare(case: DecodeCase, run: Run, layers: int = 2) -> None:
    """Output must be that of the reference up to rounding. `layers`: how often, with one plan."""
    torch.manual_seed(0)
    attention, lens = case.attention, [(start, 1) for start in case.lens]
    num_blocks = blocks_for(lens, case.block_size)
    step = view(step_buffer(lens, case.block_size, num_blocks, case.pad_to))
    config = AttentionConfig(decode=case.config)
    plan = plan_attention(step, attention, used_kv(step, attention, num_blocks, case.block_size, case.dtype), config)
    reference = ReferenceKernels()
    reference_plan = reference.plan(step, attention, torch.empty(0, 2, 1, case.block_size, 1))
    for _ in range(layers):
        kv_layer = used_kv(step, attention, num_blocks, case.block_size, case.dtype)
        assert decode.supports(attention, kv_layer)
        # As after one product for queries, keys and values: rows of each lie apart.
        qkv = torch.randn(len(step.token_ids), attention.num_heads + 2, attention.head_dim, device=DEVICE).to(
            case.dtype
        )
        query = qkv[:, : attention.num_heads]
        output = torch.full((len(query), query[0].numel()), float("nan"), dtype=case.dtype, device=DEVICE)
        run(query, kv_layer, output, plan)
        expected = reference.paged_attention(query, kv_layer, reference_plan)
        torch.testing.assert_close(output, expected, atol=TOLERANCES[case.dtype], rtol=TOLERANCES[case.dtype])


def compare_fused(case: DecodeCase, run: RunFused) -> None:
    """Output and KV memory must be those of the reference up to rounding."""
    torch.manual_seed(0)
    attention, lens = case.attention, [(start, 1) for start in case.lens]
    num_blocks = blocks_for(lens, case.block_size)
    step = view(step_buffer(lens, case.block_size, num_blocks, case.pad_to))
    kv_layer = used_kv(step, attention, num_blocks, case.block_size, case.dtype)
    plan = plan_attention(step, attention, kv_layer, AttentionConfig(decode=case.config))
    heads = _heads(case)
    assert decode.supports(attention, kv_layer)
    assert decode.supports_heads(heads, case.dtype)
    num_heads = attention.num_heads + 2 * attention.num_kv_heads
    qkv = torch.randn(len(step.token_ids), num_heads * attention.head_dim, device=DEVICE).to(case.dtype)
    output = torch.full((len(qkv), attention.num_heads * attention.head_dim), float("nan"), device=DEVICE).to(
        case.dtype
    )
    reference = ReferenceKernels()
    reference_plan = reference.plan(step, attention, kv_layer)
    expected_kv = kv_layer.clone()
    # What the new tokens' memory holds before must not matter.
    real = step.slot_mapping[step.slot_mapping >= 0].long()
    kv_layer[real // case.block_size, :, :, real % case.block_size] = float("nan")
    angles = reference.angles(heads.rope, step.positions)
    query = reference.rotate_and_store(qkv.clone(), heads, angles, expected_kv, reference_plan)
    run(qkv, heads, kv_layer, output, plan)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(kv_layer, expected_kv, atol=tolerance, rtol=tolerance, equal_nan=True)
    expected = reference.paged_attention(query, expected_kv, reference_plan)
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def _heads(case: DecodeCase) -> Heads:
    attention = case.attention

    def norm() -> Norm | None:
        weight = torch.randn(attention.head_dim, device=DEVICE).to(case.dtype)
        return None if case.norm is None else replace(case.norm, weight=weight)

    rope = None
    if case.rotated:
        angles = torch.rand(max(case.lens) + 1, case.rotated, device=DEVICE) * 6
        rope = RopeTables(
            cos=angles.cos().to(case.dtype), sin=angles.sin().to(case.dtype), interleaved=case.interleaved
        )
    return Heads(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        query_norm=norm(),
        key_norm=norm(),
        rope=rope,
    )
