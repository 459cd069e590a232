"""From logits to tokens and log-probabilities, for all rows of a step at once.

What each row wants travels in the plan (`rust_core/src/plan.rs`). Transforms run in float32 in this order: logit bias;
repetition, frequency and presence penalty; banned and allowed tokens; greedy rows pick here; temperature; min_p; top_k;
top_p; draw. (Masks commute with what is before them here, so this equals masking first.) Log-probabilities are those
of the untouched logits.

On an accelerator nothing here waits for the device: work that only some rows need is done for all rows and dropped
for the others. On a CPU, where counting rows is free, it is done for the rows that need it, a few at a time, so that
temporaries stay in the cache. Both give the same tokens.

Symbols: R rows of the step (padded), N some of them, V real vocabulary, K candidate tokens, L top log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyvllm.noise import log_exponential
from pyvllm.step import Flags, RowParam, StepView

_NEVER = float("-inf")
# Logit of a banned token. Above -inf, so that a row whose allowed tokens are all banned stays among them; so low that
# the token is never drawn beside one that is not banned.
_BANNED = torch.finfo(torch.float32).min
# CPU: a row is filtered among its most probable tokens of these numbers, then among all if they do not suffice.
_CPU_WIDTHS = (256, 4096)
_CPU_CHUNK = 2**20  # logits
_FILTERS = Flags.TOP_K | Flags.TOP_P | Flags.MIN_P


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRows:
    """Log-probabilities of N positions, natural logarithms of the model's own probabilities."""

    token_ids: Tensor
    """[N, 1 + L] int32: the token in question, then the L most probable ones in order (ties: lower id first)."""
    logprobs: Tensor
    """[N, 1 + L] float32, of those tokens."""
    ranks: Tensor
    """[N] int32: 1 + the number of tokens strictly more probable than the token in question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a step sampled, on the logits' device."""

    token_ids: Tensor
    """[R, k] int32. Beam rows: their candidates, best first. Other rows: the token, in column 0. Else 0."""
    logprobs: Tensor
    """[R, k] float32. Beam rows: the candidates' values, -inf for those that may not be chosen. Other rows: column 0
    is the token's log-probability where the row wants log-probabilities. Else 0."""
    table: LogprobRows | None
    """[R, 1 + L] for `max_logprobs` = L (at most V) if that is >= 0. Rows that want none are 0."""


def sample(logits: Tensor, step: StepView, previous_tokens: Tensor | None, *, vocab_size: int) -> Sampled:
    """Pick each row's token, or a beam row's candidates.

    `logits` [R, >= V], any float type, not changed; columns from `vocab_size` = V on are padding and never sampled nor
    counted. `previous_tokens` [R of the previous step] int32: what the plan's negative ids stand for; None if it has
    none. Rows beyond `step.num_rows` hold tokens without meaning.

    Greedy rows take the lowest id among equal logits. Beam rows (`NUM_CANDIDATES` > 1) rank log-softmax of the logits
    after bias, penalties and masks, not normalised again, as transformers does. If every allowed token of a row is
    banned too, it samples among them. If no token has a finite logit, the row gives id 0.
    """
    raw = logits[:, :vocab_size]  # made float32 where it is used: a greedy step needs no copy
    values = _transform(raw, step, previous_tokens)
    tokens = values.max(-1).indices  # the lowest id among equals, as argmax, which is slow for bfloat16
    if Flags.RANDOM in step.flags:
        _draw(values, tokens, step)
    token_ids = pad(tokens.int()[:, None], (0, step.num_candidates - 1))
    logprobs = torch.zeros(token_ids.shape, device=logits.device)
    table = None
    if step.max_logprobs >= 0:
        table = _sampled_logprobs(raw, tokens, step)
        logprobs[:, 0] = table.logprobs[:, 0]
    if Flags.BEAM in step.flags:
        _put_candidates(values, token_ids, logprobs, step)
    return Sampled(token_ids=token_ids, logprobs=logprobs, table=table)


def prompt_logprobs(logits: Tensor, targets: Tensor, max_top: int, *, vocab_size: int) -> LogprobRows:
    """Log-probabilities of prompt tokens given the text before them.

    `logits` [Q, >= V], any float type; `targets` [Q]: the token that came next; `max_top`: L (at most V).
    """
    return _logprob_rows(logits[:, :vocab_size], targets.long(), max_top)


# --- transforms of logits ---------------------------------------------------------------------------------------------


