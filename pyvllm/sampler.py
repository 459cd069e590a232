"""From logits to tokens and log-probabilities, for all rows of a step at once.

What each row wants travels in the plan (`rust_core/src/plan.rs`). Transforms run in float32 in this order: logit bias;
repetition, frequency and presence penalty; banned, allowed and masked tokens; greedy rows pick here; temperature;
min_p; top_k; top_p; draw. (Masks commute with what is before them here, so this equals masking first.)
Log-probabilities are those of the untouched logits, unless `LogprobsMode` says otherwise.

What comes before the pick touches the few logits that the plan lists; what reads whole rows is the kernels' work.
Nothing here waits for the device.

Symbols: R rows of the step (padded), V real vocabulary, L top log-probabilities.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyvllm.config import LogprobsMode
from pyvllm.kernels import AnyKernels, LogprobRows
from pyvllm.kernels.plain_sampling import owners
from pyvllm.processed_logits import BANNED, processed_logits
from pyvllm.step import Flags, RowParam, StepView

__all__ = ["LogprobRows", "Sampled", "prompt_logprobs", "sample"]

_NEVER = float("-inf")


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
    candidates: LogprobRows | None
    """[R * k, 1] of `token_ids`, row by row: what is told of candidates, if `logprobs` ranks them by something else."""


def sample(
    logits: Tensor,
    step: StepView,
    previous_tokens: Tensor | None,
    *,
    kernels: AnyKernels,
    vocab_size: int,
    replaced: Tensor | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> Sampled:
    """Pick each row's token, or a beam row's candidates.

    `logits` [R, >= V], any float type, not changed; columns from `vocab_size` = V on are padding and never sampled nor
    counted. `previous_tokens` [R of the previous step] int32: what the plan's negative ids stand for; None if it has
    none. `replaced` [R, V]: logits to sample from in place of the model's own. Rows beyond `step.num_rows` hold tokens
    without meaning.

    Greedy rows take the lowest id among equal logits. Beam rows (`NUM_CANDIDATES` > 1) rank log-softmax of the logits
    after bias, penalties and masks, not normalised again, as transformers does. If every allowed token of a row is
    banned too, it samples among them. If no token has a finite logit, the row gives id 0.
    """
    values = _transform(logits if replaced is None else replaced, step, previous_tokens, kernels, vocab_size)
    tokens = kernels.pick(values, step.row_params, step.flags, vocab_size)
    token_ids = pad(tokens[:, None], (0, step.num_candidates - 1))
    logprobs = torch.zeros(token_ids.shape, device=logits.device)
    table, candidates, shown = None, None, logits
    if step.max_logprobs >= 0:
        wanted = step.row_params[:, RowParam.NUM_LOGPROBS] >= 0
        if logprobs_mode.startswith("processed"):
            shown = processed_logits(values, step.row_params, step.flags, vocab_size)
        table = kernels.logprobs(shown, tokens, wanted, min(step.max_logprobs, vocab_size), vocab_size)
        logprobs[:, 0] = table.logprobs[:, 0]
        if logprobs_mode.endswith("logits"):
            table = _with_logits(table, shown, wanted)
    if Flags.BEAM in step.flags:
        token_ids, logprobs = _with_candidates(values, token_ids, logprobs, step, kernels, vocab_size)
        if table and (replaced is not None or changes_logits(step) or logprobs_mode.endswith("logits")):
            candidates = _candidate_table(shown[:, :vocab_size], token_ids, logprobs_mode)
    return Sampled(token_ids=token_ids, logprobs=logprobs, table=table, candidates=candidates)


def _with_logits(table: LogprobRows, logits: Tensor, wanted: Tensor) -> LogprobRows:
    """The table with logits in place of log-probabilities."""
    values = _values_at(logits, table.token_ids).float()
    return replace(table, logprobs=torch.where(wanted[:, None], values, 0))


def prompt_logprobs(
    logits: Tensor,
    targets: Tensor,
    max_top: int,
    *,
    kernels: AnyKernels,
    vocab_size: int,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> LogprobRows:
    """Log-probabilities of prompt tokens given the text before them.

    `logits` [Q, >= V], any float type; `targets` [Q] int32: the token that came next; `max_top`: L, cut to V.
    """
    wanted = torch.ones(len(targets), dtype=torch.bool, device=logits.device)
    table = kernels.logprobs(logits, targets, wanted, min(max_top, vocab_size), vocab_size)
    return _with_logits(table, logits, wanted) if logprobs_mode.endswith("logits") else table


# --- transforms of logits ---------------------------------------------------------------------------------------------


def changes_logits(step: StepView) -> bool:
    """Whether a row has bias, penalties or masks."""
    return step.has("bias", "penalty_rows", "banned", "allowed_rows", "mask_rows")


def _transform(
    logits: Tensor, step: StepView, previous_tokens: Tensor | None, kernels: AnyKernels, vocab_size: int
) -> Tensor:
    """Logits after all that comes before the greedy pick: [R, V] float32. `logits` if the step needs none of it."""
    if Flags.BEAM not in step.flags and not changes_logits(step):
        return logits
    values = logits[:, :vocab_size].to(torch.float32, copy=True)
    if Flags.BEAM in step.flags:
        kernels.log_softmax_(values, step.row_params[:, RowParam.NUM_CANDIDATES] > 1)
    if step.bias.numel():
        row, token_id, bias_bits = step.bias.unbind(1)
        values.index_put_((row, token_id), bias_bits.contiguous().view(torch.float32), accumulate=True)
    if step.penalty_rows.numel():
        kernels.penalise_(values, step, previous_tokens)
    if step.banned.numel():
        row, token_id = step.banned.unbind(1)
        values.index_put_((row, token_id), values.new_full((), BANNED))  # a number would wait for the device
    if step.allowed_rows.numel():
        owner = owners(step.allowed_offsets, step.allowed_ids)
        kept = values.new_full((len(step.allowed_rows), values.shape[1]), _NEVER)
        # Above what may not be: also a token that a processor forbids is taken before one that is not allowed.
        kept[owner, step.allowed_ids] = values[step.allowed_rows[owner], step.allowed_ids].clamp_min(BANNED)
        values[step.allowed_rows] = kept
    if step.mask_rows.numel():
        _mask(values, step)
    return values


def _mask(values: Tensor, step: StepView) -> None:
    """Leave masked rows of `values` [R, V] only the tokens whose bits are set, in place."""
    octets = step.mask_words.view(torch.uint8).int()
    # Eight tokens at once, and one addition: 0 for those that may follow, -inf for the others.
    added = _octet_table(values.device).index_select(0, octets).view(len(step.mask_rows), -1)
    values.index_add_(0, step.mask_rows, added[:, : values.shape[1]])


@functools.cache
def _octet_table(device: torch.device) -> Tensor:
    """For each byte what its bits, from the lowest on, add to the logits of eight tokens: [256, 8] float32."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bits == 0, _NEVER)


