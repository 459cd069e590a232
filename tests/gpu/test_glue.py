"""The Triton kernels around attention at the sizes of real models, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyvllm.cuda_graph import Graphs
from pyvllm.kernels import ACTIVATIONS, Norm, plain
from pyvllm.kernels.triton.activation import gated
from pyvllm.kernels.triton.blocks import blocks_kernel, copy_blocks, swap_blocks
from pyvllm.kernels.triton.embed import embed
from pyvllm.kernels.triton.heads import heads_kernel, rotate_and_store
from pyvllm.kernels.triton.norm import add_norm, norm, norm_kernel
from tests import glue_cases as cases
from tests.glue_cases import HeadCase, Where

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

GPU = torch.device("cuda")
BFLOAT16, FLOAT16, FLOAT32 = (
    Where(device=GPU, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)
)
ALL = [pytest.param(where, id=str(where.dtype).removeprefix("torch.")) for where in (BFLOAT16, FLOAT16, FLOAT32)]
NUM_TOKENS = [1, 7, 64, 1024, 8192]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- norms ------------------------------------------------------------------------------------------------------------


# Compiling takes nearly all of the time: sizes, rules and dtypes are not combined with one another.
@pytest.mark.parametrize(
    ("size", "rule", "where"),
    [
        *((576, rule, BFLOAT16) for rule in cases.RULES),
        *((size, "rms", BFLOAT16) for size in (64, 5120, 16384)),
        *((1024, rule, where) for rule in ("rms_of_float32_weight", "layer") for where in (FLOAT16, FLOAT32)),
    ],
    ids=str,
)
def test_norms(size: int, rule: str, where: Where) -> None:
    cases.check_norm(where.randn(65, size), rule, where)
    cases.check_norm(where.randn(1, size), rule, where)
    cases.check_add_norm(65, size, rule, where)


@pytest.mark.parametrize("num_rows", NUM_TOKENS)
def test_numbers_of_rows(num_rows: int) -> None:
    cases.check_norm(BFLOAT16.randn(num_rows, 4096), "rms", BFLOAT16)
    cases.check_add_norm(num_rows, 4096, "rms", BFLOAT16)


def test_norm_of_rows_that_lie_apart() -> None:
    cases.check_norm(BFLOAT16.randn(5, 200)[:, 3:131], "rms", BFLOAT16)
    cases.check_norm(BFLOAT16.randn(5, 48, 128)[:, 2:34], "layer", BFLOAT16)


def test_norm_of_no_rows() -> None:
    of = Norm(weight=torch.ones(8, device=GPU), eps=1e-5)
    assert norm(torch.empty(0, 8, device=GPU), of).shape == (0, 8)


# --- heads ------------------------------------------------------------------------------------------------------------

HEAD_CASES = {
    "llama3_8b": HeadCase(num_heads=32, num_kv_heads=8, head_dim=128, rotated=128, block_size=64),
    "qwen3": HeadCase(
        num_heads=16, num_kv_heads=8, head_dim=128, rotated=128, query_norm="rms", key_norm="rms", block_size=64
    ),
    "smollm2": HeadCase(num_heads=9, num_kv_heads=3, head_dim=64, rotated=64, block_size=16),
    "falcon": HeadCase(num_heads=71, num_kv_heads=1, head_dim=64, rotated=64, block_size=16),
    "phi2": HeadCase(num_heads=32, num_kv_heads=32, head_dim=80, rotated=32, block_size=16),
    "gptj": HeadCase(num_heads=16, num_kv_heads=16, head_dim=256, rotated=64, interleaved=True, block_size=32),
    "gemma3": HeadCase(
        num_heads=8, num_kv_heads=4, head_dim=256, rotated=256, query_norm="rms_of_float32_weight",
        key_norm="rms_of_float32_weight", block_size=64,
    ),
    "layer_norm": HeadCase(
        num_heads=32, num_kv_heads=32, head_dim=80, rotated=20, query_norm="layer", key_norm="layer", block_size=16
    ),
    "unrotated_normed": HeadCase(num_heads=16, num_kv_heads=2, head_dim=128, query_norm="rms", key_norm="rms"),
    "mpt": HeadCase(num_heads=32, num_kv_heads=32, head_dim=128, block_size=16),
    "tiny": HeadCase(num_heads=2, num_kv_heads=1, head_dim=8, rotated=8, query_norm="rms", key_norm="rms"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, BFLOAT16) for name in HEAD_CASES),
        *((name, FLOAT32) for name in ("qwen3", "gptj")),
        *((name, FLOAT16) for name in ("llama3_8b", "layer_norm")),
    ],
    ids=str,
)
def test_heads(name: str, where: Where) -> None:
    cases.check_heads(HEAD_CASES[name], 65, where)
    cases.check_heads(HEAD_CASES[name], 1, where)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_numbers_of_tokens(num_tokens: int) -> None:
    cases.check_heads(HEAD_CASES["llama3_8b"], num_tokens, BFLOAT16)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ALL)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, where: Where) -> None:
    if where.dtype == torch.float32:
        cases.check_activation_of_special_values(activation, where)
    cases.check_activation(activation, 65, 1100, where)


def test_a_wide_activation_of_one_row_and_of_many() -> None:
    for num_rows in (1, 4096):
        cases.check_activation("silu", num_rows, 14336, BFLOAT16)


@pytest.mark.parametrize("where", ALL)
def test_embed(where: Where) -> None:
    for num_tokens in NUM_TOKENS:
        cases.check_embed(num_tokens, 1000, 1100, where)
    cases.check_embed_without_a_step_before(where)


BLOCK_SHAPES = [(8, 64, 128), (8, 16, 128), (1, 1, 3), (3, 5, 7), (2, 128, 256)]


@pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
def test_copy_and_swap_of_blocks(shape: tuple[int, int, int]) -> None:
    cases.check_copy_blocks(shape, BFLOAT16)
    cases.check_swap_blocks(shape, BFLOAT16)


# --- how they are launched --------------------------------------------------------------------------------------------


def test_all_may_be_captured_and_replayed_for_other_numbers() -> None:
    """Ids, positions, slots and pairs are read when a graph is replayed."""
    where, case = BFLOAT16, HEAD_CASES["qwen3"]
    heads = cases.make_heads(case, 100, where)
    of = cases.make_norm("rms", 1024, where)
    table, previous = where.randn(50, 1024), torch.arange(4, dtype=torch.int32, device=GPU)
    qkv, gate_up, kv_layer = where.randn(4, 32 * 128), where.randn(4, 2048), where.randn(8, 2, 8, 64, 128)
    pool = cases.make_pool(4, (2, 16, 64), where)
    step = torch.zeros(4, 4, dtype=torch.int32, device=GPU)

    def compute() -> list[Tensor]:
        token_ids, positions, slots, pairs = step.unbind()
        hidden = embed(token_ids, previous, table)
        normed = add_norm(hidden, gated(gate_up, "silu"), of)
        query = rotate_and_store(qkv, heads, positions, kv_layer, slots)
        copy_blocks(pool, pairs.view(2, 2))
        return [hidden, normed, query]

    graphs: Graphs[list[Tensor]] = Graphs(GPU)
    graphs.run("all", compute)
    step.copy_(torch.tensor([[3, -1, -4, 49], [0, 99, 5, 6], [511, -1, 0, 64], [0, 1, 2, 3]]))
    again = [tensor.clone() for tensor in graphs.run("all", compute)]
    kv_replayed, pool_replayed = kv_layer.clone(), pool.clone()
    for actual, expected in zip(again, compute(), strict=True):
        assert torch.equal(actual, expected)
    cases.assert_within_ulps(again[0], plain_sum(step[0], previous, table, gate_up), 2, atol=1e-2)
    assert torch.equal(kv_layer, kv_replayed)
    assert torch.equal(pool[:, 1], pool_replayed[:, 0])
    assert torch.equal(pool, pool_replayed)


def plain_sum(token_ids: Tensor, previous: Tensor, table: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return table[plain.resolve(token_ids, previous).long()] + ACTIVATIONS["silu"](gate) * up


def test_nothing_is_compiled_again_for_another_step() -> None:
    """Whatever the number of tokens and of pairs."""
    where, case = BFLOAT16, HEAD_CASES["llama3_8b"]
    heads = cases.make_heads(case, 100, where)
    of = cases.make_norm("rms", 4096, where)
    kv_layer, pool = where.randn(8, 2, 8, 64, 128), cases.make_pool(9, (2, 16, 64), where)
    host_pool = torch.zeros(3, 5, *pool.shape[2:], dtype=where.dtype, pin_memory=True)

    def step(num_tokens: int) -> None:
        indices = torch.zeros(num_tokens, dtype=torch.int32, device=GPU)
        norm(where.randn(num_tokens, 4096), of)
        rotate_and_store(where.randn(num_tokens, 48 * 128), heads, indices, kv_layer, indices)
        pairs = torch.tensor([[0, 1]] * num_tokens, dtype=torch.int32, device=GPU)
        copy_blocks(pool, pairs)
        swap_blocks(pool, host_pool, pairs)

    step(1)
    compiled = [variants(kernel) for kernel in (norm_kernel, heads_kernel, blocks_kernel)]
    for num_tokens in (2, 3, 16, 17, 64):
        step(num_tokens)
    assert compiled == [variants(kernel) for kernel in (norm_kernel, heads_kernel, blocks_kernel)]


def variants(kernel: Any) -> int:
    """Compiled forms of a Triton kernel."""
    return len(kernel.device_caches[torch.cuda.current_device()][0])