def _transform(raw: Tensor, step: StepView, previous_tokens: Tensor | None) -> Tensor:
    """Logits after all that comes before the greedy pick: [R, V] float32. `raw` itself if the step needs none of it."""
    sections = (step.bias, step.penalty_rows, step.banned, step.allowed_rows)
    if Flags.BEAM not in step.flags and not any(section.numel() for section in sections):
        return raw
    values = raw.to(torch.float32, copy=True)
    if Flags.BEAM in step.flags:
        is_beam = step.row_params[:, RowParam.NUM_CANDIDATES] > 1
        for rows in _row_chunks(is_beam, values):
            some = values[rows]
            values[rows] = torch.where(is_beam[rows, None], torch.log_softmax(some, -1), some)
    if step.bias.numel():
        row, token_id, bias_bits = step.bias.unbind(1)
        values.index_put_((row, token_id), bias_bits.contiguous().view(torch.float32), accumulate=True)
    if step.penalty_rows.numel():
        _penalise(values, step, previous_tokens)
    if step.banned.numel():
        row, token_id = step.banned.unbind(1)
        values.index_put_((row, token_id), values.new_full((), _BANNED))  # a number would wait for the device
    if step.allowed_rows.numel():
        owner = _owners(step.allowed_offsets, step.allowed_ids)
        kept = values.new_full((len(step.allowed_rows), values.shape[1]), _NEVER)
        kept[owner, step.allowed_ids] = values[step.allowed_rows[owner], step.allowed_ids]
        values[step.allowed_rows] = kept
    return values


def _penalise(values: Tensor, step: StepView, previous_tokens: Tensor | None) -> None:
    """Apply the penalties in place. The work is proportional to the tokens listed, but for zeroing counts [P, V]."""
    ids, times = step.penalty_tokens.long().unbind(1)
    if previous_tokens is not None and previous_tokens.numel():
        ids = torch.where(ids < 0, previous_tokens[(-1 - ids).clamp_min(0)], ids)
    owner = _owners(step.penalty_offsets, ids)
    # A token may be listed more than once: its counts add up, and equal values are then written for each.
    counts = values.new_zeros((len(step.penalty_rows), values.shape[1]))
    counts.index_put_((owner, ids), times.float(), accumulate=True)
    count = counts[owner, ids]
    row = step.penalty_rows[owner]
    params = step.row_params[row]
    logit = values[row, ids]
    repetition = _floats(params, RowParam.REPETITION_PENALTY)
    logit = torch.where(logit > 0, logit / repetition, logit * repetition)
    logit -= _floats(params, RowParam.FREQUENCY_PENALTY) * count
    logit -= _floats(params, RowParam.PRESENCE_PENALTY) * (count > 0)
    values[row, ids] = logit


# --- random rows ------------------------------------------------------------------------------------------------------


def _draw(values: Tensor, tokens: Tensor, step: StepView) -> None:
    """Replace the `tokens` [R] of rows with a temperature by draws from `values` [R, V]."""
    random = step.row_floats(RowParam.TEMPERATURE) > 0
    if step.flags & _FILTERS:
        top_k = step.row_params[:, RowParam.TOP_K]
        top_p, min_p = step.row_floats(RowParam.TOP_P), step.row_floats(RowParam.MIN_P)
        filtered = random & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        for rows in _row_chunks(filtered, values):
            drawn = _draw_filtered(_scaled(values, rows, step), step.row_params[rows], step.flags)
            tokens[rows] = torch.where(filtered[rows], drawn, tokens[rows])
        random &= ~filtered
    all_ids = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
    for rows in _row_chunks(random, values):
        drawn = _scores(_scaled(values, rows, step), step.row_params[rows], all_ids).argmax(-1)
        tokens[rows] = torch.where(random[rows], drawn, tokens[rows])


def _scaled(values: Tensor, rows: Tensor, step: StepView) -> Tensor:
    """(value - the row's greatest) / temperature of some rows: [N, V] float32, at most 0. A copy."""
    scaled = values.index_select(0, rows).float()
    temperature = step.row_floats(RowParam.TEMPERATURE)[rows, None]
    # The greatest value goes first, so that no temperature can overflow what may be drawn.
    scaled -= scaled.amax(-1, keepdim=True)
    scaled /= torch.where(temperature > 0, temperature, 1)
    return scaled


def _scores(scaled: Tensor, params: Tensor, ids: Tensor) -> Tensor:
    """Subtract the noise in place: the greatest score of a row is its draw. `ids` [K] or [N, K] int32."""
    return scaled.sub_(log_exponential(params[:, RowParam.NOISE_KEY_0], params[:, RowParam.NOISE_KEY_1], ids))


def _draw_filtered(scaled: Tensor, params: Tensor, flags: Flags) -> Tensor:
    """Tokens [N] drawn from `scaled` [N, V] after min_p, top_k and top_p of `params` [N, fields].

    The survivors are the first tokens in order of (value, lower id), so a row needs only as many of its best tokens as
    hold all survivors. How many that is follows from the row alone, which keeps draws independent of the batch.
    """
    vocab_size = scaled.shape[1]
    widths = [width for width in _CPU_WIDTHS if width < vocab_size] if scaled.is_cpu else []
    drawn = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    open_rows = torch.arange(len(scaled), device=scaled.device)
    for width in [*widths, vocab_size]:
        best, ids = _top(scaled, width)
        survives, complete = _survivors(best, scaled, ids, params, flags)
        scores = _scores(best.masked_fill_(~survives, _NEVER), params, ids.int())
        drawn[open_rows] = ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
        if width == vocab_size:
            break
        remaining = (~complete).nonzero().squeeze(1)
        open_rows, scaled, params = open_rows[remaining], scaled[remaining], params[remaining]
        if not len(open_rows):
            break
    return drawn


