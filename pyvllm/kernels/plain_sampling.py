"""Picking tokens and finding log-probabilities as plain torch on any device: the specification of all others.

Every row is treated alike, whatever it needs, and nothing waits for a device.

Symbols: R rows of the step (padded), N some of them, P those with penalties, V real vocabulary, K candidate tokens, L
top log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyvllm.noise import log_exponential
from pyvllm.step import Flags, RowParam, StepView

NEVER: Final = float("-inf")
FILTERS: Final = Flags.TOP_K | Flags.TOP_P | Flags.MIN_P


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRows:
    """Log-probabilities of N positions, natural logarithms of the model's own probabilities."""

    token_ids: Tensor
    """[N, 1 + L] int32: the token in question, then the L most probable ones in order (ties: lower id first)."""
    logprobs: Tensor
    """[N, 1 + L] float32, of those tokens."""
    ranks: Tensor
    """[N] int32: 1 + the number of tokens strictly more probable than the token in question."""


# --- penalties --------------------------------------------------------------------------------------------------------


def penalise_(values: Tensor, step: StepView, previous: Tensor | None) -> None:
    """See `Kernels.penalise_`. The work is proportional to the tokens listed, but for zeroing counts [P, V]."""
    ids, times = step.penalty_tokens.long().unbind(1)
    if previous is not None and previous.numel():
        ids = torch.where(ids < 0, previous[(-1 - ids).clamp_min(0)], ids)
    owner = owners(step.penalty_offsets, ids)
    # Counts of tokens listed more than once add up, and equal values are then written for each.
    counts = values.new_zeros((len(step.penalty_rows), values.shape[1]))
    counts.index_put_((owner, ids), times.float(), accumulate=True)
    count = counts[owner, ids]
    row = step.penalty_rows[owner]
    params = step.row_params[row]
    logit = values[row, ids]
    repetition = floats(params, RowParam.REPETITION_PENALTY)
    logit = torch.where(logit > 0, logit / repetition, logit * repetition)
    logit -= floats(params, RowParam.FREQUENCY_PENALTY) * count
    logit -= floats(params, RowParam.PRESENCE_PENALTY) * (count > 0)
    values[row, ids] = logit


def owners(offsets: Tensor, entries: Tensor) -> Tensor:
    """For each entry of a CSR list with `offsets` [P + 1], which of the P lists it belongs to."""
    lists = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(lists, offsets.diff(), output_size=len(entries))


# --- tokens -----------------------------------------------------------------------------------------------------------


def pick(values: Tensor, row_params: Tensor, flags: Flags, vocab_size: int) -> Tensor:
    """See `Kernels.pick`."""
    values = values[:, :vocab_size]
    tokens = values.argmax(-1)
    if Flags.RANDOM in flags:
        scaled = scale(values, row_params)
        if flags & FILTERS:
            best, ids = best_of(scaled, vocab_size)
            survives, _ = survivors(best, scaled, ids, row_params, flags)
            scores = score(best.masked_fill_(~survives, NEVER), row_params, ids.int())
            drawn = ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
        else:
            all_ids = torch.arange(vocab_size, dtype=torch.int32, device=values.device)
            drawn = score(scaled, row_params, all_ids).argmax(-1)
        tokens = torch.where(floats(row_params, RowParam.TEMPERATURE) > 0, drawn, tokens)
    return tokens.int()


def scale(values: Tensor, params: Tensor) -> Tensor:
    """(value - the row's greatest) / temperature of `values` [N, V]: float32, at most 0, a copy."""
    scaled = values.to(torch.float32, copy=True)
    temperature = floats(params, RowParam.TEMPERATURE)[:, None]
    # The greatest value goes first, so that no temperature can overflow what may be drawn.
    scaled -= scaled.amax(-1, keepdim=True)
    scaled /= torch.where(temperature > 0, temperature, 1)
    return scaled


def score(scaled: Tensor, params: Tensor, ids: Tensor) -> Tensor:
    """Subtract the noise in place: the greatest score of a row is its draw. `ids` [K] or [N, K] int32."""
    return scaled.sub_(log_exponential(params[:, RowParam.NOISE_KEY_0], params[:, RowParam.NOISE_KEY_1], ids))


