"""Attention with sinks, against formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels, Attention
from pyvllm.kernels.cpu import CpuKernels
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.step import HEADER_LEN, StepView
from tests.plans import Entry, plan_buffer

triton_kernels = pytest.importorskip("pyvllm.kernels.triton.kernels", reason="triton is not installed")

BLOCK = 4


def textbook(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """`query` [Q, H, D] at the end of `key` and `value` [C, K, D]: [Q, H * D] float64."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    for i in range(len(query)):
        end = len(key) - len(query) + i + 1
        start = 0 if window is None else max(0, end - window)
        for head in range(query.shape[1]):
            kv_head = head * key.shape[1] // query.shape[1]
            scores = key[start:end, kv_head].double() @ query[i, head].double() * 0.3
            weights = scores.exp() / (scores.exp().sum() + sinks[head].double().exp())
            output[i, head] = weights @ value[start:end, kv_head].double()
    return output.flatten(1)


@pytest.mark.parametrize(
    "kernels", [CpuKernels(), ReferenceKernels(), triton_kernels.TritonKernels()], ids=lambda kernels: kernels.name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "window"), [(2, None), (6, 5), (4, 3)])
def test_sinks(kernels: AnyKernels, dtype: torch.dtype, num_heads: int, window: int | None) -> None:
    device = torch.device("cuda" if kernels.name == "triton" and torch.cuda.is_available() else "cpu")
    if kernels.name == "triton" and device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    torch.manual_seed(0)
    attention = Attention(num_heads=num_heads, num_kv_heads=2, head_dim=8, scale=0.3, window=window, sinks=True)
    lens = {0: (1, 9), 1: (1, 30), 2: (6, 6), 3: (5, 14)}  # query tokens and context of each sequence
    key_value = {i: torch.randn(context, 2, 2, 8).to(dtype) for i, (_, context) in lens.items()}
    pool = torch.zeros(40, 2, 2, BLOCK, 8, dtype=dtype)
    entries, free = [], torch.randperm(40).tolist()
    for i, (count, context) in lens.items():
        blocks = [free.pop() for _ in range(-(-context // BLOCK))]
        for position in range(context):
            pool[blocks[position // BLOCK], :, :, position % BLOCK] = key_value[i][position]
        entries.append(Entry(token_ids=[0] * count, start=context - count, blocks=blocks))
    buffer = plan_buffer(entries, block_size=BLOCK)
    step = StepView(torch.from_numpy(buffer).to(device), buffer[:HEADER_LEN].tolist())
    kv_layer = pool.to(device)
    plan = kernels.plan(step, attention, kv_layer)
    query = torch.randn(step.num_tokens, num_heads, 8).to(dtype)
    sinks = torch.randn(num_heads).mul_(2).to(dtype)
    found = kernels.paged_attention_with_sinks(query.to(device), kv_layer, plan, sinks.to(device))
    parts = torch.split(query, [count for count, _ in lens.values()])
    expected = [textbook(part, key_value[i][:, 0], key_value[i][:, 1], sinks, window) for i, part in enumerate(parts)]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.cpu().double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
