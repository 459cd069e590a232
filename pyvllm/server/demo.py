"""The demo server: one route, POST /generate, as the first releases of vLLM had it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyvllm import _core
from pyvllm.sampling_params import ParameterError, RequestOutputKind
from pyvllm.server.app import HEALTH, Route, make_app
from pyvllm.server.errors import ApiError, as_api_error
from pyvllm.server.generation import Job, last_outputs, submitted, while_connected
from pyvllm.server.parsing import given_sampling, make_params, parse_body, read_json
from pyvllm.server.prompts import ReadyPrompt, parse_prompts
from pyvllm.server.protocol import GenerateRequest
from pyvllm.server.routes import Routes
from pyvllm.server.serving import Serving, notes_of
from pyvllm.server.streaming import StreamedAnswer
from pyvllm.server.tasks import CLIENT_GONE, JSON_TYPE

Delimiter = Literal["newline", "nul"]
DELIMITERS: Final[dict[Delimiter, bytes]] = {"newline": b"\n", "nul": b"\0"}
"""What ends each JSON object of a stream: NUL in the oldest releases, a line break in later ones."""


def build_demo_app(serving: Serving, delimiter: Delimiter) -> ASGIApp:
    """The application of the demo server."""
    demo, about = Demo(serving, DELIMITERS[delimiter]), Routes(serving)
    routes = [
        Route(path=HEALTH, method="GET", endpoint=about.health),
        Route(path="/generate", method="POST", endpoint=demo.generate, body=GenerateRequest),
    ]
    return make_app(serving, routes, {})


class Texts:
    """All texts so far, one for each sequence, with the prompt before them."""

    def __init__(self, prompt: str, n: int, delimiter: bytes) -> None:
        """`n`: sequences."""
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []
        self._prompt = prompt
        self._texts = [prompt] * n
        self._tokens = [0] * n
        self._delimiter = delimiter

    def write(self, prompt: int, output: _core.Output) -> bytes:
        """One object with all that there is; outputs have all text so far."""
        for completion in output.completions:
            self._texts[completion.index] = self._prompt + completion.text
            self._tokens[completion.index] = len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)
        self.completion_tokens = sum(self._tokens)
        return orjson.dumps({"text": self._texts}) + self._delimiter

    def tokens_of(self, prompt: int) -> Sequence[int]:
        """Generated tokens of each sequence."""
        return self._tokens

    def end(self) -> bytes:
        """Nothing: the connection's end is the stream's."""
        return b""


class Demo:
    """POST /generate."""

    def __init__(self, serving: Serving, delimiter: bytes) -> None:
        """What all routes share."""
        self._serving = serving
        self._delimiter = delimiter

    async def generate(self, request: Request) -> Response:
        """The prompt with what follows it, for each sequence; with stream, all so far after each step."""
        serving, notes = self._serving, notes_of(request)
        # Programs of that time sent no content type, or curl's own.
        found = await read_json(request, serving.args.max_body_bytes, any_type=True)
        body, headers = parse_body(GenerateRequest, found, serving.args.unknown_fields)
        kind = RequestOutputKind.CUMULATIVE if body.stream else RequestOutputKind.FINAL_ONLY
        try:
            given = given_sampling(body, serving.processors)
            params = make_params(serving.default_entries, given, output_kind=kind)
            parsed = parse_prompts(body.prompt, None, 1)
            ids = await serving.llm.encode(parsed)
        except ParameterError as error:
            raise as_api_error(error) from None
        prompts = [ReadyPrompt(parsed=one, token_ids=tokens) for one, tokens in zip(parsed, ids, strict=True)]
        job = Job(prompts=prompts, params=params, priority=0, renamed={"prompt_token_ids": "prompt"}, notes=notes)
        texts = Texts(body.prompt, params.n, self._delimiter)
        if body.stream:
            media_type = "application/x-ndjson" if self._delimiter == b"\n" else "application/octet-stream"
            return StreamedAnswer(
                serving, job, texts, media_type=media_type, on_error=self._error_object, headers=headers
            )
        try:
            output = await while_connected(serving, request.receive, self._output(job))
        except ClientDisconnect:
            notes.client_gone = True
            return Response(status_code=CLIENT_GONE)
        answer = texts.write(0, output).removesuffix(self._delimiter)
        notes.output_tokens, notes.finish_reasons = texts.completion_tokens, texts.finish_reasons
        return Response(answer, media_type=JSON_TYPE, headers=headers)

    async def _output(self, job: Job) -> _core.Output:
        with submitted(self._serving, job) as streams:
            (output,) = await last_outputs(streams)
        self._serving.metrics.requests.finish_whole(output, job.params, job.num_prompt_tokens)
        return output

    def _error_object(self, error: ApiError) -> bytes:
        return error.body() + self._delimiter
