"""Experts in half precision on a GPU: grouped products, also in a CUDA graph, whoever is sent where."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from pyvllm.cuda_graph import Graphs
from pyvllm.kernels.triton.kernels import TritonKernels
from pyvllm.layers.moe import ExpertWeights, all_experts, sorted_by_expert
from tests.linear_cases import relative_error

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)
NUM_TOKENS, SIZE, WIDTH, NUM_EXPERTS = 40, 256, 128, 8


def random(*shape: int, factor: float = 1.0) -> Tensor:
    return torch.randn(shape, device=GPU).mul_(factor).bfloat16()


def test_a_graph_follows_the_routing() -> None:
    torch.manual_seed(0)
    of = ExpertWeights(
        gate_up=random(NUM_EXPERTS, 2 * WIDTH, SIZE, factor=SIZE**-0.5),
        down=random(NUM_EXPERTS, SIZE, WIDTH, factor=WIDTH**-0.5),
        gate_up_bias=random(NUM_EXPERTS, 2 * WIDTH),
        down_bias=random(NUM_EXPERTS, SIZE),
    )
    exact = ExpertWeights(**{name: getattr(of, name).float() for name in ExpertWeights.__dataclass_fields__})
    x, weights = random(NUM_TOKENS, SIZE), torch.rand(NUM_TOKENS, 2, device=GPU)
    gate = partial(TritonKernels().gated, activation="silu")
    experts = torch.zeros(NUM_TOKENS, 2, dtype=torch.int64, device=GPU)
    graphs: Graphs[Tensor] = Graphs(GPU)
    anywhere = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(NUM_TOKENS)])
    for routing in (anywhere, torch.tensor([[3, 5]]), torch.tensor([[7, 0]]), anywhere.flip(0)):
        experts.copy_(routing.expand(NUM_TOKENS, 2))
        output = graphs.run("experts", lambda: sorted_by_expert(x, weights, experts, of, gate))
        expected = all_experts(x.float(), weights, experts, exact, gate)
        assert relative_error(output, expected) < 1e-2
