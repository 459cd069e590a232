"""Answers that are sent piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyvllm import _core
from pyvllm.server.errors import ApiError, as_api_error
from pyvllm.server.generation import Job, merged, submitted, while_connected
from pyvllm.server.serving import SEND_KEY, Serving

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"


class Writer(Protocol):
    """Makes the bytes of a stream."""

    completion_tokens: int
    finish_reasons: list[str]

    def write(self, prompt: int, output: _core.Output) -> bytes:
        """What came of one prompt."""

    def tokens_of(self, prompt: int) -> Sequence[int]:
        """Generated tokens of each choice of a prompt."""

    def end(self) -> bytes:
        """The end of the stream."""


class StreamedAnswer(Response):
    """Sends what a writer makes of a job's outputs; all that came of one prompt in a step goes out at once.

    The request is submitted before the answer begins, so that what the engine refuses has a status of its own.
    """

    def __init__(
        self,
        serving: Serving,
        job: Job,
        writer: Writer,
        *,
        media_type: str = EVENT_STREAM,
        on_error: Callable[[ApiError], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`on_error`: the end of a stream that failed."""
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self._serving, self._job, self._writer, self._on_error = serving, job, writer, on_error
        # Proxies must not hold chunks back.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Without a length, which is not known."""
        given = {"content-type": str(self.media_type), **(headers or {})}
        self.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in given.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer, as ASGI has it."""
        notes, writer = self._job.notes, self._writer
        self._started = False
        try:
            # The layers between pass the pieces of a body on as they are, which for each token costs more than it does.
            work = self._send_all(send, scope.get(SEND_KEY, send))
            await while_connected(self._serving, receive, work)
        except ClientDisconnect:
            notes.client_gone = True
        except Exception as error:
            failure = as_api_error(error, self._job.renamed)
            if not self._started:
                raise failure from error
            await send({"type": "http.response.body", "body": self._on_error(failure), "more_body": False})
            notes.finish_reasons = ["error"]
        notes.output_tokens = writer.completion_tokens
        notes.finish_reasons = notes.finish_reasons or writer.finish_reasons

    async def _send_all(self, send_head: Send, send: Send) -> None:
        writer, job = self._writer, self._job
        with submitted(self._serving, job) as streams:
            await send_head({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._started = True
            async for prompt, output in merged(streams):
                if data := writer.write(prompt, output):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if output.finished:
                    job.notes.finished_prompts += 1
                    size = len(job.prompts[prompt].token_ids)
                    self._serving.metrics.requests.finish(output, job.params, size, writer.tokens_of(prompt))
        await send({"type": "http.response.body", "body": writer.end(), "more_body": False})
