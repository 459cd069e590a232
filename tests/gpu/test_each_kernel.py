"""Each kernel once or twice, at small sizes that end inside of tiles: what compute-sanitizer looks at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pyvllm.kernels.cuda.decode import decode_attention, fused_decode_attention
from pyvllm.kernels.cuda.gated_linear import gated_linear, tilings
from pyvllm.kernels.cuda.kernels import reason_against
from pyvllm.kernels.cuda.linear import skinny_linear
from pyvllm.kernels.cuda.prefill import prefill_attention
from pyvllm.kernels.triton.kernels import TritonKernels
from pyvllm.sampler import sample
from pyvllm.step import HEADER_LEN, StepView
from tests import decode_cases, glue_cases, prefill_cases
from tests.attention_cases import SMALL, Cascade, compare, compare_cascades, spec
from tests.glue_cases import HeadCase
from tests.linear_cases import LinearCase, make, relative_error
from tests.sampler_rows import NEVER, random_row, step_of
from tests.sampling_cases import PLAIN, Where, check_best, check_logprobs

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)
GLUE = glue_cases.Where(device=GPU, dtype=torch.bfloat16)
HOPPER = pytest.mark.skipif(reason_against(GPU) is not None, reason="no Hopper GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention(head_dim: int) -> None:
    """Decode steps that are split and combined, prompts, a window, sinks."""
    attention = replace(spec(6, 2, head_dim), window=100, sinks=True)
    compare(attention, [(0, 1), (36, 1), (170, 1), (0, 5), (3, 70)], block_size=16, dtype=torch.bfloat16)


def test_attention_whose_blocks_hold_no_whole_tiles() -> None:
    compare(spec(3, 1, 24), [(36, 1), (70, 1), (3, 30)], block_size=5, dtype=torch.float32)


def test_cascades() -> None:
    groups = [Cascade(shared=48, own=[1, 20, 5, 33, 1]), Cascade(shared=16, own=[7, 2, 16, 40])]
    compare_cascades(spec(6, 2, 80), groups, [3, 50], dtype=torch.bfloat16, config=SMALL, pad_to=16)


def test_glue() -> None:
    glue_cases.check_norm(GLUE.randn(3, 72), "rms", GLUE)
    glue_cases.check_add_norm(3, 72, "layer", GLUE)
    heads = HeadCase(num_heads=5, num_kv_heads=1, head_dim=24, rotated=8, query_norm="rms", key_norm="rms")
    glue_cases.check_heads(heads, 7, GLUE)
    glue_cases.check_activation("silu", 3, 1100, GLUE)
    glue_cases.check_embed(9, 20, 1100, GLUE)
    glue_cases.check_copy_blocks((3, 5, 7), GLUE)
    glue_cases.check_swap_blocks((3, 5, 7), GLUE)


def test_log_probabilities() -> None:
    where = Where(device=GPU, dtype=torch.bfloat16)
    values = torch.randn(5, 3001, device=GPU).mul(1000).round().div(250)
    wanted = torch.arange(5) % 3 != 1
    check_logprobs(values, torch.randint(0, 3001, (5,), dtype=torch.int32), wanted, 20, where)
    check_best(values, 7, wanted, where)


def test_sampler() -> None:
    """Rows with penalties, biases, masks, candidates, greedy and drawn, some without a finite value."""
    rng = np.random.default_rng(0)
    words = step_of([random_row(rng, 3001, 3) for _ in range(40)])._buffer
    step = StepView(words.to(GPU), words[:HEADER_LEN].tolist())
    logits = torch.randn(40, 3001, device=GPU) * 3
    logits[::9, 50:] = NEVER
    previous = torch.tensor([5, 6, 7], dtype=torch.int32, device=GPU)
    ours, theirs = (
        sample(logits.clone(), step, previous, kernels=kernels, vocab_size=3001) for kernels in (TritonKernels(), PLAIN)
    )
    assert (ours.token_ids != theirs.token_ids).any(1).sum() <= 1


@HOPPER
def test_decode_in_cuda() -> None:
    for case in (decode_cases.CASES[2], decode_cases.CASES[-1]):
        decode_cases.compare(case, decode_attention)
    decode_cases.compare_fused(decode_cases.FUSED_CASES[0], fused_decode_attention)


@HOPPER
@pytest.mark.parametrize(
    "case",
    [
        LinearCase(m=3, n=37, k=1088, norm=2, gated=True, bias=True),
        LinearCase(m=13, n=100, k=320, dtype=torch.float16, norm=1, residual=True),
    ],
    ids=str,
)
def test_skinny_product_in_cuda(case: LinearCase) -> None:
    inputs = make(case, GPU)
    out = skinny_linear(
        inputs.x, inputs.weight, bias=inputs.bias, norm=inputs.norm, residual=inputs.residual, gated=case.gated
    )
    assert relative_error(out, inputs.expected) < (4e-3 if case.dtype == torch.bfloat16 else 5e-4)


@HOPPER
def test_gated_layer_in_cuda() -> None:
    inputs = make(LinearCase(m=70, n=136, k=200, gated=True), GPU)
    for tiling in tilings(136, multiprocessors=132):
        assert relative_error(gated_linear(inputs.x, inputs.weight, tiling=tiling), inputs.expected) < 4e-3


@HOPPER
def test_prefill_in_cuda() -> None:
    for name in ("groups of 4", "blocks of 8"):
        (case,) = (case for case in prefill_cases.CASES if case.name == name)
        prefill_cases.compare(case, prefill_attention)