def survivors(best: Tensor, scaled: Tensor, ids: Tensor, params: Tensor, flags: Flags) -> tuple[Tensor, Tensor]:
    """Which of a row's best tokens pass min_p, top_k and top_p, and for which rows the answer is right.

    `best`, `ids` [N, K]: values and ids of `best_of`; `scaled` [N, V]: all values, 0 the greatest. Survivors [N, K]
    bool: of each row the first ones, at least one. [N] bool: false if tokens beyond the best K might survive too. Ties
    at the k-th value pass. Of the tokens that passed min_p and top_k, top_p keeps those with less than top_p of their
    mass before them.
    """
    top_k = params[:, RowParam.TOP_K, None].long()
    top_p, min_p = floats(params, RowParam.TOP_P)[:, None], floats(params, RowParam.MIN_P)[:, None]
    kth = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1)).masked_fill(top_k == 0, NEVER)
    survives = (best > NEVER) & (best >= min_p.log()) & (best >= kth)
    survives[:, 0] = True
    last = survives.sum(-1, keepdim=True) - 1
    complete = best.gather(1, last) > best[:, -1:]
    if flags & Flags.TOP_P:
        bounded = (top_k > 0) | (min_p > 0)
        mass = torch.softmax(scaled, -1).gather(1, ids).cumsum(-1)
        total = torch.where(bounded, mass.gather(1, last), 1)
        survives &= (pad(mass[:, :-1], (1, 0)) < top_p * total) | (top_p >= 1)
        survives[:, 0] = True
        # Without min_p and top_k the total is that of the whole row, so only the last survivor counts.
        last = survives.sum(-1, keepdim=True) - 1
        complete = torch.where(bounded, complete, best.gather(1, last) > best[:, -1:])
    return survives, complete.squeeze(1)


# --- values and log-probabilities -------------------------------------------------------------------------------------


def log_softmax_(values: Tensor, wanted: Tensor) -> None:
    """See `Kernels.log_softmax_`."""
    values.copy_(torch.where(wanted[:, None], torch.log_softmax(values, -1), values))


def best_rows(values: Tensor, count: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """See `Kernels.best`."""
    best, ids = best_of(values[:, :vocab_size].float(), count)
    return best, ids.int()


def logprob_rows(logits: Tensor, tokens: Tensor, wanted: Tensor, max_top: int, vocab_size: int) -> LogprobRows:
    """See `Kernels.logprobs`."""
    rows = logprobs_of(logits[:, :vocab_size], tokens.long(), max_top)
    return LogprobRows(
        token_ids=rows.token_ids * wanted[:, None],
        logprobs=torch.where(wanted[:, None], rows.logprobs, 0),
        ranks=rows.ranks * wanted,
    )


def logprobs_of(raw: Tensor, tokens: Tensor, max_top: int) -> LogprobRows:
    """Log-probabilities of `tokens` [N] int64, and the best, under logits `raw` [N, V]."""
    logprobs = torch.log_softmax(raw, -1, dtype=torch.float32)
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(-1, dtype=torch.int32) + 1
    token_ids = tokens[:, None]
    if max_top == 0:
        return LogprobRows(token_ids=token_ids.int(), logprobs=own, ranks=ranks)
    best, ids = best_of(logprobs, min(max_top, raw.shape[1]))
    token_ids = torch.cat([token_ids, ids], -1).int()
    return LogprobRows(token_ids=token_ids, logprobs=torch.cat([own, best], -1), ranks=ranks)


def best_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest of each row of `values` [N, V] float32 in order, ties with the lower id first.

    Returns values and int64 ids, [N, count].
    """
    vocab_size = values.shape[1]
    if count == vocab_size:
        ordered = torch.sort(values, dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    # topk leaves the order of ties open, so it gets unique keys: order-preserving bits of the value above those of
    # the id. Adding 0 makes -0.0 and 0.0 equal.
    bits = (values + 0.0).view(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=values.device)
    keys = torch.add(reversed_ids, bits, alpha=2**32).topk(count, dim=-1).values
    ids = vocab_size - 1 - (keys & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def floats(params: Tensor, field: RowParam) -> Tensor:
    """A float field of `row_params` rows [N, fields]: [N] float32."""
    return params.view(torch.float32)[:, field]
