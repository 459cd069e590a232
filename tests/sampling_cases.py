"""What the Triton sampler must give, on any device: plain torch's results on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton import sampling, sampling_logprobs
from pyvllm.kernels.triton.sampling_search import DEFAULT, SamplingConfig
from tests.sampler_rows import Row, step_of

PLAIN = ReferenceKernels()
PADDING = 13
"""Columns of logits beyond the vocabulary. Odd, so that rows begin anywhere."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """What to test with."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    config: SamplingConfig = DEFAULT


def padded(values: Tensor, where: Where) -> Tensor:
    """`values` [R, V] with columns after them that win if they are looked at."""
    beyond = values.new_full((len(values), PADDING), 1e4)
    return torch.cat([values, beyond], 1).to(where.device, where.dtype)


def picked(values: Tensor, rows: Sequence[Row], where: Where) -> Tensor:
    """Tokens [R], on the CPU."""
    step = step_of(rows)
    params = step.row_params.to(where.device)
    return sampling.pick(padded(values, where), params, step.flags, values.shape[1], where.config).cpu()


def check_pick(values: Tensor, rows: Sequence[Row], where: Where, *, allowed: float = 0.0) -> None:
    """`allowed`: the part of the rows that rounding may change: scores nearly equal, masses at a boundary."""
    step = step_of(rows)
    logits = values.to(where.device, where.dtype)
    theirs = PLAIN.pick(logits, step.row_params.to(where.device), step.flags, values.shape[1]).cpu()
    ours = picked(values, rows, where)
    wrong = (ours != theirs).nonzero().flatten().tolist()
    assert len(wrong) <= allowed * len(rows), [(rows[i], int(ours[i]), int(theirs[i])) for i in wrong]


def check_logprobs(values: Tensor, tokens: Tensor, wanted: Tensor, max_top: int, where: Where) -> None:
    vocab_size = values.shape[1]
    logits, tokens, wanted = padded(values, where), tokens.to(where.device), wanted.to(where.device)
    ours = sampling_logprobs.logprobs(logits, tokens, wanted, max_top, vocab_size, where.config)
    theirs = PLAIN.logprobs(logits, tokens, wanted, max_top, vocab_size)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.ranks, theirs.ranks)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=3e-6, rtol=1e-6)


def check_best(values: Tensor, count: int, wanted: Tensor, where: Where) -> None:
    logits, wanted = padded(values, where), wanted.to(where.device)
    ours = sampling_logprobs.best(logits, count, wanted, values.shape[1], where.config)
    theirs = PLAIN.best(logits, count, wanted, values.shape[1])
    assert torch.equal(ours[0][wanted], theirs[0][wanted])
    assert torch.equal(ours[1][wanted], theirs[1][wanted])
