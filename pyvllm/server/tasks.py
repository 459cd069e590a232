"""What completions and chats have in common: from a request to its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pyvllm import _core
from pyvllm.sampling_params import ParameterError, RequestOutputKind, SamplingParams
from pyvllm.server.errors import as_api_error, bad_request
from pyvllm.server.forms import asked_form, form_fields
from pyvllm.server.generation import Job, last_outputs, submitted, while_connected
from pyvllm.server.logprobs import TokenTexts
from pyvllm.server.parsing import make_params, parse_body, read_json
from pyvllm.server.prompts import ReadyPrompt, truncated
from pyvllm.server.protocol import GenerationBody
from pyvllm.server.serving import Notes, Serving, notes_of
from pyvllm.server.sse import ChunkShape, ChunkWriter, Extras, Opening, ScoreWriter, StreamPlan, error_events
from pyvllm.server.streaming import StreamedAnswer
from pyvllm.server.usage import usage_object

JSON_TYPE: Final = "application/json"
CLIENT_GONE: Final = 499
"""Status for the log when nobody is left to read the answer."""

B = TypeVar("B", bound=GenerationBody)


class Task(ABC, Generic[B]):
    """One request, understood and checked."""

    id_prefix: ClassVar[str]
    shape: ClassVar[ChunkShape]
    scores_only = False
    """Nothing was to be generated: the one token that an engine makes at least is left out."""

    def __init__(self, serving: Serving, body: B, model: str, job: Job) -> None:
        """`model`: the name to answer with."""
        self.serving, self.body, self.model, self.job = serving, body, model, job
        self.id: Final = self.id_prefix + job.notes.request_id
        as_ids = body.return_tokens_as_token_ids
        self.texts: Final = TokenTexts(
            tokenizer=serving.llm.tokenizer,
            as_ids=serving.args.return_tokens_as_token_ids if as_ids is None else as_ids,
        )

    @abstractmethod
    def whole(self, outputs: Sequence[_core.Output]) -> dict[str, Any]:
        """The answer, at once. `outputs`: one for each prompt."""

    @abstractmethod
    def opening(self, writer: ChunkWriter) -> Opening | None:
        """What comes before the text of each choice of a stream."""

    @abstractmethod
    def extras(self) -> Extras | None:
        """What comes beside the text of each chunk."""

    def writer(self) -> ChunkWriter:
        """Of the request's stream."""
        options, args = self.body.stream_options, self.serving.args
        plan = StreamPlan(
            shape=self.shape,
            id=self.id,
            created=self.serving.now(),
            model=self.model,
            n=self.job.params.n,
            prompt_tokens=self.job.num_prompt_tokens,
            include_usage=args.enable_force_include_usage or (options is not None and options.include_usage),
            continuous_usage=options is not None and options.continuous_usage_stats,
            cached_details=args.enable_prompt_tokens_details,
            extras=self.extras(),
        )
        kind = ScoreWriter if self.scores_only else ChunkWriter
        writer = kind(plan=plan, metrics=self.serving.metrics.requests)
        writer.opening = self.opening(writer)
        return writer

    def frame(self, kind: str, choices: list[dict[str, Any]], outputs: Sequence[_core.Output]) -> dict[str, Any]:
        """An answer around its choices."""
        tokens = sum(self.num_tokens(completion) for output in outputs for completion in output.completions)
        cached = sum(output.num_cached_tokens for output in outputs)
        details = cached if self.serving.args.enable_prompt_tokens_details else None
        return {
            "id": self.id,
            "object": kind,
            "created": self.serving.now(),
            "model": self.model,
            "choices": choices,
            "usage": usage_object(self.job.num_prompt_tokens, tokens, details),
        }

    def num_tokens(self, completion: _core.Completion) -> int:
        """Generated tokens that the answer has."""
        return 0 if self.scores_only else len(completion.token_ids)


