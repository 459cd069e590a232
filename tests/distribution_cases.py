"""Draws against exact distributions: one list of rows for all samplers, on the CPU and on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from pyvllm.kernels import AnyKernels
from pyvllm.sampler import sample
from pyvllm.step import HEADER_LEN, RowParam, StepView
from tests.sampler_rows import Row, naive_filter, naive_transform, step_of

DRAWS: Final = 20_000
PREVIOUS: Final = [3, 5]
"""What the step before sampled, for penalties of tokens in flight."""
_FIRST: Final = [1.0, 2.5, -0.5, 3.0, 0.3, 2.0, -2.0, 1.4, 0.9, 2.2, -1.0, 2.0]
_ALLOWED: Final = [0, 1, 3, 5, 7, 9, 11]


def _mask(vocab_size: int) -> NDArray[np.bool_]:
    """A grammar's mask: without ids 2, 4 and 8, and without every fifth beyond the first 12."""
    ids = np.arange(vocab_size)
    return np.where(ids < 12, ~np.isin(ids, [2, 4, 8]), ids % 5 > 0)


def rows(vocab_size: int) -> dict[str, Row]:
    """Each transform alone, then many together; at least 12 tokens."""
    mask = _mask(vocab_size)
    return {
        "plain": Row(),
        "bias": Row(bias={3: -2.0, 6: 4.0, 0: 0.5}),
        "repetition": Row(repetition=1.6, listed=[(3, 0), (2, 1), (9, 2)]),
        "presence": Row(presence=1.1, listed=[(3, 2), (1, 1), (7, 0)]),
        "frequency": Row(frequency=0.7, listed=[(3, 2), (1, 1), (9, 3)]),
        "negative penalties, tokens in flight": Row(
            frequency=-0.5, presence=-0.3, listed=[(1, 1), (-1, 1), (-2, 1), (7, 0)]
        ),
        "allowed": Row(allowed=[0, 3, 6, 9]),
        "banned": Row(banned=[3, 1]),
        "mask": Row(mask=mask),
        "low temperature": Row(temperature=0.4),
        "high temperature": Row(temperature=3.0),
        "top_k": Row(top_k=3),
        "top_k with a tie": Row(top_k=4),
        "top_p": Row(top_p=0.75),
        "min_p": Row(min_p=0.2),
        "temperature then min_p": Row(temperature=2.0, min_p=0.3),
        "top_k then top_p": Row(top_k=6, top_p=0.6),
        "min_p then top_p": Row(temperature=1.5, min_p=0.1, top_p=0.7),
        "min_p then top_k": Row(temperature=2.0, min_p=0.2, top_k=4),
        "min_p then top_k then top_p": Row(temperature=1.8, min_p=0.08, top_k=7, top_p=0.85),
        "bias and penalties": Row(bias={3: -3.0, 2: 3.0}, repetition=1.5, frequency=0.4, listed=[(2, 2), (3, 1)]),
        "penalties then filters": Row(
            temperature=0.8, repetition=1.3, presence=0.4, frequency=0.2, listed=[(3, 2), (5, 1), (8, 0)], top_k=7,
            top_p=0.9,
        ),
        "masks then filters": Row(temperature=1.4, allowed=_ALLOWED, banned=[3], mask=mask, top_p=0.8),
        "everything": Row(
            temperature=1.2, bias={1: -1.0, 7: 1.5}, repetition=1.2, presence=0.2, frequency=0.3,
            listed=[(3, 1), (7, 2), (-2, 1)], allowed=_ALLOWED, banned=[0], mask=mask, min_p=0.05, top_k=5, top_p=0.95,
        ),
    }  # fmt: skip


NAMES: Final = list(rows(12))


def logits_of(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """One row of logits [V]: 12 of which the transforms change the order, then less probable ones."""
    # However many they are, together about a fifth as probable as the 12.
    more = np.random.default_rng(3).normal(2.0 - math.log(vocab_size), 1.5, vocab_size - 12)
    return torch.tensor([*_FIRST, *more], dtype=torch.float32).to(dtype)


def draw(row: Row, logits: torch.Tensor, kernels: AnyKernels, draws: int) -> NDArray[np.int64]:
    """How often each token is drawn under `draws` different keys, on the logits' device."""
    at_once = math.gcd(draws, 2000)
    keys = np.random.default_rng(7).integers(-(2**31), 2**31, (draws, 2), dtype=np.int32)
    previous = torch.tensor(PREVIOUS, dtype=torch.int32, device=logits.device)
    words = step_of([row] * at_once)._buffer
    step = StepView(words.to(logits.device), words[:HEADER_LEN].tolist())
    counts = np.zeros(len(logits), np.int64)
    for own in torch.from_numpy(keys).to(logits.device).split(at_once):
        step.row_params[:, [RowParam.NOISE_KEY_0, RowParam.NOISE_KEY_1]] = own
        sampled = sample(logits.expand(at_once, -1), step, previous, kernels=kernels, vocab_size=len(logits))
        counts += np.bincount(sampled.token_ids[:, 0].cpu().numpy(), minlength=len(logits))
    return counts


def exact(row: Row, logits: torch.Tensor) -> NDArray[np.float64]:
    """The row's probabilities [V], in float64."""
    return naive_filter(naive_transform(logits.double().cpu().numpy(), row, PREVIOUS), row)[0]


def chi_square_p(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """How probable so great a difference is if `p` is right; 0 if something impossible was drawn.

    Tokens of which fewer than 5 are expected count as one.
    """
    if counts[p == 0].sum():
        return 0.0
    expected = p * counts.sum()
    common, rare = expected >= 5, (expected > 0) & (expected < 5)
    found = np.append(counts[common], counts[rare].sum())
    wanted = np.append(expected[common], expected[rare].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def check_distribution(
    name: str,
    kernels: AnyKernels,
    *,
    vocab_size: int = 12,
    draws: int = DRAWS,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """The draws of a row of `rows` fit its distribution, and show its transforms: without them they do not fit.

    With fewer draws, where that takes long: nothing impossible is drawn.
    """
    row = rows(vocab_size)[name]
    row = row if row.temperature else replace(row, temperature=1.0)
    logits = logits_of(vocab_size, dtype).to(device)
    counts, p = draw(row, logits, kernels, draws), exact(row, logits)
    assert counts.sum() == draws
    assert not counts[p == 0].any()
    if draws < DRAWS:
        return
    assert chi_square_p(counts, p) > 1e-4
    if name != "plain":
        assert chi_square_p(counts, exact(Row(temperature=1.0), logits)) < 1e-6