# --- beams ------------------------------------------------------------------------------------------------------------


def _with_candidates(
    values: Tensor, token_ids: Tensor, logprobs: Tensor, step: StepView, kernels: AnyKernels, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """`token_ids` and `logprobs` [R, k] with the best tokens of beam rows, and their values, in their place."""
    count = step.row_params[:, RowParam.NUM_CANDIDATES, None]
    width = min(step.num_candidates, vocab_size)
    best, ids = kernels.best(values, width, count[:, 0] > 1, vocab_size)
    missing = (0, step.num_candidates - width)
    best, ids = pad(best.masked_fill(best <= BANNED, _NEVER), missing, value=_NEVER), pad(ids, missing)
    column = torch.arange(step.num_candidates, device=values.device)
    wanted = (column < count) & (count > 1)
    return torch.where(wanted, ids, token_ids), torch.where(wanted, best, logprobs)


def _candidate_table(logits: Tensor, token_ids: Tensor, logprobs_mode: LogprobsMode) -> LogprobRows:
    """The log-probabilities, or logits, and ranks of `token_ids` [R, k] under `logits` [R, V]: [R * k, 1]."""
    own = torch.log_softmax(logits, -1, dtype=torch.float32)
    chosen = _values_at(own, token_ids)
    # One pass over the rows for each candidate: sorting them would take many times their memory.
    num_better = torch.stack([(own > value[:, None]).sum(1, dtype=torch.int32) for value in chosen.unbind(1)], 1)
    values = _values_at(logits, token_ids).float() if logprobs_mode.endswith("logits") else chosen
    return LogprobRows(
        token_ids=token_ids.reshape(-1, 1), logprobs=values.reshape(-1, 1), ranks=1 + num_better.reshape(-1)
    )


def _values_at(rows: Tensor, token_ids: Tensor) -> Tensor:
    """`rows` [R, >= V] at `token_ids` [R, k] int32: [R, k]."""
    # Where kernels are only compiled (`Kernels.compile_ahead`) ids are what memory held, and one index out of range
    # would be the end of the device for this process.
    return rows.gather(1, token_ids.long().clamp(0, rows.shape[1] - 1))
