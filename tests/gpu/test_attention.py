"""Paged attention in Triton at the sizes of real models, and in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyvllm.cuda_graph import Graphs
from pyvllm.kernels import Attention
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.attention import paged_attention, plan_attention
from tests.attention_cases import (
    DEVICE,
    TOLERANCES,
    blocks_for,
    compare,
    features,
    spec,
    step_buffer,
    used_kv,
    view,
)

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

MIXED = [(1023, 1), (5000, 1), (1, 1), (0, 1), (63, 1), (64, 1), (0, 700), (3000, 129), (17, 2), (900, 64), (0, 1500)]
LLAMA = spec(32, 8, 128)
WINDOW = 1000


# Compiling takes nearly all of the time: each shape or feature appears in one dtype or two, beside others.
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (8, 2, 16, torch.float16),
        (9, 3, 64, torch.bfloat16),
        (71, 1, 64, torch.bfloat16),
        (12, 12, 80, torch.bfloat16),
        (28, 4, 96, torch.float16),
        (16, 8, 192, torch.bfloat16),
        (8, 2, 256, torch.bfloat16),
        (8, 2, 256, torch.float32),
    ],
)
def test_shapes(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    compare(spec(num_heads, num_kv_heads, head_dim), MIXED, block_size=64, dtype=dtype, config=None)


@pytest.mark.parametrize("block_size", [5, 16])
def test_block_sizes(block_size: int) -> None:
    compare(LLAMA, MIXED, block_size=block_size, dtype=torch.bfloat16, config=None)


FEATURES = {**features(32, 50.0), "long window, sinks": {"window": WINDOW, "sinks": True}}


@pytest.mark.parametrize(
    ("feature", "dtype"),
    [
        ("scale", torch.bfloat16),
        ("scale", torch.float32),
        ("long window, sinks", torch.bfloat16),
        ("softcap", torch.float16),
        ("alibi", torch.bfloat16),
        ("all", torch.float32),
    ],
)
def test_features(feature: str, dtype: torch.dtype) -> None:
    compare(replace(LLAMA, **FEATURES[feature]), MIXED, block_size=64, dtype=dtype, config=None)


@pytest.mark.parametrize("lens", [[(1023, 1)], [(32767, 1)], [(511, 1)] * 300, [(100_000, 1)] + [(90, 1)] * 63])
def test_decodes(lens: list[tuple[int, int]]) -> None:
    compare(LLAMA, lens, block_size=64, dtype=torch.bfloat16, config=None, layers=3)


def test_repeated_runs_give_equal_bits() -> None:
    """Whichever program arrives last, it combines in the same order."""
    torch.manual_seed(0)
    lens = [(20_000, 1), (5000, 1), (300, 1)]
    num_blocks = blocks_for(lens, 64)
    step = view(step_buffer(lens, 64, num_blocks))
    kv_layer = used_kv(step, LLAMA, num_blocks, 64, torch.bfloat16)
    kv_layer.nan_to_num_()
    plan = plan_attention(step, LLAMA, kv_layer)
    query = torch.randn(3, 32, 128, device=DEVICE).bfloat16()
    first = paged_attention(query, kv_layer, plan)
    assert all(torch.equal(paged_attention(query, kv_layer, plan), first) for _ in range(50))


def test_a_plan_never_waits_for_the_device() -> None:
    lens = [(9000, 1), (100, 1), (0, 50)]
    step = view(step_buffer(lens, 64, blocks_for(lens, 64)))
    kv_layer = torch.empty(1, 2, 8, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    plan_attention(step, LLAMA, kv_layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan_attention(step, LLAMA, kv_layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", [LLAMA, replace(LLAMA, window=WINDOW)], ids=["full", "window"])
def test_a_captured_graph_serves_other_lengths(attention: Attention) -> None:
    """Captured without a single block; replayed with one long sequence, many of mixed lengths, and few."""
    torch.manual_seed(0)
    graph_size, block_size, num_blocks = 64, 64, 2000
    empty = step_buffer([], block_size, num_blocks, pad_to=graph_size)
    header = view(empty)
    assert header.graph_size == graph_size
    # Sections before the block ids have the same place in all these buffers, as with one graph size in the engine.
    buffer = torch.zeros(len(empty) + 4 * num_blocks, dtype=torch.int32, device=DEVICE)
    buffer[: len(empty)] = torch.from_numpy(empty)
    step = type(header)(buffer, empty.tolist())
    kv_layer = torch.randn(num_blocks, 2, 8, block_size, 128, device=DEVICE).bfloat16()
    query = torch.randn(graph_size, 32, 128, device=DEVICE).bfloat16()

    def attend() -> torch.Tensor:
        plan = plan_attention(step, attention, kv_layer)
        own_query = query + 0  # between the two, as `plan_attention` asks for
        return torch.stack([paged_attention(own_query, kv_layer, plan) for _ in range(2)])

    graphs: Graphs[torch.Tensor] = Graphs(DEVICE)
    graphs.run("step", attend)

    mixed = [(int(length), 1) for length in torch.randint(0, 1900, (60,))]
    for lens in ([(50_000, 1)], mixed, [(0, 1), (63, 1), (64, 1)], [], [(500, 1)] * 64):
        other = step_buffer(lens, block_size, num_blocks, pad_to=graph_size)
        buffer[: len(other)] = torch.from_numpy(other)
        outputs = graphs.run("step", attend)
        seen = view(other)
        reference = ReferenceKernels()
        expected = reference.paged_attention(query, kv_layer, reference.plan(seen, attention, kv_layer))
        tolerance = TOLERANCES[torch.bfloat16]
        torch.testing.assert_close(outputs[0], expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(outputs[0], outputs[1])
