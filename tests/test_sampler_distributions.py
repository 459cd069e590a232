"""Draws of the sampler against the exact distribution, for each transform and for many together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.sampler_rows import Row, naive_filter, naive_transform, sample_rows

LOGITS = np.array([1.0, 2.5, -0.5, 3.0, 0.3, 2.0, -2.0, 1.4, 0.9, 2.2, -1.0, 1.7], np.float32)
DRAWS = 20_000
PREVIOUS = [3, 5]
MASK = np.array([1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1], bool)

ROWS = {
    "bias": Row(bias={3: -2.0, 6: 4.0, 0: 0.5}),
    "repetition": Row(repetition=1.6, listed=[(3, 0), (2, 1), (9, 2)]),
    "presence": Row(presence=1.1, listed=[(3, 2), (1, 1), (7, 0)]),
    "frequency": Row(frequency=0.7, listed=[(3, 2), (1, 1), (9, 3)]),
    "a negative penalty and a token in flight": Row(frequency=-0.5, presence=0.3, listed=[(1, 1), (-1, 1), (-2, 1)]),
    "allowed": Row(allowed=[0, 3, 6, 9]),
    "banned": Row(banned=[3, 1]),
    "mask": Row(mask=MASK),
    "low temperature": Row(temperature=0.4),
    "high temperature": Row(temperature=3.0),
    "top_k": Row(top_k=4),
    "top_p": Row(top_p=0.75),
    "min_p": Row(min_p=0.2),
    "top_k then top_p": Row(top_k=6, top_p=0.6),
    "min_p then top_k then top_p": Row(temperature=1.8, min_p=0.08, top_k=7, top_p=0.85),
    "penalties then filters": Row(
        temperature=0.8,
        repetition=1.3,
        presence=0.4,
        frequency=0.2,
        listed=[(3, 2), (5, 1), (8, 0)],
        top_k=7,
        top_p=0.9,
    ),
    "masks then filters": Row(temperature=1.4, allowed=[0, 1, 3, 5, 7, 9], banned=[3], mask=MASK, top_p=0.8),
    "everything": Row(
        temperature=1.2,
        bias={1: -1.0, 7: 1.5},
        repetition=1.2,
        presence=0.2,
        frequency=0.3,
        listed=[(3, 1), (7, 2), (-2, 1)],
        allowed=[0, 1, 3, 5, 7, 9, 11],
        banned=[0],
        mask=MASK,
        min_p=0.05,
        top_k=5,
        top_p=0.95,
    ),
}


def chi_square_p(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """How probable so great a difference is if `p` is right; 0 if something impossible was drawn."""
    if counts[p == 0].sum():
        return 0.0
    expected = p[p > 0] * counts.sum()
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


def draw(row: Row) -> NDArray[np.int64]:
    """How often each token is drawn under different keys."""
    keys = np.random.default_rng(7).integers(-(2**31), 2**31, (DRAWS, 2)).tolist()
    counts = np.zeros(len(LOGITS), np.int64)
    for part in np.array_split(np.arange(DRAWS), 4):
        rows = [replace(row, key=(keys[i][0], keys[i][1])) for i in part]
        logits = torch.from_numpy(LOGITS).expand(len(part), -1)
        tokens = sample_rows(logits, rows, PREVIOUS).token_ids[:, 0]
        counts += np.bincount(tokens.numpy(), minlength=len(LOGITS))
    return counts


def exact(row: Row) -> NDArray[np.float64]:
    return naive_filter(naive_transform(LOGITS.astype(np.float64), row, PREVIOUS), row)[0]


@pytest.mark.parametrize("name", list(ROWS))
def test_draws_follow_the_exact_distribution(name: str) -> None:
    row = ROWS[name] if ROWS[name].temperature else replace(ROWS[name], temperature=1.0)
    counts, p = draw(row), exact(row)
    assert counts.sum() == DRAWS
    assert chi_square_p(counts, p) > 1e-4
    # The test sees the transform: without it the draws would not pass.
    assert chi_square_p(counts, exact(Row(temperature=1.0))) < 1e-6
