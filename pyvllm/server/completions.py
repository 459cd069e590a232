"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pyvllm import _core
from pyvllm.inputs import ParsedPrompt
from pyvllm.server.generation import Job
from pyvllm.server.logprobs import CompletionLogprobs, prompt_logprobs
from pyvllm.server.parsing import given_sampling
from pyvllm.server.prompts import (
    ReadyPrompt,
    encode_with_gap,
    encode_without_additions,
    parse_prompts,
)
from pyvllm.server.protocol import CompletionBody, CompletionRequest
from pyvllm.server.serving import Notes, Serving
from pyvllm.server.sse import COMPLETION_SHAPE, ChunkWriter, Extras, Opening
from pyvllm.server.tasks import Task, TextRoute, check_prompt_logprobs, sampling


class CompletionTask(Task[CompletionBody]):
    """A completion, understood and checked."""

    id_prefix = "cmpl-"
    shape = COMPLETION_SHAPE

    def __init__(self, serving: Serving, body: CompletionBody, model: str, job: Job, *, scores_only: bool) -> None:
        """`scores_only`: see `Task`."""
        super().__init__(serving, body, model, job)
        self.scores_only = scores_only
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self, outputs: Sequence[_core.Output]) -> dict[str, Any]:
        """The answer, at once."""
        choices = []
        for number, output in enumerate(outputs):
            for completion in output.completions:
                choices.append(self._choice(number, output, completion))
        choices.sort(key=lambda choice: int(choice["index"]))
        return self.frame("text_completion", choices, outputs)

    def _choice(self, number: int, output: _core.Output, completion: _core.Completion) -> dict[str, Any]:
        index = number * self.job.params.n + completion.index
        text = "" if self.scores_only else completion.text
        choice: dict[str, Any] = {
            "index": index,
            "text": self.prompt_text(number) + text if self.body.echo else text,
            "logprobs": None,
            "finish_reason": "length" if self.scores_only else completion.finish_reason,
            "stop_reason": None if self.scores_only else completion.stop_reason,
        }
        if self.job.params.logprobs is not None:
            logprobs = self._start_logprobs(index, output)
            if completion.logprobs is not None and not self.scores_only:
                logprobs.add(completion.logprobs)
            choice["logprobs"] = logprobs.take()
        if output.prompt_logprobs is not None and self.body.__dict__.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.texts)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = [] if self.scores_only else completion.token_ids
        return choice

    def prompt_text(self, number: int) -> str:
        """The text of a prompt, decoded if it came as ids."""
        prompt = self.job.prompts[number]
        if prompt.parsed.text is not None:
            return prompt.parsed.text
        if self.texts.tokenizer is None:
            return ""
        return self.texts.tokenizer.decode(prompt.token_ids, self.job.params.skip_special_tokens)

    def _start_logprobs(self, index: int, output: _core.Output) -> CompletionLogprobs:
        """Log-probabilities of a choice up to its generated tokens."""
        number = index // self.job.params.n
        if not self.body.echo:
            return CompletionLogprobs(texts=self.texts, offset=len(self.prompt_text(number)))
        logprobs = CompletionLogprobs(texts=self.texts, offset=0)
        logprobs.add_first(output.prompt_token_ids[0])
        if output.prompt_logprobs is not None:
            logprobs.add(output.prompt_logprobs)
        return logprobs

    def opening(self, writer: ChunkWriter) -> Opening | None:
        """The prompt, if it is to be repeated, and what is known of its tokens."""
        wants_logprobs = self.job.params.logprobs is not None
        if not (self.body.echo or wants_logprobs or self.body.return_token_ids):
            return None

        def events(index: int, output: _core.Output) -> bytes:
            choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            if self.body.echo:
                choice["text"] = self.prompt_text(index // self.job.params.n)
            if wants_logprobs:
                self._logprobs[index] = self._start_logprobs(index, output)
                if self.body.echo:
                    choice["logprobs"] = self._logprobs[index].take()
            if self.body.return_token_ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
            return writer.chunk(choice) if self.body.echo or self.body.return_token_ids else b""

        return events

    def extras(self) -> Extras | None:
        """Log-probabilities and ids."""
        wants_logprobs = self.job.params.logprobs is not None
        if not (wants_logprobs or self.body.return_token_ids):
            return None

        def fields(index: int, completion: _core.Completion) -> bytes:
            found = b',"logprobs":null'
            if completion.logprobs is not None and wants_logprobs:
                self._logprobs[index].add(completion.logprobs)
                found = b',"logprobs":' + orjson.dumps(self._logprobs[index].take())
            if self.body.return_token_ids:
                found += b',"token_ids":' + orjson.dumps(completion.token_ids)
            return found

        return fields


class Completions(TextRoute[CompletionBody]):
    """POST /v1/completions."""

    body_type = CompletionRequest

    def renamed(self, body: CompletionBody) -> Mapping[str, str]:
        """Sampling parameters that have another name here."""
        return {"prompt_token_ids": "prompt"}

    async def prepare(self, body: CompletionBody, model: str, notes: Notes) -> CompletionTask:
        """Understand a body. Raises `ApiError` or `ParameterError` naming what is wrong."""
        given = given_sampling(body, self.serving.processors)
        check_prompt_logprobs(body, given)
        # No engine makes nothing: one token is generated and left out.
        scores_only = given.get("max_tokens") == 0 and type(given["max_tokens"]) is int
        fixed: dict[str, Any] = {"max_tokens": 1} if scores_only else {}
        if body.echo and given.get("logprobs") is not None:
            given.setdefault("prompt_logprobs", given["logprobs"])
        params = sampling(self.serving, body, given, **fixed)
        prompts = await self._prompts(body)
        ready = [self.fitted(prompt, body, params, given.get("max_tokens")) for prompt in prompts]
        job = Job(prompts=ready, params=params, priority=body.priority, renamed=self.all_renamed(body), notes=notes)
        return CompletionTask(self.serving, body, model, job, scores_only=scores_only)

    async def _prompts(self, body: CompletionBody) -> list[ReadyPrompt]:
        serving = self.serving
        parsed: Sequence[ParsedPrompt] = parse_prompts(body.prompt, body.cache_salt, serving.max_prompts)
        if body.suffix is not None:
            special = body.add_special_tokens
            parsed = await serving.off_loop(
                encode_with_gap, serving.tokenizer("suffix"), parsed, body.suffix, add_special_tokens=special
            )
        elif not body.add_special_tokens and any(prompt.text is not None for prompt in parsed):
            parsed = await serving.off_loop(encode_without_additions, serving.tokenizer("prompt"), parsed)
        ids = await serving.llm.encode(parsed)
        return [ReadyPrompt(parsed=prompt, token_ids=tokens) for prompt, tokens in zip(parsed, ids, strict=True)]
