"""Log-probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyvllm import _core
from pyvllm.tokenizer import Tokenizer

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON has not."""


@dataclass(frozen=True, kw_only=True)
class TokenTexts:
    """How tokens are written."""

    tokenizer: Tokenizer | None
    as_ids: bool
    """As token_id:N, which tells apart tokens of equal text."""

    def text(self, token_id: int) -> str:
        """A token alone. Without a tokenizer there are only ids."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def length(self, token_id: int) -> int:
        """Characters of its text, however it is written."""
        return 0 if self.tokenizer is None else len(self.tokenizer.token_text(token_id))

    def bytes(self, token_id: int) -> list[int] | None:
        """What it adds to the text."""
        return None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))


def _rows(table: _core.LogprobTable) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of each position: the token in question, then the best ones."""
    values = [[max(value, MIN_LOGPROB) for value in row] for row in table.logprobs.tolist()]
    return list(zip(table.token_ids.tolist(), values, strict=True))


@dataclass(kw_only=True)
class CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions, piece by piece."""

    texts: TokenTexts
    offset: int
    """Characters of prompt and output before the next token."""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add_first(self, token_id: int) -> None:
        """The first token of a prompt, before which there is nothing to be probable after."""
        self._add(token_id, None, None)

    def add(self, table: _core.LogprobTable, rows: int | None = None) -> None:
        """The tokens of a table, at most `rows`."""
        for ids, values in _rows(table)[:rows]:
            top: dict[str, float] = {}
            for token_id, value in zip(ids, values, strict=True):
                top.setdefault(self.texts.text(token_id), value)
            self._add(ids[0], values[0], top)

    def _add(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        self.tokens.append(self.texts.text(token_id))
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self.offset)
        self.offset += self.texts.length(token_id)

    def take(self) -> dict[str, Any]:
        """What was added since the last time."""
        found = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return found


def chat_logprobs(table: _core.LogprobTable, rows: int, texts: TokenTexts) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: the first `rows` tokens of a table."""
    return {"content": [_chat_entry(ids, values, texts) for ids, values in _rows(table)[:rows]]}


def _chat_entry(ids: Sequence[int], values: Sequence[float], texts: TokenTexts) -> dict[str, Any]:
    entries = [
        {"token": texts.text(token_id), "logprob": value, "bytes": texts.bytes(token_id)}
        for token_id, value in zip(ids, values, strict=True)
    ]
    return {**entries[0], "top_logprobs": entries[1:]}


def shown_tokens(completion: _core.Completion, *, include_stop: bool) -> int:
    """How many of a completion's tokens have a part in a chat's text: the one that ended it has none."""
    count = len(completion.token_ids)
    ended_by_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    return count - 1 if ended_by_token and not include_stop and count else count


def prompt_logprobs(table: _core.LogprobTable, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: for each token of the prompt, id -> log-probability, rank and text; null for the first."""
    found: list[dict[str, Any] | None] = [None]
    for (ids, values), rank in zip(_rows(table), table.ranks.tolist(), strict=True):
        entry: dict[str, Any] = {}
        for place, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            shown = {"logprob": value, "rank": place or rank, "decoded_token": texts.text(token_id)}
            entry.setdefault(str(token_id), shown)
        found.append(entry)
    return found
