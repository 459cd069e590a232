"""Sampling on CPUs, where counting rows is free: each thing is done for the rows that need it, a few at a time.

So temporaries stay in the cache. Tokens equal those of `plain_sampling`, whose symbols these are.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pyvllm.kernels.plain_sampling import (
    FILTERS,
    NEVER,
    LogprobRows,
    best_of,
    floats,
    logprobs_of,
    scale,
    score,
    survivors,
)
from pyvllm.step import Flags, RowParam

# A row is filtered among its most probable tokens of these numbers, then among all if they do not suffice.
_WIDTHS: Final = (256, 4096)
# Logits of the rows that are worked on at once.
_CHUNK: Final = 2**20


def pick(values: Tensor, row_params: Tensor, flags: Flags, vocab_size: int) -> Tensor:
    """See `Kernels.pick`."""
    values = values[:, :vocab_size]
    tokens = values.max(-1).indices  # the lowest id among equals, as argmax, which is slow for bfloat16
    if Flags.RANDOM in flags:
        _draw(values, tokens, row_params, flags)
    return tokens.int()


def log_softmax_(values: Tensor, wanted: Tensor) -> None:
    """See `Kernels.log_softmax_`."""
    for rows in _row_chunks(wanted, values):
        values[rows] = torch.log_softmax(values[rows], -1)


def best(values: Tensor, count: int, wanted: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """See `Kernels.best`."""
    values = values[:, :vocab_size]
    greatest = torch.zeros(len(values), count)
    token_ids = torch.zeros(len(values), count, dtype=torch.int32)
    for rows in _row_chunks(wanted, values):
        greatest[rows], ids = best_of(values[rows].float(), count)
        token_ids[rows] = ids.int()
    return greatest, token_ids


def logprobs(logits: Tensor, tokens: Tensor, wanted: Tensor, max_top: int, vocab_size: int) -> LogprobRows:
    """See `Kernels.logprobs`."""
    logits = logits[:, :vocab_size]
    shape = (len(logits), 1 + max_top)
    table = LogprobRows(
        token_ids=torch.zeros(shape, dtype=torch.int32),
        logprobs=torch.zeros(shape),
        ranks=torch.zeros(len(logits), dtype=torch.int32),
    )
    for rows in _row_chunks(wanted, logits):
        some = logprobs_of(logits[rows], tokens[rows].long(), max_top)
        table.token_ids[rows], table.logprobs[rows], table.ranks[rows] = some.token_ids, some.logprobs, some.ranks
    return table


def _draw(values: Tensor, tokens: Tensor, row_params: Tensor, flags: Flags) -> None:
    """Replace the `tokens` [R] of rows with a temperature by draws from `values` [R, V]."""
    random = floats(row_params, RowParam.TEMPERATURE) > 0
    if flags & FILTERS:
        top_p, min_p = floats(row_params, RowParam.TOP_P), floats(row_params, RowParam.MIN_P)
        filtered = random & ((row_params[:, RowParam.TOP_K] > 0) | (top_p < 1) | (min_p > 0))
        for rows in _row_chunks(filtered, values):
            params = row_params[rows]
            tokens[rows] = _draw_filtered(scale(values.index_select(0, rows), params), params, flags)
        random &= ~filtered
    all_ids = torch.arange(values.shape[1], dtype=torch.int32)
    for rows in _row_chunks(random, values):
        params = row_params[rows]
        tokens[rows] = score(scale(values.index_select(0, rows), params), params, all_ids).argmax(-1)


def _draw_filtered(scaled: Tensor, params: Tensor, flags: Flags) -> Tensor:
    """Tokens [N] drawn from `scaled` [N, V] after min_p, top_k and top_p of `params` [N, fields].

    The survivors are the first tokens in order of (value, lower id), so a row needs only as many of its best tokens as
    hold all survivors. How many that is follows from the row alone, which keeps draws independent of the batch.
    """
    vocab_size = scaled.shape[1]
    drawn = torch.zeros(len(scaled), dtype=torch.int64)
    open_rows = torch.arange(len(scaled))
    for width in [*(width for width in _WIDTHS if width < vocab_size), vocab_size]:
        greatest, ids = best_of(scaled, width)
        survives, complete = survivors(greatest, scaled, ids, params, flags)
        scores = score(greatest.masked_fill_(~survives, NEVER), params, ids.int())
        drawn[open_rows] = ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
        if width == vocab_size:
            break
        remaining = (~complete).nonzero().squeeze(1)
        open_rows, scaled, params = open_rows[remaining], scaled[remaining], params[remaining]
        if not len(open_rows):
            break
    return drawn


def _row_chunks(mask: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Indices of the rows of `values` [R, V] where `mask` [R] holds, in chunks."""
    return torch.split(mask.nonzero().squeeze(1), max(1, _CHUNK // values.shape[1]))
