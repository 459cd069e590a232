"""Checks of the Triton kernels around attention against `plain` and the base class, for any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyvllm.kernels import Attention, Heads, Norm, RopeTables, plain
from pyvllm.kernels.reference import ReferenceKernels, ReferencePlan
from pyvllm.kernels.triton.activation import activate, gated
from pyvllm.kernels.triton.blocks import copy_blocks, swap_blocks
from pyvllm.kernels.triton.embed import embed
from pyvllm.kernels.triton.heads import rotate_and_store
from pyvllm.kernels.triton.norm import add_norm, norm
from pyvllm.layers.rope import RopeSpec, rope_tables

REFERENCE = ReferenceKernels()


@dataclass(frozen=True, kw_only=True)
class Where:
    """What a check runs on."""

    device: torch.device
    dtype: torch.dtype

    def randn(self, *shape: int) -> Tensor:
        """Different on every call, equal in every run."""
        return torch.randn(shape).to(self.device, self.dtype)


def assert_within_ulps(
    actual: Tensor, expected: Tensor, ulps: float, *, atol: float = 1e-6, alike: float = 0.0
) -> None:
    """`ulps` in units of the last place; `atol` for what is left where large numbers cancel.

    `alike`: share of numbers in half precision that are equal, which they are not if roundings are left out.
    """
    torch.testing.assert_close(actual, expected, rtol=ulps * torch.finfo(expected.dtype).eps, atol=atol, equal_nan=True)
    if expected.dtype != torch.float32:
        assert (actual == expected).float().mean() >= alike


# --- norms ------------------------------------------------------------------------------------------------------------

RULES = {
    "rms": {},
    "rms_in_float32": {"weight_in_float32": True},
    "rms_of_float32_weight": {"weight_in_float32": True},
    "layer": {"centred": True},
    "layer_without_bias": {"centred": True},
}


def make_norm(rule: str, size: int, where: Where) -> Norm:
    bias = where.randn(size) if rule == "layer" else None
    weight = where.randn(size).add_(1)
    return Norm(weight=weight.float() if "float32_weight" in rule else weight, bias=bias, eps=0.1, **RULES[rule])


def check_norm(x: Tensor, rule: str, where: Where) -> None:
    of = make_norm(rule, x.shape[-1], where)
    before = x.clone()
    actual = norm(x, of)
    assert torch.equal(x, before)
    assert actual.is_contiguous()
    assert_within_ulps(actual, plain.norm(x, of), 4, alike=0.95)


def check_add_norm(num_rows: int, size: int, rule: str, where: Where) -> None:
    """Rows lie apart."""
    hidden, delta = where.randn(num_rows, size + 8)[:, :size], where.randn(num_rows, size + 4)[:, 4:]
    of = make_norm(rule, size, where)
    expected_sum = hidden + delta
    actual = add_norm(hidden, delta, of)
    assert torch.equal(hidden, expected_sum)
    assert_within_ulps(actual, plain.norm(expected_sum, of), 4, alike=0.95)


# --- heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """Heads, and what is done to them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: str | None = None
    key_norm: str | None = None
    rotated: int = 0
    interleaved: bool = False
    block_size: int = 4


def make_heads(case: HeadCase, num_positions: int, where: Where) -> Heads:
    rope: RopeTables | None = None
    if case.rotated:
        spec = RopeSpec(theta=1e4, dim=case.rotated, interleaved=case.interleaved)
        rope = rope_tables(spec, num_positions=num_positions, dtype=where.dtype, device=where.device)
    return Heads(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        query_norm=None if case.query_norm is None else make_norm(case.query_norm, case.head_dim, where),
        key_norm=None if case.key_norm is None else make_norm(case.key_norm, case.head_dim, where),
        rope=rope,
    )


def check_heads(case: HeadCase, num_tokens: int, where: Where) -> None:
    """The second token is padding."""
    num_positions = 50
    heads = make_heads(case, num_positions, where)
    qkv = where.randn(num_tokens, (case.num_heads + 2 * case.num_kv_heads) * case.head_dim)
    num_blocks = num_tokens // case.block_size + 2
    slots = torch.randperm(num_blocks * case.block_size)[:num_tokens]
    slots[1:2] = -1
    positions = torch.randint(num_positions, (num_tokens,)).to(where.device, torch.int32)
    kv_layer = where.randn(num_blocks, 2, case.num_kv_heads, case.block_size, case.head_dim)
    expected_kv = kv_layer.clone()

    plan = ReferencePlan(
        attention=Attention(num_heads=1, num_kv_heads=1, head_dim=1, scale=1),
        block_size=case.block_size,
        slots=slots.to(where.device),
        queries=[],
        seq_lens=[],
        block_tables=[],
    )
    angles = REFERENCE.angles(heads.rope, positions)
    expected = REFERENCE.rotate_and_store(qkv.clone(), heads, angles, expected_kv, plan)
    query = rotate_and_store(qkv, heads, positions, kv_layer, slots.to(where.device, torch.int32))

    assert query.shape == expected.shape
    assert query.isfinite().all()
    # Plain torch rounds x * cos before it adds x' * sin, and these may cancel.
    atol = 2 * torch.finfo(where.dtype).eps * expected.abs().max().item()
    assert_within_ulps(query, expected, 4, atol=atol)
    assert_within_ulps(kv_layer[:, 0], expected_kv[:, 0], 4, atol=atol)
    assert torch.equal(kv_layer[:, 1], expected_kv[:, 1])


