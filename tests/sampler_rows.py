"""Rows of a step as the sampler's tests describe them, and a naive sampler to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pyvllm.kernels import AnyKernels
from pyvllm.kernels.cpu import CpuKernels
from pyvllm.sampler import Sampled, sample
from pyvllm.step import Flags, Header, RowParam, StepView
from tests.plans import encode, view

INT32 = NDArray[np.int32]
NEVER = -math.inf
CPU_KERNELS = CpuKernels()


@dataclass(kw_only=True)
class Row:
    """What a plan says of one logits row."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    key: tuple[int, int] = (0, 0)
    num_logprobs: int = -1
    num_candidates: int = 1
    listed: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of prompt and output: (id, times generated)."""
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None
    banned: list[int] = field(default_factory=list)
    mask: NDArray[np.bool_] | None = None
    """[V]: whether a grammar lets each token follow."""

    def penalised(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0, 0, 1)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def row_params(rows: Sequence[Row]) -> INT32:
    params = np.zeros((len(rows), len(RowParam)), np.int32)
    for words, row in zip(params, rows, strict=True):
        floats = [row.presence, row.frequency, row.repetition]
        words[:] = [bits(row.temperature), row.top_k, bits(row.top_p), bits(row.min_p), *map(bits, floats),
                    *row.key, row.num_logprobs, row.num_candidates]  # fmt: skip
    return params


def plan(params: INT32, sections: Mapping[str, ArrayLike] | None = None, padding: int = 0) -> StepView:
    """A plan with these row parameters, `padding` empty rows after them."""
    floats = params.view(np.float32)
    needs = {
        Flags.RANDOM: floats[:, RowParam.TEMPERATURE] > 0,
        Flags.TOP_K: params[:, RowParam.TOP_K] > 0,
        Flags.TOP_P: floats[:, RowParam.TOP_P] < 1,
        Flags.MIN_P: floats[:, RowParam.MIN_P] > 0,
        Flags.BEAM: params[:, RowParam.NUM_CANDIDATES] > 1,
    }
    scalars = {
        Header.NUM_ROWS: len(params),
        Header.NUM_CANDIDATES: int(params[:, RowParam.NUM_CANDIDATES].max()),
        Header.MAX_LOGPROBS: int(params[:, RowParam.NUM_LOGPROBS].max()),
        Header.FLAGS: sum(int(flag) for flag, rows in needs.items() if rows.any()),
    }
    padded = np.concatenate([params, np.zeros((padding, len(RowParam)), np.int32)])
    return view(encode(scalars, {"row_params": padded} | dict(sections or {})))


def mask_words(mask: NDArray[np.bool_]) -> list[int]:
    """A bit for each token, 32 a word."""
    padded = np.pad(mask, (0, -len(mask) % 32))
    words: list[int] = np.packbits(padded, bitorder="little").view(np.int32).tolist()
    return words


def step_of(rows: Sequence[Row], padding: int = 0) -> StepView:
    penalised = [i for i, row in enumerate(rows) if row.penalised()]
    restricted = [i for i, row in enumerate(rows) if row.allowed is not None]
    sections: dict[str, ArrayLike] = {
        "penalty_rows": penalised,
        "penalty_offsets": np.cumsum([0, *(len(rows[i].listed) for i in penalised)]),
        "penalty_tokens": [pair for i in penalised for pair in rows[i].listed],
        "bias": [(i, token, bits(value)) for i, row in enumerate(rows) for token, value in row.bias.items()],
        "allowed_rows": restricted,
        "allowed_offsets": np.cumsum([0, *(len(rows[i].allowed or []) for i in restricted)]),
        "allowed_ids": [token for i in restricted for token in rows[i].allowed or []],
        "banned": [(i, token) for i, row in enumerate(rows) for token in row.banned],
        "mask_rows": [i for i, row in enumerate(rows) if row.mask is not None],
        "mask_words": [word for row in rows if row.mask is not None for word in mask_words(row.mask)],
    }
    return plan(row_params(rows), sections, padding)


def sample_rows(
    logits: Tensor,
    rows: Sequence[Row],
    previous: Sequence[int] | None = None,
    kernels: AnyKernels = CPU_KERNELS,
) -> Sampled:
    previous_tokens = None if previous is None else torch.tensor(previous, dtype=torch.int32)
    return sample(logits, step_of(rows), previous_tokens, kernels=kernels, vocab_size=logits.shape[1])


def many(row: Row, count: int) -> StepView:
    """`count` copies of a row under different seeds."""
    params = np.repeat(row_params([row]), count, axis=0)
    keys = np.random.default_rng(1).integers(-(2**31), 2**31, (count, 2), dtype=np.int32)
    params[:, [RowParam.NOISE_KEY_0, RowParam.NOISE_KEY_1]] = keys
    return plan(params)


def random_row(rng: np.random.Generator, vocab_size: int, previous: int) -> Row:
    """A row of any kind: greedy, random or beam, with any filters, penalties and masks."""

    def ids(most: int) -> list[int]:
        return sorted(
            map(int, rng.choice(vocab_size, size=min(int(rng.integers(1, most)), vocab_size - 2), replace=False))
        )

    row = Row(key=(int(rng.integers(-(2**31), 2**31)), int(rng.integers(-(2**31), 2**31))))
    kind = rng.choice(["greedy", "random", "random", "beam"])
    if kind == "random":
        row.temperature = float(rng.choice([0.05, 0.6, 1.0, 1.8]))
        row.top_k = int(rng.choice([0, 0, 1, 3, 40, vocab_size // 2, vocab_size, 10**6]))
        row.top_p = float(rng.choice([1.0, 1.0, 0.0, 0.3, 0.9, 0.97]))
        row.min_p = float(rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]))
    elif kind == "beam":
        row.num_candidates = int(rng.choice([2, 6, 8]))
    if rng.random() < 0.4:
        row.repetition, row.presence, row.frequency = (
            float(rng.choice(c)) for c in ([1.0, 0.7, 1.5], [0, 0.6], [0, -0.4])
        )
        listed = [*ids(8), *ids(4), *(-1 - int(i) for i in rng.integers(0, previous, 2))]
        row.listed = [(token, int(rng.integers(0, 3))) for token in listed]
    if rng.random() < 0.3:
        row.bias = {token: float(rng.normal() * 4) for token in ids(5)}
    if rng.random() < 0.2:
        row.allowed = ids(12)
    if rng.random() < 0.2:
        row.banned = [token for token in ids(5) if row.allowed is None or token != row.allowed[0]]
    if rng.random() < 0.2:
        row.mask = rng.random(vocab_size) < rng.choice([0.1, 0.9])
        # What is left of the allowed tokens: never nothing.
        row.mask[next(token for token in row.allowed or range(vocab_size) if token not in row.banned)] = True
    row.num_logprobs = int(rng.choice([-1, -1, 0, 3]))
    return row


# --- a naive sampler, in float64, row by row --------------------------------------------------------------------------


def naive_bits(key: tuple[int, int], token_ids: NDArray[np.integer]) -> NDArray[np.uint32]:
    key0, key1 = np.array(key, np.int32).view(np.uint32)
    x = token_ids.astype(np.uint32) * np.uint32(0x9E3779B1) + key0
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= key1
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def naive_transform(values: NDArray[np.float64], row: Row, previous: Sequence[int]) -> NDArray[np.float64]:
    """The order of vLLM: allowed ids, bad words, a grammar's mask, bias, then penalties."""
    values = values.copy()
    if row.allowed is not None:
        values[[i for i in range(len(values)) if i not in row.allowed]] = NEVER
    values[row.banned] = NEVER
    if row.mask is not None:
        values[~row.mask] = NEVER
    for token, bias in row.bias.items():
        values[token] += np.float32(bias)
    counts: dict[int, int] = {}
    for token, times in row.listed if row.penalised() else []:
        token = previous[-1 - token] if token < 0 else token
        counts[token] = counts.get(token, 0) + times
    for token, count in counts.items():
        factor = np.float32(row.repetition)
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= np.float32(row.frequency) * count + (np.float32(row.presence) if count else 0)
    return values


