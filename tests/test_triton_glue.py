"""The Triton kernels around attention, on the CPU in Triton's interpreter. `tests/gpu/test_glue.py`: the same on a GPU.

No bfloat16: the interpreter computes it wrongly.
"""

from __future__ import annotations

import pytest
import torch

from pyvllm.kernels import ACTIVATIONS, Norm
from pyvllm.kernels.triton.norm import norm
from tests import glue_cases as cases
from tests.glue_cases import HeadCase, Where

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_glue.py holds these on a GPU", allow_module_level=True)

CPU = torch.device("cpu")
BOTH = [
    pytest.param(Where(device=CPU, dtype=torch.float32), id="float32"),
    pytest.param(Where(device=CPU, dtype=torch.float16), id="float16"),
]
HALF = Where(device=CPU, dtype=torch.float16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", BOTH)
@pytest.mark.parametrize("rule", cases.RULES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 1024), (2, 3, 24)], ids=str)
def test_norm(shape: tuple[int, ...], rule: str, where: Where) -> None:
    cases.check_norm(where.randn(*shape), rule, where)


@pytest.mark.parametrize("rule", cases.RULES)
def test_norm_of_the_widest_row(rule: str) -> None:
    cases.check_norm(HALF.randn(1, 16384), rule, HALF)


@pytest.mark.parametrize("where", BOTH)
def test_norm_of_rows_that_lie_apart(where: Where) -> None:
    cases.check_norm(where.randn(5, 100)[:, 3:67], "rms", where)
    cases.check_norm(where.randn(5, 8, 16)[:, 2:5], "layer", where)
    cases.check_norm(where.randn(64, 5).T, "rms", where)


def test_norm_of_no_rows() -> None:
    of = Norm(weight=torch.ones(8), eps=1e-5)
    assert norm(torch.empty(0, 8), of).shape == (0, 8)


@pytest.mark.parametrize("where", BOTH)
@pytest.mark.parametrize("rule", cases.RULES)
def test_add_norm(rule: str, where: Where) -> None:
    cases.check_add_norm(3, 96, rule, where)


# --- heads ------------------------------------------------------------------------------------------------------------

HEAD_CASES = {
    "llama": HeadCase(num_heads=4, num_kv_heads=2, head_dim=16, rotated=16),
    "two_groups": HeadCase(num_heads=12, num_kv_heads=9, head_dim=128, rotated=128),
    "qwen3": HeadCase(num_heads=4, num_kv_heads=2, head_dim=32, rotated=32, query_norm="rms", key_norm="rms"),
    "one_kv_head": HeadCase(num_heads=71, num_kv_heads=1, head_dim=64, rotated=64, block_size=16),
    "part_of_an_odd_head": HeadCase(num_heads=3, num_kv_heads=3, head_dim=20, rotated=12),
    "neighbours": HeadCase(num_heads=4, num_kv_heads=2, head_dim=16, rotated=8, interleaved=True),
    "neighbours_normed": HeadCase(
        num_heads=4, num_kv_heads=2, head_dim=16, rotated=16, interleaved=True, query_norm="layer", key_norm="layer"
    ),
    "normed_in_float32": HeadCase(
        num_heads=2, num_kv_heads=2, head_dim=24, rotated=24, query_norm="rms_in_float32", key_norm="rms_in_float32"
    ),
    "layer_norm": HeadCase(
        num_heads=2, num_kv_heads=1, head_dim=24, rotated=8, query_norm="layer", key_norm="layer_without_bias"
    ),
    "norms_differ": HeadCase(num_heads=2, num_kv_heads=2, head_dim=16, query_norm="rms", key_norm="layer"),
    "only_keys_normed": HeadCase(num_heads=2, num_kv_heads=2, head_dim=16, key_norm="rms"),
    "unchanged": HeadCase(num_heads=6, num_kv_heads=2, head_dim=16),
}


@pytest.mark.parametrize("where", BOTH)
@pytest.mark.parametrize("name", HEAD_CASES)
def test_heads(name: str, where: Where) -> None:
    cases.check_heads(HEAD_CASES[name], 5, where)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", BOTH)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: str, where: Where) -> None:
    cases.check_activation(activation, 2, 1100, where)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_special_values(activation: str) -> None:
    cases.check_activation_of_special_values(activation, HALF)


@pytest.mark.parametrize("where", BOTH)
def test_embed(where: Where) -> None:
    cases.check_embed(10, 30, 1100, where)
    cases.check_embed_without_a_step_before(where)


BLOCK_SHAPES = [(2, 4, 8), (1, 1, 3), (3, 5, 7), (4, 16, 40)]
"""K, B, D: whole words of 8 bytes, words of 4, of 2 in half precision, and more than one chunk."""


@pytest.mark.parametrize("where", BOTH)
@pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
def test_copy_and_swap_of_blocks(shape: tuple[int, int, int], where: Where) -> None:
    cases.check_copy_blocks(shape, where)
    cases.check_swap_blocks(shape, where)
