"""A client that times streamed answers of an OpenAI-compatible server."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pyvllm.bench.workloads import Request

if TYPE_CHECKING:
    import aiohttp

_ERROR_LENGTH: Final = 300


@dataclass(kw_only=True)
class Answer:
    """What became of a request. Times are seconds of one clock, which started at 0."""

    input_tokens: int
    """Of the prompt, by the server's count if it tells."""
    wanted_tokens: int
    """To generate."""
    sent: float
    output_tokens: int = 0
    """Generated."""
    pieces: list[float] = field(default_factory=list)
    """When each piece of text came; empty if none did."""
    error: str | None = None
    """What failed."""

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the last piece."""
        return self.pieces[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each token but the first; None if there is no other."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in itertools.pairwise(self.pieces)]


@dataclass(frozen=True, kw_only=True)
class Client:
    """Sends requests of one kind to one server."""

    session: aiohttp.ClientSession
    url: str
    """Of the server, without a slash at the end."""
    endpoint: str
    """/v1/completions or /v1/chat/completions."""
    model: str
    temperature: float
    ignore_eos: bool
    now: Callable[[], float]
    """The clock."""

    async def body(self, request: Request) -> bytes:
        """A request as the server reads it. For chat the server itself turns the tokens into text."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.endpoint == "/v1/completions":
            fields["prompt"] = request.prompt
        else:
            text = await self._detokenize(request.prompt)
            fields["messages"] = [{"role": "user", "content": text}]
        return json.dumps(fields).encode()

    async def _detokenize(self, token_ids: list[int]) -> str:
        body = {"model": self.model, "tokens": token_ids}
        async with self.session.post(f"{self.url}/detokenize", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"POST {self.url}/detokenize, for prompts as text: {await _error_text(response)}")
            return str((await response.json())["prompt"])

    async def send(self, request: Request, body: bytes) -> Answer:
        """Send a request and time its answer. Errors are told in the answer."""
        import aiohttp

        answer = Answer(input_tokens=len(request.prompt), wanted_tokens=request.output_len, sent=self.now())
        headers = {"Content-Type": "application/json"}
        try:
            async with self.session.post(f"{self.url}{self.endpoint}", data=body, headers=headers) as response:
                if response.status != 200:
                    answer.error = await _error_text(response)
                else:
                    await self._read(response, answer)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if answer.error is None and not answer.pieces:
            answer.error = "the answer has no text"
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        """Note when pieces come. Only what is needed of them is parsed, to keep up with a fast server."""
        last = b""
        ended = False
        async for event in _events(response):
            if event == b"[DONE]":
                ended = True
            elif event.startswith(b'{"error"'):
                answer.error = event[:_ERROR_LENGTH].decode(errors="replace")
                return
            elif answer.pieces or _has_content(json.loads(event)):
                # The last one has the counts and no text.
                answer.pieces.append(self.now())
                last = event
        usage = (json.loads(last) if last else {}).get("usage")
        if usage:
            answer.pieces.pop()
            answer.input_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        else:
            answer.output_tokens = len(answer.pieces)
        if not ended:
            answer.error = "the answer ended before its end"


def _has_content(event: dict[str, Any]) -> bool:
    """Whether a piece is of generated text; a chat's first only says who speaks."""
    return any(
        choice["delta"].get("content") or choice.get("finish_reason") if "delta" in choice else True
        for choice in event["choices"]
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events, as they come."""
    rest = b""
    async for received in response.content.iter_any():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _error_text(response: aiohttp.ClientResponse) -> str:
    text = " ".join((await response.text(errors="replace")).split())
    return f"HTTP {response.status}: {text[:_ERROR_LENGTH]}"
