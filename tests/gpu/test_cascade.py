"""What sequences share, read once for all of them: at the sizes of real models, and in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyvllm.cuda_graph import Graphs
from pyvllm.kernels import Attention
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.attention import cascade_kind, paged_attention, plan_attention
from pyvllm.step import StepView
from tests.attention_cases import DEVICE, TOLERANCES, Cascade, cascade_buffer, compare_cascades, slopes, spec, view

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

LLAMA = spec(32, 8, 128)
# On average more members than `FEW_MEMBERS`, then not.
LARGE = [
    Cascade(shared=1024, own=[1 + 3 * i % 150 for i in range(70)]),
    Cascade(shared=256, own=[1, 64, 500, 65] * 8),
    Cascade(shared=64, own=[2, 1, 1, 90]),
]
SMALL = [Cascade(shared=64 * (1 + i % 4), own=[1, 70, 20, 64]) for i in range(20)]
ALONE = [1000, 1, 64]


@pytest.mark.parametrize(
    ("attention", "dtype", "groups"),
    [
        (LLAMA, torch.bfloat16, LARGE),
        (LLAMA, torch.bfloat16, SMALL),
        (LLAMA, torch.float32, LARGE),
        (spec(12, 12, 64), torch.float16, LARGE),
        (spec(28, 4, 80), torch.bfloat16, SMALL),
        (spec(16, 8, 256), torch.bfloat16, LARGE),
        (spec(71, 1, 64), torch.bfloat16, LARGE),
        (replace(spec(16, 8, 128), softcap=20.0, alibi_slopes=slopes(16), sinks=True), torch.bfloat16, LARGE),
    ],
    ids=["large", "small", "float32", "MHA", "D=80", "D=256", "71 heads", "softcap, ALiBi, sinks"],
)
def test_shapes(attention: Attention, dtype: torch.dtype, groups: list[Cascade]) -> None:
    compare_cascades(attention, groups, ALONE, block_size=64, dtype=dtype, config=None, layers=2)


def test_prefills_beside_cascades() -> None:
    prefills = [(0, 300), (500, 64), (17, 2)]
    compare_cascades(LLAMA, LARGE, ALONE, block_size=64, dtype=torch.bfloat16, config=None, prefills=prefills)


def test_blocks_smaller_than_tiles() -> None:
    groups = [Cascade(shared=208, own=[1, 30, 9, 4] * 6), Cascade(shared=16, own=[5] * 4)]
    compare_cascades(LLAMA, groups, ALONE, block_size=16, dtype=torch.bfloat16, config=None)


def test_a_long_text_that_few_share() -> None:
    """It is cut, so that all processors read it."""
    groups = [Cascade(shared=64 * 400, own=[1 + 20 * i for i in range(8)])]
    plan = compare_cascades(LLAMA, groups, block_size=64, dtype=torch.bfloat16, config=None)
    assert plan.decode is not None
    assert plan.decode.cascade is not None
    assert int(plan.decode.cascade.num_items) > 8


@pytest.mark.parametrize("members", [4, 64], ids=["small", "large"])
def test_a_captured_graph_serves_other_groupings(members: int) -> None:
    torch.manual_seed(0)
    graph_size, block_size, num_blocks = 128, 64, 3000
    captured = cascade_buffer([Cascade(shared=64, own=[1] * members)], [], block_size, num_blocks, pad_to=graph_size)
    captured_view = view(captured)
    assert cascade_kind(captured_view) == (1 if members == 4 else 2)
    buffer = torch.zeros(len(captured) + 4 * num_blocks, dtype=torch.int32, device=DEVICE)
    buffer[: len(captured)] = torch.from_numpy(captured)
    step = StepView(buffer, captured_view._header)
    kv_layer = torch.randn(num_blocks, 2, 8, block_size, 128, device=DEVICE).bfloat16()
    query = torch.randn(graph_size, 32, 128, device=DEVICE).bfloat16()

    def attend() -> torch.Tensor:
        plan = plan_attention(step, LLAMA, kv_layer)
        return torch.stack([paged_attention(query, kv_layer, plan) for _ in range(2)])

    graphs: Graphs[torch.Tensor] = Graphs(DEVICE)
    graphs.run("step", attend)

    long = Cascade(shared=64 * 300, own=[40, 1, 700, 9])
    for groups, alone in [(LARGE, ALONE), (SMALL, ALONE), ([long], ALONE), ([], [50_000]), ([], [])]:
        other = cascade_buffer(groups, alone, block_size, num_blocks, pad_to=graph_size)
        buffer[: len(other)] = torch.from_numpy(other)
        outputs = graphs.run("step", attend)
        reference = ReferenceKernels()
        expected = reference.paged_attention(query, kv_layer, reference.plan(view(other), LLAMA, kv_layer))
        tolerance = TOLERANCES[torch.bfloat16]
        torch.testing.assert_close(outputs[0], expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(outputs[0], outputs[1])


def test_a_plan_never_waits_for_the_device() -> None:
    step = view(cascade_buffer(LARGE, ALONE, 64, 1000))
    kv_layer = torch.empty(1, 2, 8, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    plan_attention(step, LLAMA, kv_layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan_attention(step, LLAMA, kv_layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
