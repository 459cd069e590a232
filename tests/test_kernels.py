"""All kernels against the reference, and the reference against formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels, Attention, select
from pyvllm.kernels.cpu import CpuKernels, CpuPlan
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.step import StepView
from tests.plans import Entry, plan_buffer, view

CPU = torch.device("cpu")
KERNELS = [ReferenceKernels(), CpuKernels()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def attention(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16) -> Attention:
    return Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


def slopes(num_heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8 * (i + 1) / num_heads) for i in range(num_heads))


def entries(lens: Sequence[tuple[int, int]], block_size: int, num_blocks: int) -> list[Entry]:
    """Sequences of (tokens with KV, query tokens) whose blocks are strewn over the pool."""
    free = torch.randperm(num_blocks).tolist()
    made = []
    for start, num_query in lens:
        blocks = [free.pop() for _ in range(-(-(start + num_query) // block_size))]
        made.append(Entry(token_ids=[0] * num_query, start=start, blocks=blocks))
    return made


def run(kernels: AnyKernels, step: StepView, spec: Attention, kv_layer: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Write the step's KV and attend: (output [T, H * D], KV memory). Arguments are not changed."""
    kv_layer = kv_layer.clone()
    plan = kernels.plan(step, spec, kv_layer)
    kernels.write_kv(kv_layer, qkv[:, spec.num_heads :].view(len(qkv), 2, spec.num_kv_heads, -1), plan)
    return kernels.paged_attention(qkv[:, : spec.num_heads], kv_layer, plan), kv_layer


MIXED = [(0, 1), (36, 1), (7, 1), (12, 1), (0, 5), (16, 16), (3, 30), (0, 2)]


