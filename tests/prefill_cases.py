"""Comparing prefill attention in CUDA C++ with the reference, on a GPU or with the kernel's source run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyvllm.kernels.cuda import prefill
from pyvllm.kernels.interface import Attention
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.attention import AttentionPlan, plan_attention
from tests.attention_cases import DEVICE, blocks_for, spec, step_buffer, tolerance_of, used_kv, view

Run = Callable[[Tensor, Tensor, Tensor, AttentionPlan], None]
"""`prefill.prefill_attention`, or what stands in for it."""

RAGGED = ((36, 1), (0, 5), (3, 60), (120, 10), (200, 90))
"""Of each sequence (tokens that have KV, query tokens), the first a decode."""
ENDS = ((0, 64), (0, 128), (128, 128), (127, 129), (96, 32), (256, 2), (0, 127), (65, 63))
"""Last tiles that are full, or nearly."""


@dataclass(frozen=True, kw_only=True)
class PrefillCase:
    """Sequences with several query tokens each, and others. Memory that holds no token holds NaN."""

    name: str
    attention: Attention
    lens: Sequence[tuple[int, int]] = RAGGED
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16


CASES = [
    PrefillCase(name="groups of 4", attention=spec(8, 2, 128)),
    PrefillCase(name="groups of 2, ends, block 128", attention=spec(2, 1, 128), lens=ENDS, block_size=128),
    PrefillCase(name="a query head for each KV head", attention=spec(2, 2, 128)),
    PrefillCase(name="groups of 8, block 256", attention=spec(8, 1, 128), block_size=256, dtype=torch.float16),
    PrefillCase(name="groups of 64, block 16", attention=spec(64, 1, 128), lens=[(0, 5), (120, 10)], block_size=16),
    PrefillCase(name="blocks of 8", attention=spec(4, 1, 128), block_size=8),
    PrefillCase(name="blocks of 96", attention=spec(4, 1, 128), block_size=96),
    PrefillCase(name="heads of 64, block 32", attention=spec(4, 1, 64), block_size=32, dtype=torch.float16),
    PrefillCase(name="scores in the hundreds", attention=replace(spec(4, 1, 128), scale=9.0)),
]


def compare(case: PrefillCase, run: Run, layers: int = 2) -> None:
    """Output must be that of the reference up to rounding, and only that of prefills. `layers`: how often, with one
    plan.
    """
    torch.manual_seed(0)
    attention, block_size = case.attention, case.block_size
    num_blocks = blocks_for(case.lens, block_size)
    step = view(step_buffer(case.lens, block_size, num_blocks))
    plan = plan_attention(step, attention, used_kv(step, attention, num_blocks, block_size, case.dtype))
    reference = ReferenceKernels()
    reference_plan = reference.plan(step, attention, torch.empty(0, 2, 1, block_size, 1))
    for _ in range(layers):
        kv_layer = used_kv(step, attention, num_blocks, block_size, case.dtype)
        assert prefill.serves(plan, kv_layer)
        # As after one product for queries, keys and values: rows of each lie apart.
        heads = attention.num_heads + 2 * attention.num_kv_heads
        qkv = torch.randn(len(step.token_ids), heads, attention.head_dim, device=DEVICE).to(case.dtype)
        query = qkv[:, : attention.num_heads]
        output = query.new_full((len(query), attention.num_heads * attention.head_dim), float("nan"))
        run(query, kv_layer, output, plan)
        expected = reference.paged_attention(query, kv_layer, reference_plan)
        tolerance = tolerance_of(case.dtype, step.max_seq_len)
        first = step.num_decodes
        torch.testing.assert_close(output[first:], expected[first:], atol=tolerance, rtol=tolerance)
        assert output[:first].isnan().all()
