"""Answers to one body, whole and streamed, brought to one shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.server.conftest import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(kw_only=True)
class Choice:
    """One choice, with all that came of it."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[str, list[Any]] | None = None
    token_ids: list[int] | None = None

    @property
    def ending(self) -> tuple[str, str | None, int | str | None]:
        """Text, `finish_reason` and `stop_reason`."""
        return self.text, self.finish_reason, self.stop_reason


@dataclass(kw_only=True)
class Answer:
    """All choices, by index, and the cost."""

    choices: list[Choice] = field(default_factory=list)
    completion_tokens: int = -1

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]


def body_of(path: str, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    """A request with that prompt, which is a lone message for chats."""
    begin = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    return begin | fields


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE], and have it once."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert text.count("data: [DONE]") == 1
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def streamed(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks_of(response.text)


def whole(server: Served, path: str, body: dict[str, Any]) -> Answer:
    """The answer at once."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return joined([response.json()])


def stream(server: Served, path: str, body: dict[str, Any]) -> Answer:
    """The same from the pieces of a stream."""
    return joined(streamed(server, path, body | {"stream_options": {"include_usage": True}}))


def both(server: Served, path: str, body: dict[str, Any]) -> list[Answer]:
    """An answer at once, and one from pieces."""
    return [whole(server, path, body), stream(server, path, body)]


def joined(chunks: Sequence[dict[str, Any]]) -> Answer:
    """What chunks, or a whole answer alone, say of each choice."""
    found: dict[int, Choice] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        known = found.setdefault(choice["index"], Choice())
        # Nothing may come after the end of a choice.
        assert known.finish_reason is None
        message = choice.get("message") or choice.get("delta") or {}
        known.text += choice.get("text") or message.get("content") or ""
        known.finish_reason, known.stop_reason = choice["finish_reason"], choice.get("stop_reason")
        for name, values in (choice.get("logprobs") or {}).items():
            known.logprobs = known.logprobs or {}
            known.logprobs[name] = known.logprobs.get(name, []) + values
        if "token_ids" in choice:
            known.token_ids = (known.token_ids or []) + choice["token_ids"]
    assert sorted(found) == list(range(len(found)))
    usage = chunks[-1].get("usage") or {}
    return Answer(choices=[found[i] for i in range(len(found))], completion_tokens=usage.get("completion_tokens", -1))
