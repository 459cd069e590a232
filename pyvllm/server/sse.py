"""Server-sent events, made of bytes that are the same for all chunks of a request and the new text between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from pyvllm import _core
from pyvllm.server.errors import ApiError
from pyvllm.server.metrics import RequestMetrics
from pyvllm.server.usage import usage_object

DONE: Final = b"data: [DONE]\n\n"

Extras = Callable[[int, _core.Completion], bytes]
"""Number of a choice and what is new of it -> further JSON fields for its chunk, each after a comma."""
Opening = Callable[[int, _core.Output], bytes]
"""Number of a choice and its first output -> events that come before its text."""


def error_events(error: ApiError) -> bytes:
    """The end of a stream that failed."""
    return b"data: " + error.body() + b"\n\n" + DONE


@dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """How the chunks of one of the two APIs look."""

    object: str
    """Value of `object`."""
    before_text: bytes
    """After a choice's index and before its text."""
    after_text: bytes
    """After the text."""
    no_text: bytes
    """In place of all three in a choice's last chunk."""
    no_extras: bytes
    """Fields that a chunk without extras has."""


COMPLETION_SHAPE: Final = ChunkShape(
    object="text_completion",
    before_text=b',"text":',
    after_text=b"",
    no_text=b',"text":""',
    no_extras=b',"logprobs":null',
)
CHAT_SHAPE: Final = ChunkShape(
    object="chat.completion.chunk",
    before_text=b',"delta":{"content":',
    after_text=b"}",
    no_text=b',"delta":{}',
    no_extras=b"",
)


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """What a stream is to hold."""

    shape: ChunkShape
    id: str
    created: int
    model: str
    n: int
    """Choices for each prompt."""
    prompt_tokens: int
    """Of all prompts."""
    include_usage: bool
    continuous_usage: bool
    cached_details: bool
    """Whether usage says how many prompt tokens were cached."""
    extras: Extras | None = None


@dataclass(kw_only=True)
class _Choice:
    """What is known of one choice."""

    start: bytes
    """Its chunks up to the text."""
    tokens: int = 0


@dataclass(kw_only=True)
class ChunkWriter:
    """Writes the events of one request. Costs the same for each token, however many there were before."""

    plan: StreamPlan
    metrics: RequestMetrics
    opening: Opening | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _last_times: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make what does not change."""
        plan, shape = self.plan, self.plan.shape
        names = {"id": plan.id, "object": shape.object, "created": plan.created, "model": plan.model}
        self._head = b"data: " + orjson.dumps(names)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if plan.include_usage else b"]}\n\n"
        self._end = shape.after_text + shape.no_extras + b',"finish_reason":null}' + self._tail
        # Nothing but the text differs between chunks.
        self._plain = plan.extras is None and not plan.continuous_usage

    def write(self, prompt: int, output: _core.Output) -> bytes:
        """The events for what came of one prompt. Empty if there is nothing to say yet."""
        parts: list[bytes] = []
        longest = 0
        for completion in output.completions:
            index = prompt * self.plan.n + completion.index
            choice = self._choices.get(index) or self._open(index, output, parts)
            tokens = len(completion.token_ids)
            if tokens > longest:
                longest = tokens
            choice.tokens += tokens
            self.completion_tokens += tokens
            text = completion.text
            if not self._plain:
                self._add_piece(index, choice, completion, text, parts)
            elif text:
                parts += (choice.start, orjson.dumps(text), self._end)
            reason = completion.finish_reason
            if reason is not None:
                self.finish_reasons.append(reason)
                parts.append(self._finish(index, reason, completion.stop_reason))
        self._observe(prompt, output, longest)
        return b"".join(parts)

    def _observe(self, prompt: int, output: _core.Output, tokens: int) -> None:
        """`tokens`: of the choice that has most new ones."""
        now = output.last_token_ts
        before = self._last_times.get(prompt)
        if before is None:
            self.cached_tokens += output.num_cached_tokens
            before, tokens = output.first_token_ts, tokens - 1
        if tokens > 0:
            self.metrics.inter_token.observe_many((now - before) / tokens, tokens)
        self._last_times[prompt] = now

    def _open(self, index: int, output: _core.Output, parts: list[bytes]) -> _Choice:
        start = self._head + b'{"index":%d' % index + self.plan.shape.before_text
        choice = self._choices[index] = _Choice(start=start)
        if self.opening is not None:
            parts.append(self.opening(index, output))
        return choice

    def _add_piece(
        self, index: int, choice: _Choice, completion: _core.Completion, text: str, parts: list[bytes]
    ) -> None:
        """A chunk that has more than its text, if there is anything to say."""
        shape, extras = self.plan.shape, self.plan.extras
        more = shape.no_extras if extras is None or not completion.token_ids else extras(index, completion)
        if text or more != shape.no_extras:
            ended = b',"finish_reason":null}'
            parts += (choice.start, orjson.dumps(text), shape.after_text, more, ended, self._close())

    def _finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        shape = self.plan.shape
        ended = b',"finish_reason":"%s","stop_reason":%s}' % (reason.encode(), orjson.dumps(stop_reason))
        return self._head + b'{"index":%d' % index + shape.no_text + shape.no_extras + ended + self._close()

    def _close(self) -> bytes:
        """The end of a chunk after its choices."""
        if not self.plan.continuous_usage:
            return self._tail
        return b'],"usage":%s}\n\n' % orjson.dumps(self._usage())

    def chunk(self, choice: dict[str, Any], **top: Any) -> bytes:
        """Any other chunk with one choice. `top`: further fields of the chunk itself."""
        fields = b"".join(b',"%s":%s' % (name.encode(), orjson.dumps(value)) for name, value in top.items())
        closed = self._close()
        return self._head + orjson.dumps(choice) + b"]" + fields + closed[1:]

    def end(self) -> bytes:
        """The end of the stream."""
        if not self.plan.include_usage:
            return DONE
        return self._head + b'],"usage":%s}\n\n' % orjson.dumps(self._usage()) + DONE

    def tokens_of(self, prompt: int) -> list[int]:
        """Generated tokens of each choice of a prompt."""
        first = prompt * self.plan.n
        return [self._choices[i].tokens for i in range(first, first + self.plan.n) if i in self._choices]

    def _usage(self) -> dict[str, Any]:
        cached = self.cached_tokens if self.plan.cached_details else None
        return usage_object(self.plan.prompt_tokens, self.completion_tokens, cached)


class ScoreWriter(ChunkWriter):
    """Writes the events of a request that only has its prompt scored: what is generated is left out."""

    def write(self, prompt: int, output: _core.Output) -> bytes:
        """What comes before the text of each choice, and its end."""
        parts: list[bytes] = []
        for completion in output.completions:
            index = prompt * self.plan.n + completion.index
            if index not in self._choices:
                self._open(index, output, parts)
            if completion.finish_reason is not None:
                self.finish_reasons.append("length")
                parts.append(self._finish(index, "length", None))
        self._observe(prompt, output, 0)
        return b"".join(parts)
