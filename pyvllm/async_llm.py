"""`AsyncLLM`: an engine in its own process, for programs that run an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from pyvllm import _core
from pyvllm._core import QueueFullError
from pyvllm.config import EngineArgs
from pyvllm.engine_client import HEARTBEAT_TIMEOUT_S, EngineClient, EngineGenerateError
from pyvllm.engine_spawn import EngineDeadError, EngineFacts, EngineProcess
from pyvllm.inputs import (
    ParsedPrompt,
    Prompt,
    bad_word_ids,
    check_lora_request,
    encode_prompts,
    parse_priority,
    parse_prompt,
    parse_request_id,
    require_tokenizer,
    start_token,
)
from pyvllm.logging import StatsLog, configure_logging
from pyvllm.logprobs import TokenText
from pyvllm.outputs import RequestOutput, request_output
from pyvllm.sampling_params import SamplingParams, parameter_error
from pyvllm.wire import Kind

if TYPE_CHECKING:
    from pyvllm.tokenizer import Tokenizer

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "EngineDeadError",
    "EngineGenerateError",
    "EngineSnapshot",
    "OutputStream",
    "QueueFullError",
    "RequestSummary",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSummary:
    """One request in the engine."""

    request_id: str
    """Its name."""
    state: str
    """`waiting`, `running` or `swapped`."""
    num_sequences: int
    """Sequences that have not ended."""
    num_prompt_tokens: int
    """Tokens of its prompt."""
    num_output_tokens: int
    """Tokens that its sequences have generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSnapshot:
    """The blocks of the KV pool, by number, and the requests, at one moment between two steps."""

    ref_counts: NDArray[np.uint32]
    """Block tables that hold a block; 0: it is free."""
    owners: NDArray[np.int32]
    """Index into `requests` of one that holds it; -1: none does."""
    cached: NDArray[np.bool_]
    """Whether the prefix cache finds it."""
    requests: list[RequestSummary]
    """All that are in the engine."""


class OutputStream:
    """What one request gives, as it comes: an async iterator over outputs of the core that ends after the last.

    What is not taken in time is merged: a slow reader gets fewer and longer `DELTA` outputs, and only the newest
    `CUMULATIVE` one. A stream that is closed, or forgotten, before its end aborts its request. Iterating raises
    `EngineGenerateError` if a step with this request failed, and `EngineDeadError` if the engine has died.
    """

    def __init__(self, client: EngineClient, request_id: str, number: int) -> None:
        """Made by `AsyncLLM.submit`. `number`: the request's in the client."""
        self.request_id = request_id
        """The name that the request was submitted under."""
        self._client = client
        self._number = number
        self._ended = False

    def poll(self) -> list[_core.Output]:
        """What has arrived, without waiting: one output or none. Raises as iterating does."""
        output = None if self._ended else self._next()
        return [] if output is None else [output]

    def on_news(self, callback: Callable[[], None]) -> None:
        """Have `callback`, which must not raise, called whenever `poll` has something to return or to raise.

        It costs a part of what waking a task does; for servers of many streams.
        """
        self._client.call_on_news(self._number, callback)

    def close(self) -> None:
        """Abort the request if it has not finished."""
        if not self._ended:
            self._ended = True
            self._client.forget(self._number)

    def _next(self) -> _core.Output | None:
        output = self._client.front.take(self._number)
        if output is not None:
            self._ended = output.finished
            if self._ended:
                self._client.call_on_news(self._number, None)
            if output.error is not None:
                raise output.error
            return output
        try:
            self._client.raise_if_failed(self._number)
        except BaseException:
            self.close()
            raise
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _core.Output:
        while not self._ended:
            output = self._next()
            if output is not None:
                return output
            await self._client.news(self._number)
        raise StopAsyncIteration

    def __del__(self) -> None:
        if not self._ended:
            self._client.forgotten.append(self._number)


