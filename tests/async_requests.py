"""What the tests of `AsyncLLM` share: requests, and waiting until an engine is idle or gone."""

import asyncio
import time
from pathlib import Path
from typing import Any

from pyvllm import AsyncLLM, RequestOutput, SamplingParams
from pyvllm.outputs import CompletionOutput
from pyvllm.sampling_params import RequestOutputKind

PATIENCE_S = 60.0
"""How long anything may take that takes a moment on an idle machine. Nothing is to depend on it but failing tests."""
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 16_384, "block_size": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
"""As long as the context: with `long_llama` it does not end, since an engine waits for a reader that is held up."""


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """All outputs of one request."""
    return [output async for output in llm.generate(prompt, params, **options)]


def joined(outputs: list[RequestOutput], kind: RequestOutputKind) -> list[CompletionOutput]:
    """The completions of a request at its end, whatever its kind."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind != RequestOutputKind.DELTA:
        return outputs[-1].outputs
    whole: dict[int, CompletionOutput] = {}
    for news in (completion for output in outputs for completion in output.outputs):
        known = whole.setdefault(news.index, CompletionOutput(index=news.index, text="", token_ids=[]))
        known.text += news.text
        known.token_ids += news.token_ids
        known.logprobs = None if news.logprobs is None else (known.logprobs or []) + news.logprobs
        known.cumulative_logprob = news.cumulative_logprob
        known.finish_reason, known.stop_reason = news.finish_reason, news.stop_reason
    return [whole[index] for index in sorted(whole)]


async def open_streams(llm: AsyncLLM, count: int) -> list[asyncio.Task[None]]:
    """Tasks that read endless streams, each of which has given something."""
    started = [asyncio.Event() for _ in range(count)]

    async def read(i: int) -> None:
        async for _ in llm.generate(f"endless {i}", ENDLESS):
            started[i].set()

    tasks = [asyncio.create_task(read(i)) for i in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        for event in started:
            await event.wait()
    return tasks


async def wait_until_idle(llm: AsyncLLM) -> None:
    """Wait until the engine says that it holds nothing of any request."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        stats = llm.stats()
        held = (stats.num_running, stats.num_waiting, stats.num_swapped, stats.num_queued_tokens)
        if held == (0, 0, 0, 0) and stats.num_free_gpu_blocks == stats.num_gpu_blocks:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still held after {PATIENCE_S} s: {held}, {stats.num_free_gpu_blocks} blocks free")


def is_gone(pid: int, timeout_s: float = PATIENCE_S) -> bool:
    """Whether a process ends within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return True
        state, num_threads = fields[0], int(fields[17])
        # The thread that a process began with can be a zombie before the others have ended, and the process with them.
        if state == "Z" and num_threads <= 1:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