def compare(
    spec: Attention,
    lens: Sequence[tuple[int, int]] = MIXED,
    *,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> None:
    torch.manual_seed(0)
    num_blocks = sum(-(-(start + num_query) // block_size) for start, num_query in lens) + 2
    step = view(plan_buffer(entries(lens, block_size, num_blocks), block_size=block_size))
    kv_layer = torch.randn(num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim).mul_(scale).to(dtype)
    qkv = torch.randn(step.num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim).mul_(scale).to(dtype)
    expected, expected_kv = run(ReferenceKernels(), step, spec, kv_layer, qkv)
    output, kv = run(CpuKernels(), step, spec, kv_layer, qkv)
    torch.testing.assert_close(output, expected, atol=TOLERANCES[dtype] * scale, rtol=TOLERANCES[dtype])
    assert torch.equal(kv, expected_kv)


# --- attention --------------------------------------------------------------------------------------------------------


def test_reference_attention_is_the_textbooks() -> None:
    """One sequence, one head, blocks in reverse: computed here in float64 from the formula."""
    torch.manual_seed(0)
    spec = replace(attention(1, 1, 8), window=4, softcap=2.0, alibi_slopes=(0.25,))
    step = view(plan_buffer([Entry(token_ids=[0] * 6, blocks=[2, 1, 0])], block_size=2))
    qkv = torch.randn(6, 3, 8)
    output, _ = run(ReferenceKernels(), step, spec, torch.zeros(3, 2, 1, 2, 8), qkv)
    query, key, value = qkv.double().unbind(1)
    for i in range(6):
        scores = torch.tensor(
            [
                2.0 * math.tanh(float(query[i] @ key[j]) * spec.scale / 2.0) - 0.25 * (i - j)
                for j in range(max(0, i - 3), i + 1)
            ]
        )
        expected = scores.double().softmax(0) @ value[max(0, i - 3) : i + 1]
        torch.testing.assert_close(output[i].double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    compare(attention(4, 2, head_dim))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (9, 3), (8, 2), (5, 1), (8, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    compare(attention(num_heads, num_kv_heads), dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 128])
def test_block_sizes(block_size: int) -> None:
    compare(attention(), block_size=block_size)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 6},
    "window of one": {"window": 1},
    "window longer than any text": {"window": 1000},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": slopes(6)},
    "scale": {"scale": 0.7},
    "all": {"window": 9, "softcap": 3.0, "alibi_slopes": slopes(6), "scale": 0.3},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_features(feature: str, dtype: torch.dtype) -> None:
    compare(replace(attention(6, 2), **FEATURES[feature]), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unequal_lengths_are_grouped(dtype: torch.dtype) -> None:
    spec = replace(attention(4, 2, 64), window=1500)
    lens = [(2000, 1), (40, 1), (1, 1), (700, 1), (33, 1), (1990, 1), (65, 1), (0, 1), (90, 3)]
    compare(spec, lens, block_size=16, dtype=dtype)
    step = view(plan_buffer(entries(lens, 16, 400), block_size=16))
    plan: CpuPlan = CpuKernels().plan(step, spec, torch.zeros(1, 2, 2, 16, 64, dtype=dtype))
    assert sorted(row for group in plan.groups if group.rows is not None for row in group.rows.tolist()) == list(
        range(8)
    )
    assert len(plan.groups) > 1
    gathered = sum(len(group.gather) for group in plan.groups)
    assert gathered < 2 * 2 * 2 * sum(min(start + 16, 1500 + 16) // 16 + 1 for start, _ in lens)


def test_long_decodes_take_the_batched_path_in_half_precision() -> None:
    """Scores far from 0, where bfloat16 alone would be off by more than 0.1."""
    spec = replace(attention(4, 2, 64), scale=0.02)
    compare(spec, [(3000 + i, 1) for i in range(2)], block_size=16, dtype=torch.bfloat16, scale=5.0)


def test_chunks_are_cut_into_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyvllm.kernels.cpu._TILE_SCORES", 4 * 40 * 3)
    compare(replace(attention(4, 2), softcap=2.0, alibi_slopes=slopes(4)), [(30, 10), (0, 40)])


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_padding_is_not_written_and_is_finite(kernels: AnyKernels) -> None:
    torch.manual_seed(0)
    spec = attention()
    step = view(plan_buffer(entries([(9, 1), (3, 1)], 4, 8), block_size=4, pad_to=4))
    kv_layer = torch.randn(8, 2, 2, 4, 16)
    qkv = torch.randn(4, 8, 16)
    output, kv = run(kernels, step, spec, kv_layer, qkv)
    assert output.isfinite().all()
    changed = {tuple(place) for place in (kv != kv_layer).any(-1).any(2).any(1).nonzero().tolist()}
    assert changed == {divmod(slot, 4) for slot in step.slot_mapping.tolist() if slot >= 0}


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_copies_happen_one_after_another(kernels: AnyKernels) -> None:
    pool = torch.randn(3, 6, 2, 2, 4, 8)
    before = pool.clone()
    kernels.copy_blocks(pool, torch.tensor([[0, 4], [4, 5], [1, 0]], dtype=torch.int32))
    for target, source in enumerate([1, 1, 2, 3, 0, 0]):
        assert torch.equal(pool[:, target], before[:, source])


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_swaps_move_whole_blocks(kernels: AnyKernels) -> None:
    pool, host = torch.randn(3, 6, 2, 2, 4, 8), torch.randn(3, 2, 2, 2, 4, 8)
    before = host.clone()
    kernels.swap_blocks(pool, host, torch.tensor([[5, 0]], dtype=torch.int32))
    assert torch.equal(host[:, 0], pool[:, 5])
    assert torch.equal(host[:, 1], before[:, 1])


# --- linear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_is_linear(kernels: AnyKernels, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(33, 20).to(dtype), torch.randn(33).to(dtype)
    linear = kernels.pack_linear(weight, offset if bias else None)
    for rows in (1, 2, 31, 100):
        x = torch.randn(rows, 20).to(dtype)
        expected = x.float() @ weight.float().T + (offset.float() if bias else 0)
        torch.testing.assert_close(linear(x).float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_device_gets_its_fastest_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYVLLM_KERNELS", raising=False)
    assert select(CPU, torch.float32).name == "cpu"
    assert select(torch.device("cuda"), torch.float32).name == "triton"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select(torch.device("cuda"), torch.float32).name == "reference"


def test_the_environment_overrides_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYVLLM_KERNELS", "reference")
    assert select(CPU, torch.float32).name == "reference"


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [("nonsense", "cpu", torch.float32), ("cpu", "cuda", torch.float32), ("cpu", "cpu", torch.int8)],
)
def test_kernels_that_do_not_fit_are_refused(
    name: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYVLLM_KERNELS", name)
    with pytest.raises(ValueError, match=f"PYVLLM_KERNELS is '{name}'; for {device} and {dtype} there are: "):
        select(torch.device(device), dtype)
