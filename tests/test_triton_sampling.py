"""The Triton sampler on the CPU, in Triton's interpreter. `tests/gpu/test_sampling.py`: the same on a GPU.

Rows are cut into small pieces, so that few logits exercise all ways through the kernels. No bfloat16: the interpreter
computes it wrongly.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from pyvllm.kernels.triton.kernels import TritonKernels
from pyvllm.kernels.triton.sampling_search import SamplingConfig
from tests.distribution_cases import check_distribution
from tests.sampler_rows import NEVER, Row, random_row, sample_rows, step_of
from tests.sampling_cases import PLAIN, Where, check_best, check_logprobs, check_pick, picked

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_sampling.py holds these on a GPU", allow_module_level=True)

CPU = torch.device("cpu")
TRITON = TritonKernels()
SMALL = Where(device=CPU, config=SamplingConfig(tile=128, group=4, width=8, least_width=4, block=512, programs=6))
HALF = replace(SMALL, dtype=torch.float16)
WHOLE = Where(device=CPU)
BOTH = pytest.mark.parametrize("where", [pytest.param(SMALL, id="float32"), pytest.param(HALF, id="float16")])
BANNED = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def seeded(row: Row, seed: int) -> Row:
    return replace(row, key=(seed * 7919, seed))


# --- picking ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("vocab_size", "count"), [(50, 24), (1000, 24), (3000, 8)])
def test_rows_of_every_kind(vocab_size: int, count: int, where: Where) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = [replace(random_row(rng, vocab_size, 1), num_candidates=1) for _ in range(count)]
    check_pick(torch.randn(count, vocab_size) * 3, rows, where)


def test_every_combination_of_filters() -> None:
    rows = [
        seeded(Row(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p), seed)
        for seed, (top_k, top_p, min_p) in enumerate(product((0, 1, 7, 405), (1, 0, 0.3, 0.95), (0, 0.05)))
    ]
    check_pick(torch.randn(len(rows), 400) * 2, rows, SMALL)


@BOTH
@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_temperatures(temperature: float, where: Where) -> None:
    filters = [Row(), Row(top_k=5), Row(top_p=0.9), Row(min_p=0.2), Row(min_p=1), Row(top_k=40, top_p=0.5, min_p=0.1)]
    rows = [seeded(replace(row, temperature=temperature), seed) for seed, row in enumerate(filters)]
    check_pick(torch.randn(len(rows), 300) * 3, rows, where)


def test_ties_at_every_cut() -> None:
    """Values of a few levels: cuts fall among equals, of which top_p keeps the lower ids."""
    rows = [
        seeded(Row(temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p), seed)
        for seed, (top_k, top_p, min_p) in enumerate(product((0, 30), (1, 0, 0.37, 0.871), (0, 0.3)))
    ]
    check_pick(torch.randint(-3, 4, (len(rows), 300)).float(), rows, SMALL)
    check_pick(torch.zeros(len(rows), 300), rows, SMALL)


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    values = torch.zeros(24, 64)
    values[:, 5] = 1e-3
    tokens = picked(values, [seeded(Row(temperature=1, top_p=0.1), seed) for seed in range(24)], SMALL)
    assert sorted(set(tokens.tolist())) == [0, 1, 2, 3, 4, 5, 6]


def test_greedy_takes_the_lowest_id() -> None:
    values = torch.zeros(4, 700)
    values[0, [699, 300, 299]] = 1
    values[2, 0] = -0.0
    values[3, :256] = -1
    assert picked(values, [Row()] * 4, SMALL).tolist() == [299, 0, 0, 256]


def test_rows_with_few_or_no_finite_values() -> None:
    values = torch.full((6, 300), NEVER)
    values[1, 200] = -5
    values[2, [3, 150, 299]] = BANNED
    values[3, 40:60] = torch.randn(20)
    values[3, 100] = BANNED
    values[4, ::2] = torch.randn(150)
    values[5] = torch.randn(300)
    for filters in (Row(), Row(top_k=2), Row(top_p=0.8), Row(min_p=0.1), Row(top_k=90, top_p=0.99)):
        for temperature in (0.0, 0.3):
            rows = [seeded(replace(filters, temperature=temperature), seed) for seed in range(6)]
            check_pick(values, rows, SMALL)


def test_survivors_beyond_the_gathered() -> None:
    """Flat rows, whose survivors are most of the row, in order so that good groups are all good."""
    values = torch.linspace(3, 0, 900)[torch.stack([torch.arange(900), torch.randperm(900)]).repeat(4, 1)]
    filters = [Row(top_p=0.97), Row(top_k=500), Row(min_p=0.06), Row(top_k=600, top_p=0.9)]
    rows = [seeded(replace(row, temperature=2), seed) for seed, row in enumerate(filters * 2)]
    check_pick(values, rows, SMALL)


def test_the_batch_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    rows = [replace(random_row(rng, 500, 1), num_candidates=1) for _ in range(12)]
    values = torch.randn(12, 500)
    together = picked(values, rows, SMALL)
    assert [int(picked(values[i : i + 1], rows[i : i + 1], SMALL)) for i in range(12)] == together.tolist()


@pytest.mark.parametrize("name", ["penalties then filters", "masks then filters", "everything"])
def test_draws_of_the_list_that_all_samplers_share(name: str) -> None:
    check_distribution(name, TRITON, vocab_size=40, draws=6)


# --- penalties --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [20, 3000])
def test_penalties(vocab_size: int) -> None:
    """Lists of all lengths, tokens listed several times or known to the device only, rows between them without any."""
    rng = np.random.default_rng(vocab_size)
    rows = [
        Row(
            repetition=float(rng.choice([1, 0.7, 1.5])) if length else 1,
            presence=float(rng.normal()) if length else 0,
            frequency=float(rng.normal()) if length else 0,
            listed=[(int(rng.integers(-3, vocab_size)), int(rng.integers(0, 4))) for _ in range(length)],
        )
        for length in (1, 0, 7, 0, 300, 5000, 2)
    ]
    step, previous = step_of(rows), torch.tensor([5, 6, 19], dtype=torch.int32)
    values = torch.randn(len(rows), vocab_size)
    ours, theirs = values.clone(), values.clone()
    TRITON.penalise_(ours, step, previous)
    PLAIN.penalise_(theirs, step, previous)
    assert not torch.equal(theirs, values)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


# --- log-probabilities and candidates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "max_top", "where"),
    [(50, 0, SMALL), (30, 30, SMALL), (300, 1, HALF), (3000, 5, SMALL), (700, 20, HALF), (700, 300, SMALL)],
)
def test_logprobs(vocab_size: int, max_top: int, where: Where) -> None:
    values = torch.randn(8, vocab_size) * 3
    values[1] = 1.0  # all tied
    values[2, 5:] = NEVER
    values[3, ::3] = 4.0
    tokens = torch.randint(0, vocab_size, (8,), dtype=torch.int32)
    tokens[2] = 4
    wanted = torch.arange(8) != 5
    check_logprobs(values, tokens, wanted, max_top, where)
    if max_top:
        check_best(values, max_top, wanted, where)


def test_steps_of_every_kind_equal_plain_torch() -> None:
    """Through `sample`, pieces as large as on a GPU."""
    rng = np.random.default_rng(3)
    rows = [random_row(rng, 5000, 3) for _ in range(24)]
    logits = torch.randn(24, 5000) * 3
    ours = sample_rows(logits, rows, [5, 6, 7], TRITON)
    theirs = sample_rows(logits, rows, [5, 6, 7], PLAIN)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=2e-6, rtol=1e-6)
    assert ours.table is not None
    assert theirs.table is not None
    assert torch.equal(ours.table.token_ids, theirs.table.token_ids)
    assert torch.equal(ours.table.ranks, theirs.table.ranks)
