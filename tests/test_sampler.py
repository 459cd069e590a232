"""The sampler on hand-made logits, feature by feature. Names with b… are the field reports that a test stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyvllm import noise, sampler
from pyvllm.config import LogprobsMode
from pyvllm.kernels.cpu import CpuKernels
from pyvllm.kernels.plain_sampling import LogprobRows
from pyvllm.sampler import prompt_logprobs, sample
from pyvllm.step import RowParam
from tests.sampler_rows import (
    CPU_KERNELS,
    NEVER,
    Row,
    many,
    naive_bits,
    naive_filter,
    plan,
    row_params,
    sample_rows,
    step_of,
)


def draws(logits: Sequence[float], row: Row, count: int) -> NDArray[np.int64]:
    """How often each token is drawn."""
    rows = torch.tensor(logits).float().expand(count, -1)
    tokens = sample(rows, many(row, count), None, kernels=CPU_KERNELS, vocab_size=len(logits)).token_ids[:, 0]
    return np.bincount(tokens.numpy(), minlength=len(logits))


def log(probabilities: Sequence[float]) -> list[float]:
    return [math.log(p) for p in probabilities]


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_bits_equal_unsigned_arithmetic() -> None:
    keys = np.random.default_rng(0).integers(-(2**31), 2**31, (50, 2), dtype=np.int32)
    keys[:5] = [(0, 0), (-1, -1), (2**31 - 1, -(2**31)), (-(2**31), 2**31 - 1), (1, 0)]
    ids = torch.cat([torch.arange(3000), torch.tensor([2**31 - 1, 2**30 + 7])]).int()
    key0, key1 = torch.from_numpy(keys).unbind(1)
    result = noise.noise_bits(key0, key1, ids)
    expected = np.stack([naive_bits((int(a), int(b)), ids.numpy()) for a, b in keys])
    np.testing.assert_array_equal(result.numpy().view(np.uint32), expected)
    shuffled = torch.stack([torch.randperm(len(ids)) for _ in keys])
    assert torch.equal(noise.noise_bits(key0, key1, ids[shuffled]), result.gather(1, shuffled))


def test_noise_is_exponential_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = [0, 1, 2**9, 2**10, 2**22, 2**31 - 1, -(2**31), -129, -128, -2, -1]  # unsigned: 0 to 2^32 - 1
    words = np.concatenate([extremes, np.random.default_rng(0).integers(-(2**31), 2**31, 100_000)]).astype(np.int32)
    monkeypatch.setattr(noise, "noise_bits", lambda *_: torch.from_numpy(words.copy())[None])
    result = noise.log_exponential(torch.empty(1), torch.empty(1), torch.empty(1))[0].numpy()
    v = np.minimum(words.view(np.uint32).astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33), 1 - 2.0**-24)
    np.testing.assert_allclose(result, np.log(-np.log1p(-v.astype(np.float64))), rtol=2e-6, atol=5e-7)


# --- named cases ------------------------------------------------------------------------------------------------------


def test_b048_top_k_before_top_p_renormalised() -> None:
    assert draws(log([0.1, 0.2, 0.3, 0.4]), Row(temperature=1, top_k=2, top_p=0.5), 1000).tolist() == [0, 0, 0, 1000]


@pytest.mark.parametrize(("top_k", "support"), [(1, 3), (2, 3), (3, 3), (4, 4), (5, 4), (10**9, 4), (0, 4)])
def test_b051_b052_ties_at_the_kth_logit_stay(top_k: int, support: int) -> None:
    counts = draws([5, 5, 5, 1], Row(temperature=3, top_k=top_k), 1000)
    assert np.flatnonzero(counts).tolist() == list(range(support))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 33])
def test_b051_greedy_takes_the_lowest_id(dtype: torch.dtype, rows: int) -> None:
    logits = torch.zeros(rows, 49152, dtype=dtype)
    logits[:, [7, 30_000, 49_151]] = 5
    for row in (Row(), Row(temperature=1, top_p=0), Row(bias={9: 1.0}), Row(num_candidates=2)):
        assert sample_rows(logits, [row] * rows).token_ids[:, 0].tolist() == [7] * rows


def test_b053_min_p() -> None:
    counts = draws(log([0.6, 0.3, 0.05, 0.05]), Row(temperature=1, min_p=0.1), 20_000)
    assert counts[2:].tolist() == [0, 0]
    assert counts[0] / 20_000 == pytest.approx(2 / 3, abs=0.015)
    assert draws(log([0.6, 0.3, 0.05, 0.05]), Row(temperature=1, min_p=1), 200).tolist() == [200, 0, 0, 0]


@pytest.mark.parametrize(("temperature", "gap"), [(1e-2, 0.3), (1e-4, 2e-3), (1e-5, 2e-3)])
@pytest.mark.parametrize("offset", [0.0, 1e4, -3e38])
def test_b054_small_temperatures_do_not_overflow(temperature: float, gap: float, offset: float) -> None:
    gap = gap if offset == 0 else 1e36
    logits = [offset, offset + gap, offset - gap, NEVER]
    for filters in (Row(), Row(top_k=3), Row(top_p=0.9), Row(min_p=0.1)):
        assert draws(logits, replace(filters, temperature=temperature), 500).tolist() == [0, 500, 0, 0]


def test_b057_top_p_zero_keeps_only_the_most_probable() -> None:
    for logits in ([1.0, 3.0, 2.0], [1.0, 3.0, 3.0]):
        assert draws(logits, Row(temperature=2, top_p=0), 500).tolist() == [0, 500, 0]


def test_b058_bias_decides() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 64) * 5
    best = int(logits.argmax())
    for temperature in (0.0, 1.0):
        assert sample_rows(logits, [Row(temperature=temperature, bias={7: 100})]).token_ids.item() == 7
        assert sample_rows(logits, [Row(temperature=temperature, bias={best: -100})]).token_ids.item() != best


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        (Row(repetition=2.0), {3: 0.5, 5: 0.5, 9: -2.0}),
        (Row(presence=0.5), {5: 0.5}),
        (Row(frequency=0.5), {5: 0.0}),
        (Row(repetition=2.0, frequency=0.25, presence=1.0), {3: 0.5, 5: -1.0, 9: -2.0}),
    ],
)
@pytest.mark.parametrize("listed", [[(3, 0), (9, 0), (5, 2)], [(3, 0), (5, 1), (9, 0), (5, 1), (3, 0)],
                                    [(-2, 1), (3, 0), (9, 0), (5, 1)]])  # fmt: skip
def test_b061_scope_of_the_penalties(row: Row, changed: dict[int, float], listed: list[tuple[int, int]]) -> None:
    logits = torch.ones(2, 12)
    logits[:, 9] = -1
    expected = logits.clone()
    expected[1, list(changed)] = torch.tensor(list(changed.values()))
    step = step_of([Row(), replace(row, listed=listed)])
    values = sampler._transform(logits, step, torch.tensor([3, 5, 9], dtype=torch.int32), CPU_KERNELS, 12)
    torch.testing.assert_close(values, expected)


def test_penalties_follow_bias_and_do_not_free_masked_tokens() -> None:
    row = Row(repetition=2.0, frequency=-2.0, listed=[(0, 2), (1, 1), (2, 1)], bias={0: 3.0, 1: 50.0})
    row = replace(row, allowed=[0, 2, 3], banned=[2])
    values = sampler._transform(torch.zeros(1, 5), step_of([row]), None, CPU_KERNELS, 5)[0]
    assert values[[0, 3]].tolist() == [3 / 2 + 4, 0]
    assert (values[[1, 2, 4]] <= torch.finfo(torch.float32).min).all()


@pytest.mark.parametrize("row", [Row(), Row(temperature=5), Row(temperature=5, top_p=0.9), Row(num_candidates=3)])
def test_b063_padded_vocabulary_is_never_sampled_nor_counted(row: Row) -> None:
    logits = torch.zeros(400, 64)
    logits[:, :60] = -5
    logits[:, 33] = -4.9
    params = row_params([replace(row, key=(seed, 1), num_logprobs=62) for seed in range(400)])
    result = sample(logits, plan(params), None, kernels=CPU_KERNELS, vocab_size=60)
    assert int(result.token_ids.max()) < 60
    assert result.table is not None
    assert result.table.token_ids.shape == (400, 61)
    torch.testing.assert_close(result.table.logprobs[:, 1:].exp().sum(-1), torch.ones(400))
    prompt = prompt_logprobs(logits, torch.zeros(400, dtype=torch.int64), 2, kernels=CPU_KERNELS, vocab_size=60)
    torch.testing.assert_close(prompt.logprobs[0, 0], torch.log_softmax(logits[0, :60], -1)[0])


@pytest.mark.parametrize(
    "row", [Row(), Row(temperature=0.3), Row(temperature=2, top_k=5), Row(temperature=1, top_p=0.5)]
)
def test_b065_contradictory_masks_stay_among_the_allowed(row: Row) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 300) * 10
    for seed in range(20):
        seeded = replace(row, key=(seed, 0))
        both = sample_rows(logits, [replace(seeded, allowed=[7, 9], banned=[7, 9, 11])])
        assert both.token_ids.item() in (7, 9)
        one = sample_rows(logits, [replace(seeded, allowed=[7, 9], banned=[7], bias={9: -100})])
        assert one.token_ids.item() == 9
        nothing = sample_rows(torch.full_like(logits, NEVER), [seeded])
        assert nothing.token_ids.item() == 0
        # What a processor leaves nothing of.
        assert sample_rows(torch.full_like(logits, NEVER), [replace(seeded, allowed=[7, 9])]).token_ids.item() in (7, 9)


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=0.7, top_p=0.9),
        Row(temperature=1.0),
        Row(temperature=2.5),
        Row(temperature=0.7, top_k=3),
        Row(temperature=1.3, min_p=0.15),
        Row(temperature=1.5, top_k=5, top_p=0.8),
        Row(temperature=1.5, min_p=0.1, top_p=0.7),
        Row(temperature=2.0, top_k=6, min_p=0.2, top_p=0.95),
    ],
)
@pytest.mark.parametrize("sequential_seeds", [False, True])
def test_b067_the_distribution_is_right(row: Row, sequential_seeds: bool) -> None:
    logits = np.array([1.0, 2.5, -0.5, 3.0, 0.3, 2.0, -2.0, 1.4], np.float32)
    count = 40_000
    step = many(row, count)
    if sequential_seeds:
        step.row_params[:, RowParam.NOISE_KEY_0] = torch.arange(count, dtype=torch.int32)
        step.row_params[:, RowParam.NOISE_KEY_1] = 0
    tokens = sample(
        torch.from_numpy(logits).expand(count, -1), step, None, kernels=CPU_KERNELS, vocab_size=8
    ).token_ids[:, 0]
    counts = np.bincount(tokens.numpy(), minlength=8)
    p, _ = naive_filter(logits.astype(np.float64), row)
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * count
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, torch.tensor(chi_square / 2)) > 1e-4


def test_b068_logprobs_are_finite_however_narrow_the_choice() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 40)
    rows = [
        Row(temperature=1, top_k=1, num_logprobs=5),
        Row(allowed=[3], num_logprobs=5),
        Row(banned=[1], num_logprobs=0),
    ]
    result = sample_rows(logits, rows)
    assert result.table is not None
    assert result.table.logprobs.isfinite().all()
    assert result.table.token_ids[1, 0] == 3


def test_b074_raw_logprobs_do_not_move_with_filters() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 500).expand(3, -1)
    edits = Row(temperature=0.3, min_p=0.5, bias={int(logits[0].argmax()): 5.0}, repetition=1.5, listed=[(4, 1)])
    rows = [Row(), Row(temperature=1, top_k=1, top_p=0.01), replace(edits, banned=[5], presence=1.0)]
    result = sample_rows(logits, [replace(row, num_logprobs=4) for row in rows])
    assert result.table is not None
    assert result.token_ids[:, 0].tolist() == [int(logits[0].argmax())] * 3
    torch.testing.assert_close(result.table.logprobs[:, 0], torch.log_softmax(logits, -1).amax(-1), rtol=0, atol=0)
    assert (result.table.logprobs == result.table.logprobs[0]).all()
    assert torch.equal(result.logprobs[:, 0], result.table.logprobs[:, 0])


# --- candidates and log-probabilities ---------------------------------------------------------------------------------


def test_candidates_are_in_order_and_ties_take_the_lower_id() -> None:
    logits = torch.zeros(2, 600)
    logits[0, [599, 20, 300]] = 2.0
    logits[1, 4] = 1.0
    result = sample_rows(logits, [Row(num_candidates=6), Row(num_candidates=2)])
    assert result.token_ids.tolist() == [[20, 300, 599, 0, 1, 2], [4, 0, 0, 0, 0, 0]]
    assert result.logprobs[1, 2:].tolist() == [0, 0, 0, 0]
    exact = torch.log_softmax(logits, -1)
    assert torch.equal(result.logprobs[0], exact[0, [20, 300, 599, 0, 1, 2]])


def test_candidates_that_may_not_be_chosen_are_minus_infinity() -> None:
    rows = [Row(num_candidates=5, allowed=[2, 3]), Row(num_candidates=5, banned=[0, 1])]
    result = sample_rows(torch.zeros(2, 4), rows)
    third = -math.log(4)
    assert result.logprobs[0].tolist() == pytest.approx([third, third, NEVER, NEVER, NEVER])
    assert result.logprobs[1].tolist() == pytest.approx([third, third, NEVER, NEVER, NEVER])
    assert result.token_ids[:, :2].tolist() == [[2, 3], [2, 3]]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_ids_that_no_kernel_wrote_do_no_harm(mode: LogprobsMode) -> None:
    """As when kernels are only compiled: an index out of range would be the end of a GPU for the process."""

    class Unwritten(CpuKernels):
        def best(self, values: Tensor, count: int, wanted: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
            greatest, token_ids = super().best(values, count, wanted, vocab_size)
            return greatest, token_ids.fill_(2**31 - 1)

        def logprobs(
            self, logits: Tensor, tokens: Tensor, wanted: Tensor, max_top: int, vocab_size: int
        ) -> LogprobRows:
            table = super().logprobs(logits, tokens, wanted, max_top, vocab_size)
            return replace(table, token_ids=table.token_ids.fill_(-(2**31)))

    step = step_of([Row(num_candidates=2, num_logprobs=3, bias={1: 1.0})])
    result = sample(torch.zeros(1, 10), step, None, kernels=Unwritten(), vocab_size=10, logprobs_mode=mode)
    assert result.candidates is not None
    assert result.candidates.logprobs.shape == (2, 1)


def expected_table(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.log_softmax(logits.float(), -1)
    own = exact.gather(1, tokens.long()[:, None])
    best = torch.sort(exact, dim=-1, descending=True, stable=True)
    ids = torch.cat([tokens[:, None], best.indices[:, :top]], -1).int()
    return ids, exact.gather(1, ids.long()), 1 + (exact > own).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 20, 299, 300])
def test_tables_equal_log_softmax(dtype: torch.dtype, top: int) -> None:
    torch.manual_seed(top)
    logits = (torch.randn(9, 300) * 2).to(dtype)
    rows = [Row(temperature=3, key=(i, i), num_logprobs=top) for i in range(9)]
    rows[2].num_logprobs = rows[5].num_logprobs = -1
    result = sample_rows(logits, rows)
    ids, logprobs, ranks = expected_table(logits, result.token_ids[:, 0], top)
    wanted = [0, 1, 3, 4, 6, 7, 8]
    assert result.table is not None
    assert torch.equal(result.table.token_ids[wanted], ids[wanted])
    assert torch.equal(result.table.logprobs[wanted], logprobs[wanted])
    assert result.table.ranks[wanted].tolist() == ranks[wanted].tolist()
    assert torch.equal(result.logprobs[wanted, 0], logprobs[wanted, 0])
    assert not result.table.token_ids[[2, 5]].any()
    assert result.table.token_ids.dtype == result.table.ranks.dtype == result.token_ids.dtype == torch.int32


@pytest.mark.parametrize("positions", [0, 1, 64, 130])
@pytest.mark.parametrize("top", [0, 5])
def test_prompt_logprobs_equal_log_softmax(positions: int, top: int) -> None:
    torch.manual_seed(positions)
    logits = torch.randn(positions, 400).bfloat16()
    targets = torch.randint(0, 400, (positions,), dtype=torch.int32)
    result = prompt_logprobs(logits, targets, top, kernels=CPU_KERNELS, vocab_size=400)
    ids, logprobs, ranks = expected_table(logits, targets, top)
    assert torch.equal(result.token_ids, ids)
    assert torch.equal(result.logprobs, logprobs)
    assert result.ranks.tolist() == ranks.tolist()
