"""Log-probabilities as users see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pyvllm import _core


@dataclass(kw_only=True, slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    """Natural logarithm of the probability; -inf if the token cannot be drawn."""
    rank: int | None = None
    """Place among all tokens, from 1."""
    decoded_token: str | None = None
    """Its text alone. None without a tokenizer."""


LogprobDict: TypeAlias = dict[int, Logprob]

TokenText: TypeAlias = Callable[[int], str]
"""Token id -> its text alone."""


def logprob_dicts(table: _core.LogprobTable, token_text: TokenText | None) -> list[LogprobDict]:
    """Each row of a table as id -> `Logprob`: the token in question first, then the best ones in order."""
    rows = zip(table.token_ids.tolist(), table.logprobs.tolist(), table.ranks.tolist(), strict=True)
    return [_logprob_dict(ids, values, rank, token_text) for ids, values, rank in rows]


def _logprob_dict(ids: list[int], values: list[float], rank: int, token_text: TokenText | None) -> LogprobDict:
    entries: LogprobDict = {}
    for place, (token_id, value) in enumerate(zip(ids, values, strict=True)):
        if token_id not in entries:
            text = token_text(token_id) if token_text else None
            entries[token_id] = Logprob(logprob=value, rank=place or rank, decoded_token=text)
    return entries