def _survivors(best: Tensor, scaled: Tensor, ids: Tensor, params: Tensor, flags: Flags) -> tuple[Tensor, Tensor]:
    """Which of the best tokens pass min_p, top_k and top_p, and for which rows the answer is right.

    `best`, `ids` [N, K]: values and ids of `_top`; `scaled` [N, V]: all values, 0 the greatest. Survivors [N, K] bool:
    of each row the first ones, at least one. [N] bool: false if tokens beyond the best K might survive too. Ties at
    the k-th value pass. Of the tokens that passed min_p and top_k, top_p keeps those with less than top_p of their
    mass before them.
    """
    top_k = params[:, RowParam.TOP_K, None].long()
    top_p, min_p = _floats(params, RowParam.TOP_P)[:, None], _floats(params, RowParam.MIN_P)[:, None]
    kth = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1)).masked_fill(top_k == 0, _NEVER)
    survives = (best > _NEVER) & (best >= min_p.log()) & (best >= kth)
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


# --- beams and log-probabilities --------------------------------------------------------------------------------------


def _put_candidates(values: Tensor, token_ids: Tensor, logprobs: Tensor, step: StepView) -> None:
    """Write the best tokens of beam rows, and their values, to the rows of `token_ids` and `logprobs` [R, k]."""
    count = step.row_params[:, RowParam.NUM_CANDIDATES, None]
    width = min(step.num_candidates, values.shape[1])
    missing = step.num_candidates - width
    column = torch.arange(step.num_candidates, device=values.device)
    wanted = (column < count) & (count > 1)
    for rows in _row_chunks(wanted[:, 0], values):
        best, ids = _top(values[rows], width)
        best = pad(best.masked_fill_(best <= _BANNED, _NEVER), (0, missing), value=_NEVER)
        token_ids[rows] = torch.where(wanted[rows], pad(ids.int(), (0, missing)), token_ids[rows])
        logprobs[rows] = torch.where(wanted[rows], best, logprobs[rows])


def _sampled_logprobs(raw: Tensor, tokens: Tensor, step: StepView) -> LogprobRows:
    """The table [R, 1 + L] of sampled `tokens` [R]."""
    shape = (len(raw), 1 + min(step.max_logprobs, raw.shape[1]))
    table = LogprobRows(
        token_ids=torch.zeros(shape, dtype=torch.int32, device=raw.device),
        logprobs=torch.zeros(shape, device=raw.device),
        ranks=torch.zeros(len(raw), dtype=torch.int32, device=raw.device),
    )
    for rows in _row_chunks(step.row_params[:, RowParam.NUM_LOGPROBS] >= 0, raw):
        some = _logprob_rows(raw[rows], tokens[rows], step.max_logprobs)
        table.token_ids[rows], table.logprobs[rows], table.ranks[rows] = some.token_ids, some.logprobs, some.ranks
    return table


def _logprob_rows(raw: Tensor, tokens: Tensor, max_top: int) -> LogprobRows:
    """Table rows of `tokens` [N] int64 under logits `raw` [N, V]."""
    logprobs = torch.log_softmax(raw, -1, dtype=torch.float32)
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(-1, dtype=torch.int32) + 1
    token_ids = tokens[:, None]
    if max_top == 0:
        return LogprobRows(token_ids=token_ids.int(), logprobs=own, ranks=ranks)
    best, ids = _top(logprobs, min(max_top, raw.shape[1]))
    token_ids = torch.cat([token_ids, ids], -1).int()
    return LogprobRows(token_ids=token_ids, logprobs=torch.cat([own, best], -1), ranks=ranks)


# --- shared -----------------------------------------------------------------------------------------------------------


def _top(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The greatest values of each row in order, ties with the lower id first: values and int64 ids, [N, width]."""
    vocab_size = values.shape[1]
    if width == vocab_size:
        ordered = torch.sort(values, dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    # topk leaves the order of ties open, so it gets unique keys: order-preserving bits of the value above those of
    # the id. Adding 0 makes -0.0 and 0.0 equal.
    bits = (values + 0.0).view(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=values.device)
    keys = torch.add(reversed_ids, bits, alpha=2**32).topk(width, dim=-1).values
    ids = vocab_size - 1 - (keys & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def _row_chunks(mask: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Indices of the rows of `values` [R, V] where `mask` [R] holds, in chunks.

    On accelerators all rows at once: counting those of the mask would wait for the device.
    """
    if mask.is_cpu:
        return torch.split(mask.nonzero().squeeze(1), max(1, _CPU_CHUNK // values.shape[1]))
    return (torch.arange(len(mask), device=mask.device),)


def _owners(offsets: Tensor, entries: Tensor) -> Tensor:
    """For each entry of a CSR list with `offsets` [P + 1], which of the P lists it belongs to."""
    lists = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(lists, offsets.diff(), output_size=len(entries))


def _floats(params: Tensor, field: RowParam) -> Tensor:
    """A float field of `row_params` rows [N, fields]: [N] float32."""
    return params.view(torch.float32)[:, field]
