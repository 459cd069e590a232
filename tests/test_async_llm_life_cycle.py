"""`AsyncLLM`: made and used in several event loops, full queues, draining, shutting down."""

import asyncio
from pathlib import Path

import pytest

from pyvllm import AsyncLLM, EngineArgs, EngineDeadError, QueueFullError, SamplingParams
from pyvllm.inputs import parse_prompt
from tests.async_requests import GREEDY, OPTIONS, PATIENCE_S, collect


def make(tiny_llama: Path) -> AsyncLLM:
    """An engine that runs two sequences at once and lets three wait, made inside an event loop that then ends."""

    async def inside() -> AsyncLLM:
        args = EngineArgs(model=str(tiny_llama), max_num_seqs=2, **OPTIONS)
        llm = AsyncLLM.from_engine_args(args, max_num_queued_reqs=3)
        await collect(llm, "x", GREEDY)
        return llm

    return asyncio.run(inside())


def test_r020_no_more_wait_than_may(tiny_llama: Path) -> None:
    async def flood(llm: AsyncLLM) -> None:
        (ids,) = await llm.encode([parse_prompt("x")])
        streams, refused = [], []
        for i in range(20):
            try:
                streams.append(llm.submit(str(i), parse_prompt("x"), ids, GREEDY))
            except QueueFullError as error:
                refused.append(str(error))
        assert "the queue is full: 3 sequences wait, of 3 (max_num_queued_reqs) that may" in refused[0]
        assert (len(streams), len(refused)) == (5, 15)
        for stream in streams:
            assert [output async for output in stream][-1].finished
        assert (await collect(llm, "x", GREEDY))[-1].finished

    llm = make(tiny_llama)
    asyncio.run(flood(llm))
    asyncio.run(flood(llm))
    llm.shutdown()


def test_drain_takes_nothing_new_and_shutdown_may_come_twice(tiny_llama: Path) -> None:
    async def drain(llm: AsyncLLM) -> None:
        (ids,) = await llm.encode([parse_prompt("x")])
        last = llm.submit("last", parse_prompt("x"), ids, SamplingParams(max_tokens=100, ignore_eos=True))
        draining = asyncio.create_task(llm.drain(PATIENCE_S))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="shutting down"):
            await collect(llm, "y", GREEDY)
        assert await draining
        assert [output async for output in last][-1].completions[0].finish_reason == "length"

    llm = make(tiny_llama)
    asyncio.run(drain(llm))
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        asyncio.run(collect(llm, "x", GREEDY))
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        asyncio.run(llm.check_health())


def test_r013_what_is_left_after_draining_ends_with_an_error(tiny_llama: Path) -> None:
    async def scenario() -> None:
        llm = AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama), **OPTIONS))
        (ids,) = await llm.encode([parse_prompt("x")])
        slow = SamplingParams(n=64, max_tokens=500, ignore_eos=True)
        stream = llm.submit("slow", parse_prompt("x"), ids, slow)
        await anext(stream)
        assert not await llm.drain(0.1)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            _ = [output async for output in stream]

    asyncio.run(scenario())