def naive_filter(values: NDArray[np.float64], row: Row) -> tuple[NDArray[np.float64], float]:
    """Probabilities after all filters, and how close (relative) any token was to the other side of one."""
    scaled = (values - values.max()) / np.float32(row.temperature)
    p = np.exp(scaled)
    margin = np.inf
    if row.min_p > 0:
        margin = np.abs(p[p < 1] / np.float32(row.min_p) - 1).min(initial=np.inf)
        p[p < np.float32(row.min_p)] = 0
    if 0 < row.top_k < len(p):
        p[p < np.sort(p)[-row.top_k]] = 0
    p /= p.sum()
    if row.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        margin = min(margin, np.abs(before[1:] - np.float32(row.top_p)).min())
        p[order[1:][before[1:] >= np.float32(row.top_p)]] = 0
        p /= p.sum()
    return p, margin


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def naive_token(logits: NDArray[np.float64], row: Row, previous: Sequence[int]) -> tuple[int, bool]:
    """The row's token, and whether float32's rounding cannot have changed it."""
    values = naive_transform(logits, row, previous)
    if row.temperature == 0:
        best = np.sort(values)[::-1]
        return int(values.argmax()), bool(best[0] - best[1] > 1e-4)
    p, margin = naive_filter(values, row)
    v = (naive_bits(row.key, np.arange(len(p))).astype(np.float64) + 0.5) * 2.0**-32
    with np.errstate(divide="ignore"):
        score = np.log(p) - np.log(-np.log1p(-v))
    best = np.sort(score)[::-1]
    return int(score.argmax()), bool(margin > 2e-6 and best[0] - best[1] > 1e-3)
