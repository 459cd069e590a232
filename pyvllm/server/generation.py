"""From a request that has been understood to what the engine makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from pyvllm import _core
from pyvllm.async_llm import EngineDeadError, EngineGenerateError, OutputStream, QueueFullError
from pyvllm.sampling_params import ParameterError, SamplingParams
from pyvllm.server.errors import as_api_error, bad_request, unavailable
from pyvllm.server.prompts import ReadyPrompt
from pyvllm.server.serving import Notes, Serving

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that one HTTP request asks of the engine."""

    prompts: list[ReadyPrompt]
    params: SamplingParams
    priority: int
    renamed: Mapping[str, str]
    """Names of sampling parameters that have another one in this request."""
    notes: Notes

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts. An empty one gets a BOS token."""
        return sum(len(prompt.token_ids) or 1 for prompt in self.prompts)


@contextlib.contextmanager
def submitted(serving: Serving, job: Job) -> Iterator[list[OutputStream]]:
    """The streams of a job's prompts; what has not finished when the block is left is aborted.

    Raises `ApiError` if the engine refuses one, and then none of them runs.
    """
    width = max(job.params.n, job.params.best_of or 1)
    if len(job.prompts) * width > serving.max_sequences:
        name = "best_of" if job.params.best_of is not None and job.params.best_of > job.params.n else "n"
        most = serving.max_sequences // len(job.prompts)
        raise bad_request(name, f"{name} must be at most {most} for {len(job.prompts)} prompts, got {width}")
    job.notes.prompt_tokens = job.num_prompt_tokens
    if serving.args.enable_log_requests:
        _log_request(serving, job)
    streams: list[OutputStream] = []
    reason = "abort"
    try:
        for prompt in job.prompts:
            streams.append(_submit(serving, job, prompt))
        yield streams
        job.notes.finished_prompts = len(streams)
    except (EngineDeadError, EngineGenerateError):
        reason = "error"
        raise
    finally:
        serving.metrics.requests.finished[reason] += len(streams) - job.notes.finished_prompts
        for stream in streams:
            stream.close()


def _submit(serving: Serving, job: Job, prompt: ReadyPrompt) -> OutputStream:
    request_id = serving.engine_id(job.notes.request_id)
    try:
        return serving.llm.submit(request_id, prompt.parsed, prompt.token_ids, job.params, priority=job.priority)
    except QueueFullError as error:
        serving.metrics.requests.rejected["queue_full"] += 1
        raise as_api_error(error) from None
    except ParameterError as error:
        serving.metrics.requests.rejected["invalid"] += 1
        raise as_api_error(error, job.renamed) from None


def _log_request(serving: Serving, job: Job) -> None:
    logger.info("request %s: %d prompts, %s", job.notes.request_id, len(job.prompts), job.params)
    if logger.isEnabledFor(logging.DEBUG):
        for prompt in job.prompts:
            text = prompt.parsed.text if prompt.parsed.text is not None else str(prompt.token_ids)
            # As a literal, so that a prompt cannot forge a line of the log.
            logger.debug("request %s: prompt %r", job.notes.request_id, text[: serving.args.max_log_len])


async def last_outputs(streams: Sequence[OutputStream]) -> list[_core.Output]:
    """The last output of each stream, which for requests that want only that has everything."""
    return [await _last(stream) for stream in streams]


async def _last(stream: OutputStream) -> _core.Output:
    found: _core.Output | None = None
    async for output in stream:
        found = output
    if found is None:
        raise RuntimeError(f"the stream of {stream.request_id} ended without an output")
    return found


async def while_connected(serving: Serving, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, which is cancelled if the client goes away or the server stops.

    Raises `ClientDisconnect` or `ApiError` 503 then. The body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    serving.open.add(task)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        if task.cancelled():
            raise unavailable("the server is shutting down")
        return task.result()
    finally:
        serving.open.discard(task)
        for one in (task, gone):
            if not one.done():
                one.cancel()
                await asyncio.wait((one,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