class TextRoute(ABC, Generic[B]):
    """A route that answers with text."""

    body_type: ClassVar[type[GenerationBody]]

    def __init__(self, serving: Serving) -> None:
        """What all routes share."""
        self.serving = serving

    @abstractmethod
    async def prepare(self, body: Any, model: str, notes: Notes) -> Task[B]:
        """Understand a body. Raises `ApiError` or `ParameterError` naming what is wrong."""

    @abstractmethod
    def renamed(self, body: Any) -> Mapping[str, str]:
        """Sampling parameters that have another name in this body -> that."""

    def all_renamed(self, body: GenerationBody) -> Mapping[str, str]:
        """And what the form of the text is asked for by."""
        (form, *_) = form_fields(body) or ["structured_outputs"]
        return {**self.renamed(body), "structured_outputs": form}

    def fitted(
        self, prompt: ReadyPrompt, body: GenerationBody, params: SamplingParams, wanted: int | None
    ) -> ReadyPrompt:
        """The prompt, truncated if that is asked for.

        `wanted`: the max_tokens that the request itself has; a default gives way to the context's length. Raises
        `ApiError` if the prompt leaves less room.
        """
        length = self.serving.llm.info.max_model_len
        prompt = truncated(prompt, self.serving.llm.prompt_limit(params))
        size = len(prompt.token_ids) or 1
        if wanted is not None and 0 < length - size < wanted:
            name = self.renamed(body).get("max_tokens", "max_tokens")
            room = f"{length - size} (max_model_len {length} less {size} prompt tokens)"
            raise bad_request(name, f"{name} must be at most {room}, got {wanted}")
        return prompt

    async def create(self, request: Request) -> Response:
        """Answer a request."""
        return await self.answer(request, await read_json(request, self.serving.args.max_body_bytes))

    async def answer(self, request: Request, found: Mapping[str, Any]) -> Response:
        """Answer a request whose JSON was read."""
        serving, notes = self.serving, notes_of(request)
        body, headers = parse_body(self.body_type, found, serving.args.unknown_fields)
        if body.request_id is not None:
            notes.request_id = body.request_id
        model = serving.check_model(body.model)
        check_options(body)
        try:
            task = await self.prepare(body, model, notes)
        except ParameterError as error:
            raise as_api_error(error, self.all_renamed(body)) from None
        if body.stream:
            return StreamedAnswer(serving, task.job, task.writer(), on_error=error_events, headers=headers)
        try:
            outputs = await while_connected(serving, request.receive, self._outputs(task.job))
        except ClientDisconnect:
            notes.client_gone = True
            return Response(status_code=CLIENT_GONE)
        except ParameterError as error:  # of a grammar that turned out to be none
            raise as_api_error(error, task.job.renamed) from None
        answer = task.whole(outputs)
        notes.output_tokens = answer["usage"]["completion_tokens"]
        notes.finish_reasons = [choice["finish_reason"] for choice in answer["choices"]]
        return Response(orjson.dumps(answer), media_type=JSON_TYPE, headers=headers)

    async def _outputs(self, job: Job) -> list[_core.Output]:
        with submitted(self.serving, job) as streams:
            outputs = await last_outputs(streams)
        for output, prompt in zip(outputs, job.prompts, strict=True):
            self.serving.metrics.requests.finish_whole(output, job.params, len(prompt.token_ids))
        return outputs


def check_options(body: GenerationBody) -> None:
    """What can be said against a body's fields without their values' meaning. Raises `ApiError`."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options must only be given with stream")


def sampling(serving: Serving, body: GenerationBody, given: dict[str, Any], **fixed: Any) -> SamplingParams:
    """Parameters of a request, with the model's defaults under what was given.

    Raises `ParameterError`, or `ApiError` for forms of the text that do not go together.
    """
    fixed["structured_outputs"] = asked_form(body, given)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return make_params(serving.default_entries, given, output_kind=kind, **fixed)


def check_prompt_logprobs(body: GenerationBody, given: Mapping[str, Any]) -> None:
    """Raise `ApiError` if they are asked for in a stream, which has no place for them."""
    if body.stream and "prompt_logprobs" in given:
        raise bad_request("prompt_logprobs", "prompt_logprobs must not be given with stream")