class AsyncLLM:
    """Generates text in a process of its own, for programs that run an event loop. Use it from one loop at a time."""

    def __init__(
        self, process: EngineProcess, facts: EngineFacts, tokenizer: Tokenizer | None, client: EngineClient
    ) -> None:
        """See `from_engine_args`."""
        self.info = facts.info
        """What there is to know of the engine."""
        self.tokenizer = tokenizer
        """The model's; None if the engine runs without one."""
        self.token_text: TokenText | None = tokenizer.token_text if tokenizer else None
        """Text of a token alone, None without a tokenizer."""
        # A program may ask the same of many prompts, and words take long to become tokens.
        self._bad_word_ids = functools.lru_cache(maxsize=1)(functools.partial(bad_word_ids, tokenizer))
        self._process = process
        self._client = client
        self._numbers = itertools.count()
        self._draining = False
        self._stats_log = StatsLog(interval_s=0.0)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pyvllm-tokenizer")
        # The process ends with this object, at the latest when the interpreter does.
        self._stop = weakref.finalize(self, process.stop)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        *,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        stall_timeout_s: float = 120.0,
    ) -> Self:
        """Start a process and load the model there; returns when it can make tokens. Raises what loading raised.

        `max_num_queued_reqs`, `max_num_queued_tokens`: sequences, and tokens of their prompts, that may wait beside
        those that run; more raise `QueueFullError`. `heartbeat_timeout_s`: the engine is dead once its process has
        shown no sign of life for so long; `stall_timeout_s`: and once a step has taken so long. `usage_context` is
        accepted for programs written for vLLM.
        """
        configure_logging()
        process = EngineProcess()
        try:
            from pyvllm.hub import find_model
            from pyvllm.tokenizer import find_tokenizer

            files = find_model(engine_args)
            process.send_arguments(engine_args)
            tokenizer = find_tokenizer(engine_args, files)
            facts = process.wait_loaded()
            front = _core.FrontEnd(
                facts.limits, max_num_queued_reqs=max_num_queued_reqs, max_num_queued_tokens=max_num_queued_tokens
            )
            front.receive(facts.stats)
        except BaseException:
            process.stop()
            raise
        client = EngineClient(process, front, heartbeat_timeout_s=heartbeat_timeout_s, stall_timeout_s=stall_timeout_s)
        return cls(process, facts, tokenizer, client)

    # ---- requests ----

    def submit(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> OutputStream:
        """Queue a request. `token_ids`: what `encode` made of `prompt`. Call it in the event loop.

        Raises `ParameterError` for whatever can never run and for an id in use, `QueueFullError` if too much waits or
        the engine is drained, and `EngineDeadError`; nothing of the request stays behind then.
        """
        if any(not isinstance(processor, str) for processor in params.logits_processors or ()):
            expected = "names of EngineArgs.logits_processors: functions do not travel to the engine's process"
            raise parameter_error("logits_processors", expected, params.logits_processors)
        client = self._client
        client.check_alive()
        if self._draining:
            raise QueueFullError("the engine is shutting down and takes no new requests")
        number, message = client.front.add(
            request_id,
            token_ids or [start_token(self.tokenizer, prompt)],
            params,
            prompt=prompt.text,
            priority=parse_priority(priority),
            cache_salt=prompt.cache_salt,
            bad_word_ids=self._bad_word_ids(tuple(params.bad_words or ())),
        )
        client.send(Kind.ADD, message)
        return OutputStream(client, request_id, number)

    async def encode(self, prompts: Sequence[ParsedPrompt]) -> list[list[int]]:
        """Token ids of prompts; text is tokenized off the event loop. Raises `ParameterError` as `Engine.encode`."""
        if all(prompt.token_ids is not None for prompt in prompts):
            return encode_prompts(None, prompts)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, encode_prompts, self.tokenizer, prompts)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: object = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come, as its `output_kind` says. Leaving the loop early aborts it.

        `sampling_params` None: the model's defaults. `request_id` None: a new one. `lora_request` must be None.
        """
        check_lora_request(lora_request)
        if not isinstance(sampling_params, SamplingParams | None):
            raise TypeError(f"sampling_params must be SamplingParams or None, got {type(sampling_params).__name__}")
        name = f"generate-{next(self._numbers)}" if request_id is None else parse_request_id(request_id)
        parsed = parse_prompt(prompt)
        (token_ids,) = await self.encode([parsed])
        params = sampling_params or self.info.default_sampling_params
        stream = self.submit(name, parsed, token_ids, params, priority=priority)
        try:
            async for output in stream:
                yield request_output(output, self.token_text)
        finally:
            stream.close()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their streams give what there is, with `finish_reason` abort. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            number = self._client.front.number(one)
            if number is not None:
                self._client.abort(number)

    # ---- the engine ----

    def prompt_limit(self, params: SamplingParams) -> int | None:
        """Most tokens, the last ones, that a request uses of a prompt; None: all."""
        return self._client.front.prompt_limit(params)

    def stats(self) -> _core.Stats:
        """A snapshot of queues, memory and counters, as of the latest step."""
        return self._client.front.stats()

    async def snapshot(self) -> EngineSnapshot:
        """Who holds which block of the KV pool. Costs a pause between two steps: ask a few times a second at most."""
        found = _core.BlockMap.from_bytes(await self._client.call("block_map"))
        names = self._client.front.names()
        requests = [
            RequestSummary(
                request_id=names.get(int(request.request_id), ""),
                state=request.state,
                num_sequences=request.num_sequences,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
            )
            for request in found.requests
        ]
        return EngineSnapshot(ref_counts=found.ref_counts, owners=found.owners, cached=found.cached, requests=requests)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while a request is in the engine."""
        return await self._client.call("reset_prefix_cache") == b"\x01"

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ValueError` if the engine runs without one."""
        return require_tokenizer(self.tokenizer)

    def do_log_stats(self) -> None:
        """Log a line about throughput since the last one, and memory use."""
        self._stats_log.tick(self)

    # ---- life and death ----

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine's process has ended, shows no sign of life, or hangs in a step."""
        self._client.check_process()

    @property
    def is_running(self) -> bool:
        """Whether the engine lives, as far as is known."""
        return self.dead_error is None

    @property
    def errored(self) -> bool:
        """Whether the engine has died or was shut down."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What the engine died of."""
        return self._client.dead_error

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests, and wait for those in the engine. False if some are left after `timeout_s` seconds."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._client.wait_until_idle()
        return not self._client.front.num_unfinished()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine at once; open streams raise `EngineDeadError`. May be called again, and from any thread.

        `timeout` is accepted for programs written for vLLM; `drain` waits for open requests.
        """
        self._client.shut_down()
        self._stop()


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
AsyncEngineArgs = EngineArgs
"""vLLM's name for the arguments of an `AsyncLLM`."""