# --- activations ------------------------------------------------------------------------------------------------------


def check_activation(activation: str, num_rows: int, size: int, where: Where) -> None:
    x = where.randn(num_rows, size).mul_(2)
    # Torch loses digits where 1 + tanh(x) or 1 + erf(x) cancel; then rounding is not all that differs.
    exact = plain.ACTIVATIONS[activation](x.double())
    atol = 1e-6 if where.dtype == torch.float32 else 1e-5
    assert_within_ulps(activate(x.clone(), activation), exact.to(where.dtype), 1, atol=atol, alike=0.95)

    gate_up = where.randn(num_rows, 2 * size).mul_(2)
    gate, up = gate_up.chunk(2, -1)
    expected = plain.ACTIVATIONS[activation](gate.double()).to(where.dtype) * up
    assert_within_ulps(gated(gate_up, activation), expected, 2, atol=4 * atol, alike=0.95)


def check_activation_of_special_values(activation: str, where: Where) -> None:
    values = [float("nan"), 0.0, -0.0, 60.0, -60.0, 1e4, -1e4]
    x = torch.tensor([values], device=where.device, dtype=where.dtype)
    torch.testing.assert_close(
        activate(x.clone(), activation), plain.ACTIVATIONS[activation](x), equal_nan=True, atol=1e-6, rtol=1e-6
    )


# --- embedding --------------------------------------------------------------------------------------------------------


def check_embed(num_tokens: int, vocab_size: int, size: int, where: Where) -> None:
    table = where.randn(vocab_size, size)
    token_ids = torch.randint(vocab_size, (num_tokens,), dtype=torch.int32)
    previous = torch.randint(vocab_size, (7,), dtype=torch.int32, device=where.device)
    token_ids[::3] = -1 - torch.arange(len(token_ids[::3]), dtype=torch.int32) % 7
    token_ids = token_ids.to(where.device)
    assert torch.equal(embed(token_ids, previous, table), REFERENCE.embed(token_ids, previous, table))


def check_embed_without_a_step_before(where: Where) -> None:
    table = where.randn(5, 16)
    token_ids = torch.tensor([4, 0, 4], dtype=torch.int32, device=where.device)
    previous = torch.empty(0, dtype=torch.int32, device=where.device)
    assert torch.equal(embed(token_ids, previous, table), table[token_ids.long()])


# --- blocks -----------------------------------------------------------------------------------------------------------


def make_pool(num_blocks: int, shape: Sequence[int], where: Where) -> Tensor:
    """[L = 3, N, 2, K, B, D] with `shape` (K, B, D)."""
    return where.randn(3, num_blocks, 2, *shape)


def int_pairs(pairs: Sequence[tuple[int, int]], where: Where) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int32, device=where.device)


def check_copy_blocks(shape: Sequence[int], where: Where) -> None:
    """One source has several targets."""
    pool = make_pool(9, shape, where)
    expected = pool.clone()
    pairs = int_pairs([(2, 7), (2, 0), (8, 3), (2, 5)], where)
    REFERENCE.copy_blocks(expected, pairs)
    copy_blocks(pool, pairs)
    assert torch.equal(pool, expected)


def check_swap_blocks(shape: Sequence[int], where: Where) -> None:
    """Out to a pool on the host, and back to other blocks."""
    pool = make_pool(6, shape, where)
    host_pool = torch.zeros(3, 4, *pool.shape[2:], dtype=where.dtype, pin_memory=where.device.type == "cuda")
    expected, expected_host = pool.clone(), host_pool.clone()
    for source, target, expected_source, expected_target, moves in (
        (pool, host_pool, expected, expected_host, [(5, 0), (1, 3), (0, 2)]),
        (host_pool, pool, expected_host, expected, [(3, 0), (0, 4)]),
    ):
        pairs = int_pairs(moves, where)
        REFERENCE.swap_blocks(expected_source, expected_target, pairs)
        swap_blocks(source, target, pairs)
        if where.device.type == "cuda":
            torch.cuda.synchronize()
    assert torch.equal(pool, expected)
    assert torch.equal(host_pool, expected_host)
    assert host_pool[:, 3].any()
