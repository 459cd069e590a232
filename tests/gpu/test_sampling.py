"""The Triton sampler at the sizes of real models, its distributions, and in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from pyvllm.cuda_graph import Graphs
from pyvllm.kernels.triton import sampling
from pyvllm.kernels.triton.kernels import TritonKernels
from pyvllm.sampler import sample
from pyvllm.step import HEADER_LEN, StepView
from tests.distribution_cases import NAMES, check_distribution
from tests.sampler_rows import NEVER, Row, random_row, step_of
from tests.sampling_cases import PLAIN, Where, check_best, check_logprobs, check_pick

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

GPU = torch.device("cuda")
WHERE = Where(device=GPU, dtype=torch.bfloat16)
LLAMA, QWEN = 128256, 151936


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def on_gpu(step: StepView) -> StepView:
    words = step._buffer
    return StepView(words.to(GPU), words[:HEADER_LEN].tolist())


def combinations() -> list[Row]:
    """Every combination of filters, greedy and drawn from whole rows too."""
    choices = product((0.0, 0.7, 1.5), (0, 1, 50, 5000), (1, 0, 0.3, 0.9, 0.99), (0, 0.001, 0.1))
    return [
        Row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, key=(seed * 7919, seed))
        for seed, (temperature, top_k, top_p, min_p) in enumerate(choices)
    ]


# --- picking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "spread"), [(LLAMA, 1.0), (QWEN, 5.0), (50257, 1.0)])
def test_every_combination_of_filters(vocab_size: int, spread: float) -> None:
    rows = combinations()
    values = torch.randn(len(rows), vocab_size, device=GPU) * spread
    check_pick(values, rows, WHERE, allowed=0.01)


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(1, torch.bfloat16), (2, torch.float32), (33, torch.float16), (1024, torch.bfloat16)]
)
def test_rows_of_every_kind(num_rows: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(num_rows)
    rows = [replace(random_row(rng, LLAMA, 1), num_candidates=1) for _ in range(num_rows)]
    values = torch.randn(num_rows, LLAMA, device=GPU) * 3
    check_pick(values, rows, replace(WHERE, dtype=dtype), allowed=0.01)


@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    rows = [replace(row, temperature=temperature) for row in combinations()]
    check_pick(torch.randn(len(rows), LLAMA, device=GPU), rows, WHERE, allowed=0.02)


def test_ties_and_rows_with_few_or_no_finite_values() -> None:
    rows = combinations()
    values = torch.randint(-2, 3, (len(rows), LLAMA), device=GPU).float()
    values[::5] = NEVER
    values[::5, 77] = 3.0
    values[1::5] = NEVER
    values[2::5, 40:] = NEVER
    check_pick(values, rows, WHERE, allowed=0.03)


def test_the_batch_does_not_matter() -> None:
    """A row alone, cut into other portions, gives the same token as in a large batch."""
    rows = combinations()
    step = on_gpu(step_of(rows))
    values = (torch.randn(len(rows), LLAMA, device=GPU) * 3).bfloat16()
    together = sampling.pick(values, step.row_params, step.flags, LLAMA)
    alone = [sampling.pick(values[i : i + 1], step.row_params[i : i + 1], step.flags, LLAMA) for i in range(len(rows))]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("vocab_size", [12, 600, 20_000])
@pytest.mark.parametrize("name", NAMES)
def test_draws_follow_the_exact_distribution(name: str, vocab_size: int) -> None:
    """The list of `tests/test_sampler_distributions.py`."""
    check_distribution(name, TritonKernels(), vocab_size=vocab_size, device=GPU, dtype=torch.bfloat16)


# --- log-probabilities and candidates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_top", "num_rows", "dtype"),
    [
        (0, 1, torch.bfloat16),
        (1, 64, torch.float32),
        (20, 1, torch.float32),
        (20, 300, torch.bfloat16),
        (256, 64, torch.bfloat16),
        (300, 64, torch.float32),
    ],
)
def test_logprobs_and_candidates(max_top: int, num_rows: int, dtype: torch.dtype) -> None:
    where = replace(WHERE, dtype=dtype)
    # In float32 few different values: else those that differ by the last bit may be equal as log-probabilities.
    values = torch.randn(num_rows, LLAMA, device=GPU).mul(1000).round().div(250)
    values[num_rows // 2] = 0.5
    tokens = torch.randint(0, LLAMA, (num_rows,), dtype=torch.int32)
    wanted = torch.arange(num_rows) % 3 != 1
    check_logprobs(values, tokens, wanted, max_top, where)
    if max_top:
        check_best(values, max_top, wanted, where)


# --- whole steps ------------------------------------------------------------------------------------------------------


def random_step(count: int) -> tuple[Tensor, StepView]:
    rng = np.random.default_rng(count)
    rows = [random_row(rng, LLAMA, 3) for _ in range(count)]
    return (torch.randn(count, LLAMA, device=GPU) * 3).bfloat16(), on_gpu(step_of(rows))


def test_a_step_never_waits_for_the_device() -> None:
    logits, step = random_step(40)
    previous = torch.tensor([5, 6, 7], dtype=torch.int32, device=GPU)
    kernels = TritonKernels()
    sample(logits, step, previous, kernels=kernels, vocab_size=LLAMA)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = sample(logits, step, previous, kernels=kernels, vocab_size=LLAMA)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    theirs = sample(logits, step, previous, kernels=PLAIN, vocab_size=LLAMA)
    assert (ours.token_ids != theirs.token_ids).any(1).sum() <= 1
    assert ours.table is not None


def test_a_captured_step_follows_its_inputs() -> None:
    logits, step = random_step(48)
    kernels = TritonKernels()
    expected = kernels.pick(logits, step.row_params, step.flags, LLAMA)
    logits_now, params_now = logits.roll(1, 0), step.row_params.clone()
    graphs: Graphs[Tensor] = Graphs(GPU)

    def pick() -> Tensor:
        return graphs.run("pick", lambda: kernels.pick(logits_now, params_now, step.flags, LLAMA))

    pick()
    logits_now.copy_(logits)
    assert torch.equal(pick(), expected)
    params_now.copy_(step.row_params.roll(1, 0))
    logits_now.copy_(logits.roll(1, 0))
    assert torch.equal(pick(), expected.roll(1, 0))
