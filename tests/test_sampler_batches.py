"""Batches of rows of every kind: each row gives what it gives alone, and what a naive sampler gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.sampler import sample
from tests.sampler_rows import (
    CPU_KERNELS,
    NEVER,
    Row,
    log_softmax,
    naive_token,
    naive_transform,
    random_row,
    sample_rows,
    step_of,
)

# --- independence of the batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "count"), [(5000, 40), (49152, 6)])
def test_b049_a_row_alone_equals_the_row_in_any_batch(vocab_size: int, count: int) -> None:
    rng = np.random.default_rng(vocab_size)
    previous = rng.integers(0, vocab_size, 4).tolist()
    rows = [random_row(rng, vocab_size, 4) for _ in range(count)]
    torch.manual_seed(0)
    logits = (torch.randn(count, vocab_size) * 3).bfloat16()  # bfloat16: many ties
    together = sample_rows(logits, rows, previous)
    order = rng.permutation(count).tolist()
    shuffled = sample_rows(logits[order], [rows[i] for i in order], previous)
    assert torch.equal(shuffled.token_ids, together.token_ids[order])
    assert torch.equal(shuffled.logprobs, together.logprobs[order])
    for i, row in enumerate(rows):
        alone = sample_rows(logits[i : i + 1], [row], previous)
        width = alone.token_ids.shape[1]
        assert torch.equal(alone.token_ids[0], together.token_ids[i, :width]), row
        assert torch.equal(alone.logprobs[0], together.logprobs[i, :width]), row


def test_a_neighbours_seed_changes_only_the_neighbour() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 1000).expand(2, -1)
    own = Row(temperature=1, key=(1, 2))
    tokens = [sample_rows(logits, [own, replace(own, key=(i, 9))]).token_ids[:, 0].tolist() for i in range(20)]
    assert len({mine for mine, _ in tokens}) == 1
    assert len({neighbours for _, neighbours in tokens}) > 10


def test_cpu_kernels_give_what_plain_torch_gives() -> None:
    rng = np.random.default_rng(3)
    rows = [random_row(rng, 700, 3) for _ in range(60)]
    logits = torch.randn(60, 700, generator=torch.Generator().manual_seed(1)) * 3
    result = sample_rows(logits, rows, [5, 6, 7])
    plain = sample_rows(logits, rows, [5, 6, 7], ReferenceKernels())
    assert torch.equal(result.token_ids, plain.token_ids)
    assert torch.equal(result.logprobs, plain.logprobs)
    assert result.table is not None
    assert plain.table is not None
    assert torch.equal(result.table.token_ids, plain.table.token_ids)
    assert torch.equal(result.table.logprobs, plain.table.logprobs)
    assert torch.equal(result.table.ranks, plain.table.ranks)


def test_padding_rows_and_the_callers_logits_are_left_alone() -> None:
    rng = np.random.default_rng(5)
    rows = [random_row(rng, 300, 1) for _ in range(20)]
    logits = torch.randn(24, 300)
    before = logits.clone()
    padded = sample(
        logits, step_of(rows, padding=4), torch.tensor([3], dtype=torch.int32), kernels=CPU_KERNELS, vocab_size=300
    )
    assert torch.equal(logits, before)
    exact = sample_rows(logits[:20], rows, [3])
    assert torch.equal(padded.token_ids[:20], exact.token_ids)
    assert torch.equal(padded.logprobs[:20], exact.logprobs)


class Recorder(TorchDispatchMode):
    """Names of the torch operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_does_only_what_its_rows_need() -> None:
    logits = torch.randn(4, 300).bfloat16()
    costly = {"_log_softmax", "_softmax", "logsumexp", "exp", "log", "sort", "topk", "cumsum", "index_select"}
    for row, needed in [
        (Row(), set()),
        (Row(temperature=1), {"log", "index_select"}),
        (Row(temperature=1, top_k=5), {"log", "index_select", "topk"}),
        (Row(num_logprobs=0), {"_log_softmax"}),
        (Row(num_logprobs=1), {"_log_softmax", "topk"}),
    ]:
        with Recorder() as ops:
            sample_rows(logits, [row] * 4)
        assert ops.names & costly == needed


# --- against the naive sampler ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "batches"), [(8, 60), (60, 60), (700, 20), (6000, 4)])
def test_mixed_batches_equal_a_naive_sampler(vocab_size: int, batches: int) -> None:
    rng = np.random.default_rng(vocab_size)
    decided = total = 0
    for _ in range(batches):
        previous = rng.integers(0, vocab_size, 3).tolist()
        rows = [random_row(rng, vocab_size, 3) for _ in range(int(rng.integers(1, 24)))]
        logits = (rng.normal(size=(len(rows), vocab_size)) * rng.choice([0.5, 2, 5])).astype(np.float32)
        result = sample_rows(torch.from_numpy(logits), rows, previous)
        assert not result.logprobs.isnan().any()
        for i, row in enumerate(rows):
            exact = logits[i].astype(np.float64)
            ids, logprobs = result.token_ids[i].tolist(), result.logprobs[i].numpy()
            if row.num_candidates > 1:
                check_candidates(naive_transform(log_softmax(exact), row, previous), row.num_candidates, ids, logprobs)
                continue
            token, certain = naive_token(exact, row, previous)
            total += 1
            decided += certain
            assert not certain or ids[0] == token, row
            assert row.allowed is None or ids[0] in row.allowed
            assert ids[1:] == [0] * (len(ids) - 1)
            if row.num_logprobs >= 0:
                assert logprobs[0] == pytest.approx(log_softmax(exact)[ids[0]], abs=1e-5)
    assert decided > 0.8 * total


def check_candidates(values: NDArray[np.float64], count: int, ids: list[int], logprobs: NDArray[np.float32]) -> None:
    best = np.full(count, NEVER)
    best[: len(values)] = -np.sort(-values)[:count]
    np.testing.assert_allclose(logprobs[:count], best, atol=1e-4, rtol=1e-5)
    real = [token for token, value in zip(ids[:count], logprobs, strict=False) if value > NEVER]
    assert len(set(real)) == len(real)
    np.testing.assert_allclose(values[real], best[: len(real)], atol=1e-4, rtol=1e-5)
    assert ids[count:] == [0] * (len(ids) - count)
    assert (logprobs[count:] == 0).all()
