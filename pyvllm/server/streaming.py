"""Answers that are sent piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyvllm import _core
from pyvllm.server.errors import ApiError, as_api_error
from pyvllm.server.generation import Job, submitted, while_connected
from pyvllm.server.pump import Pump, open_pipe
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
            # The layers between pass the pieces of a body on as they are, at a cost for each token.
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

    async def _send_all(self, send: Send, server_send: Send) -> None:
        """`send` begins the answer; its pieces go through `server_send`."""
        with submitted(self._serving, self._job) as streams:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._started = True
            await Pump(streams, open_pipe(server_send), self._writer.write, self._finish).run()
        await server_send({"type": "http.response.body", "body": self._writer.end(), "more_body": False})

    def _finish(self, prompt: int, output: _core.Output) -> None:
        job = self._job
        job.notes.finished_prompts += 1
        size, counts = len(job.prompts[prompt].token_ids), self._writer.tokens_of(prompt)
        self._serving.metrics.requests.finish(output, job.params, size, counts)
