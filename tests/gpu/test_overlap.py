"""A graph of decode layers, whose kernels begin before the one before them has ended, equals them one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyvllm.kernels import Attention, Heads, Norm, RopeTables
from pyvllm.kernels.cuda.kernels import CudaKernels, reason_against
from pyvllm.kernels.triton.kernels import TritonKernels
from tests.attention_cases import blocks_for, step_buffer, used_kv, view

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

SIZE, INNER, LAYERS = 1024, 3072, 3
ATTENTION = Attention(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", [TritonKernels, CudaKernels])
@pytest.mark.parametrize("num_seqs", [1, 4, 8, 100])
def test_a_graph_of_layers_equals_its_kernels_one_by_one(kind: type[TritonKernels], num_seqs: int) -> None:
    if kind is CudaKernels and (reason := reason_against(torch.device("cuda"))):
        pytest.skip(reason)
    torch.manual_seed(0)
    kernels, lens = kind(), [(300 + 7 * i, 1) for i in range(num_seqs)]
    num_blocks = blocks_for(lens, 64)
    step = view(step_buffer(lens, 64, num_blocks, num_seqs))
    kv_layers = [used_kv(step, ATTENTION, num_blocks, 64, torch.bfloat16) for _ in range(LAYERS)]
    table, previous = randn(100, SIZE), torch.zeros(1, device="cuda", dtype=torch.int32)
    norms = [Norm(weight=randn(SIZE), eps=1e-6) for _ in range(2 * LAYERS)]
    head_norm = Norm(weight=randn(128), eps=1e-6)
    rope = RopeTables(cos=randn(1200, 128), sin=randn(1200, 128), interleaved=False)
    heads = Heads(
        num_heads=16, num_kv_heads=8, head_dim=128, query_norm=head_norm, key_norm=head_norm, rope=rope
    )  # fmt: skip
    shapes = [(4096, SIZE), (SIZE, 2048), (2 * INNER, SIZE), (SIZE, INNER)] * LAYERS
    linears = [kernels.pack_linear(randn(n, k) * k**-0.5, None) for n, k in shapes]

    def compute(after_each: Callable[[], object]) -> Tensor:
        plan = kernels.plan(step, ATTENTION, kv_layers[0])
        angles = kernels.angles(rope, step.positions)
        hidden = kernels.embed(step.token_ids % 100, previous, table)

        def add(delta: Tensor | None) -> None:
            if delta is not None:
                hidden.add_(delta)
            after_each()

        for i, kv_layer in enumerate(kv_layers):
            qkv, o, gate_up, down = linears[4 * i : 4 * i + 4]
            x = kernels.norm_linear(hidden, norms[2 * i], qkv)
            after_each()
            x = kernels.attend(x, heads, angles, kv_layer, plan)
            after_each()
            add(kernels.linear_add(hidden, x, o))
            x = kernels.norm_gated(hidden, norms[2 * i + 1], gate_up, "silu")
            after_each()
            add(kernels.linear_add(hidden, x, down))
        return hidden

    expected = compute(torch.cuda.synchronize)
    kept = [kv_layer.clone() for kv_layer in kv_layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = compute(lambda: None)
    for _ in range(20):
        graph.replay()
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for kv_layer, kept_layer in zip(kv_layers, kept, strict=True):
        torch.testing.assert_close(kv_layer, kept_layer, rtol=0, atol=0, equal_nan=True)
