"""`AsyncLLM`: many requests at once, leaving early, slow readers, what is refused."""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyvllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    ParameterError,
    SamplingParams,
)
from pyvllm.inputs import parse_prompt
from pyvllm.sampling_params import RequestOutputKind
from tests.async_requests import ENDLESS, GREEDY, OPTIONS, collect, joined, open_streams, wait_until_idle
from tests.small_llm import generate

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
KINDS = [DELTA, CUMULATIVE, FINAL_ONLY]


@pytest.fixture(scope="module")
def shared(long_llama: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(long_llama), **OPTIONS))
    yield llm
    llm.shutdown()


Use = Callable[[Callable[[AsyncLLM], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture
def use(shared: AsyncLLM) -> Use:
    """Run a coroutine function on the engine in an event loop of its own, and check that it leaves nothing behind."""

    def run(scenario: Callable[[AsyncLLM], Coroutine[Any, Any, Any]]) -> Any:
        async def whole() -> Any:
            result = await asyncio.wait_for(scenario(shared), 300)
            await wait_until_idle(shared)
            await shared.check_health()
            return result

        return asyncio.run(whole())

    return run


def requests(count: int) -> list[tuple[str, SamplingParams]]:
    """Requests of many kinds, all of which give the same in any company."""
    made = []
    for i in range(count):
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4 + i % 13, "ignore_eos": i % 3 != 0}
        kind = KINDS[i % 3]
        if i % 7 == 1:
            options |= {"n": 3, "temperature": 0.9, "seed": i}
        elif i % 7 == 2:
            options |= {"logprobs": 2, "prompt_logprobs": 1}
        elif i % 7 == 3:
            options |= {"stop": ["e", "zz"], "max_tokens": 40}
        elif i % 7 == 4:
            options |= {"use_beam_search": True, "best_of": 3, "n": 2}
        elif i % 7 == 5:
            options |= {"n": 1, "best_of": 3, "temperature": 0.9, "seed": i}
            kind = KINDS[1 + i % 2]
        made.append((f"the request {i * i} " * (1 + i % 4), SamplingParams(output_kind=kind, **options)))
    return made


@pytest.fixture(scope="module")
def expected(long_llama: Path) -> list[Any]:
    with LLM(str(long_llama), **OPTIONS) as llm:
        asked = requests(64)
        return generate(llm, [prompt for prompt, _ in asked], [params for _, params in asked])


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """All is equal, log-probabilities to float32's rounding."""
    for mine, its in zip(found, expected, strict=True):
        assert replace(mine, cumulative_logprob=None, logprobs=None) == replace(
            its, cumulative_logprob=None, logprobs=None
        )
        assert mine.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-4)
        assert_close(mine.logprobs, its.logprobs)


def assert_close(found: Any, expected: Any) -> None:
    """Log-probabilities of a sequence are equal to float32's rounding."""
    # The rows of a matrix product depend in their last bits on how many there are, and which requests share a step on
    # when they come: the same ones offline, with other `max_num_seqs`, differ by up to 2e-5.
    for mine, its in zip(found or [], expected or [], strict=True):
        values = [{i: value.logprob for i, value in (entry or {}).items()} for entry in (mine, its)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_equals_offline_generation_for_all_kinds_of_requests(use: Use, expected: list[Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        asked = requests(64)
        found = await asyncio.gather(*(collect(llm, prompt, params) for prompt, params in asked))
        for (prompt, params), outputs, whole in zip(asked, found, expected, strict=True):
            assert_same(joined(outputs, params.output_kind), whole.outputs)
            assert outputs[-1].prompt == prompt
            assert outputs[-1].prompt_token_ids == whole.prompt_token_ids
            shown = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
            assert bool(shown) == bool(whole.prompt_logprobs)
            assert_close(shown[0] if shown else None, whole.prompt_logprobs)

    use(scenario)


def test_256_at_once_lose_nothing_and_mix_nothing_up(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        def params(i: int) -> SamplingParams:
            return SamplingParams(temperature=0, max_tokens=3 + i % 11, ignore_eos=True, output_kind=KINDS[i % 3])

        alone = {i: (await collect(llm, f"number {i}", params(i)))[-1] for i in range(0, 256, 16)}
        names = [f"r{i}" for i in range(256)]
        found = await asyncio.gather(
            *(collect(llm, f"number {i}", params(i), request_id=name) for i, name in enumerate(names))
        )
        for i, outputs in enumerate(found):
            assert {output.request_id for output in outputs} == {names[i]}
            (completion,) = joined(outputs, KINDS[i % 3])
            assert len(completion.token_ids) == 3 + i % 11
            if i in alone and KINDS[i % 3] != DELTA:
                assert completion == alone[i].outputs[0]

    use(scenario)


def test_cancelling_aborts_within_a_step(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        tasks = await open_streams(llm, 8)
        assert llm.stats().num_running == 8
        tokens = llm.stats().generation_tokens
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(result, asyncio.CancelledError)
            for result in await asyncio.gather(*tasks, return_exceptions=True)
        )
        await wait_until_idle(llm)
        # What was under way when the aborts came, at most what the connection holds if this process is held up there.
        assert llm.stats().generation_tokens - tokens < 8 * 2000

    use(scenario)


def test_leaving_the_loop_closing_and_forgetting_abort(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        async for _ in llm.generate("left", ENDLESS):
            break
        generator = llm.generate("closed", ENDLESS)
        await anext(generator)
        await generator.aclose()
        (ids,) = await llm.encode([parse_prompt("never read")])
        llm.submit("closed", parse_prompt("x"), ids, ENDLESS).close()
        forgotten = llm.submit("forgotten", parse_prompt("x"), ids, ENDLESS)
        await anext(forgotten)
        del forgotten
        gc.collect()
        await wait_until_idle(llm)
        assert llm._client.front.num_unfinished() == 0

    use(scenario)


def test_b116_others_finish_when_a_reader_is_dropped(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        alone = [(await collect(llm, f"other {i}", GREEDY))[-1].outputs for i in range(3)]
        others = [asyncio.create_task(collect(llm, f"other {i}", GREEDY)) for i in range(3)]
        (dropped,) = await open_streams(llm, 1)
        dropped.cancel()
        assert [(await task)[-1].outputs for task in others] == alone

    use(scenario)


def test_an_aborted_request_ends_with_what_it_has(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        whole = SamplingParams(temperature=0, max_tokens=30_000, ignore_eos=True, n=2)
        outputs = []
        async for output in llm.generate("abort me", whole, "mine"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("unknown")
                await llm.abort(["a", "mine"])
        assert outputs[-1].finished
        assert [completion.finish_reason for completion in outputs[-1].outputs] == ["abort", "abort"]
        assert [len(completion.token_ids) for completion in outputs[-1].outputs] >= [3, 3]
        (final,) = await asyncio.gather(collect(llm, "x", GREEDY, request_id="mine"))
        assert final[-1].finished

    use(scenario)


def test_b046_abort_leaves_no_sequence_running(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        for i in range(20):
            params = SamplingParams(n=4, max_tokens=30_000, ignore_eos=True, output_kind=DELTA)
            async for _ in llm.generate("several", params, str(i)):
                break
        await wait_until_idle(llm)

    use(scenario)


def test_r024_a_slow_reader_holds_nobody_up_and_gets_all(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=DELTA)
        (ids,) = await llm.encode([parse_prompt("slow")])
        slow = llm.submit("slow", parse_prompt("slow"), ids, params)
        assert slow.poll() == []
        for i in range(3):
            await collect(llm, f"fast {i}", GREEDY)
        while llm.stats().num_running:
            await asyncio.sleep(0.01)
        (output,) = slow.poll()  # one, not one a token
        assert output.finished
        assert slow.poll() == []
        assert [output async for output in slow] == []
        whole = (await collect(llm, "slow", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)))[-1]
        assert (output.completions[0].token_ids, output.completions[0].text) == (
            whole.outputs[0].token_ids,
            whole.outputs[0].text,
        )

    use(scenario)


def test_one_task_reads_a_stream(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        (ids,) = await llm.encode([parse_prompt("x")])
        stream = llm.submit("x", parse_prompt("x"), ids, SamplingParams(max_tokens=200, output_kind=FINAL_ONLY))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task waits for this stream"):
            await anext(stream)
        assert (await first).finished

    use(scenario)


REFUSED: list[tuple[Any, dict[str, Any]]] = [
    ([], {}),
    ([1000], {}),
    ([-1], {}),
    (list(range(250)) * 300, {}),
    ([1, 2], {"stop_token_ids": [999]}),
    ([1, 2], {"logprobs": 21}),
    ([1, 2], {"n": 257}),
    ([1, 2], {"min_tokens": 70_000, "max_tokens": None}),
    ([1, 2], {"logit_bias": {400: 1.0}}),
]


@pytest.fixture(scope="module")
def stepped(long_llama: Path) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(model=str(long_llama), **OPTIONS))


@pytest.mark.parametrize(("prompt", "options"), REFUSED)
def test_what_is_refused_is_refused_in_the_same_words(
    use: Use, stepped: LLMEngine, prompt: Any, options: dict[str, Any]
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        params = SamplingParams(**options)
        if prompt:
            with pytest.raises(ParameterError) as alone:
                stepped.add_request("x", prompt, params)
            with pytest.raises(ParameterError) as found:
                await collect(llm, prompt, params)
            assert (str(found.value), found.value.parameter) == (str(alone.value), alone.value.parameter)
            assert found.value.value == alone.value.value
        else:  # The BOS token stands for nothing.
            assert (await collect(llm, prompt, GREEDY))[-1].prompt_token_ids == [256]

    use(scenario)


def test_ids_are_unique_among_unfinished_requests(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        async for _ in llm.generate("a", ENDLESS, "same"):
            with pytest.raises(ParameterError, match='request_id "same" is in use by an unfinished request'):
                await collect(llm, "b", GREEDY, request_id="same")
            break
        await wait_until_idle(llm)
        assert (await collect(llm, "b", GREEDY, request_id="same"))[-1].finished
        with pytest.raises(TypeError, match="request_id must be a string, got int"):
            await collect(llm, "b", GREEDY, request_id=3)
        with pytest.raises(TypeError, match="sampling_params must be SamplingParams or None, got dict"):
            await collect(llm, "b", {"n": 1})  # type: ignore[arg-type]

    use(scenario)


def test_s023_ids_that_begin_alike_are_told_apart(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        long_name = asyncio.create_task(collect(llm, "b", SamplingParams(max_tokens=60), request_id="ab"))
        async for _ in llm.generate("a", ENDLESS, "a"):
            break
        assert (await long_name)[-1].outputs[0].finish_reason in ("length", "stop")

    use(scenario)


def test_what_users_ask(use: Use, long_llama: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert AsyncLLMEngine is AsyncLLM
        assert AsyncEngineArgs is EngineArgs
        assert (llm.info.model, llm.info.max_model_len, llm.info.vocab_size) == (str(long_llama), 65_536, 320)
        assert await llm.get_tokenizer() is llm.tokenizer
        assert await llm.encode([parse_prompt("the"), parse_prompt([1, 2])]) == [
            llm.tokenizer.encode("the") if llm.tokenizer else [],
            [1, 2],
        ]
        assert llm.is_running
        assert not llm.errored
        assert llm.dead_error is None
        llm.do_log_stats()
        assert (await collect(llm, [5, 6, 7], GREEDY))[-1].prompt is None
        defaults = await collect(llm, {"prompt_token_ids": [5, 6], "prompt": "shown", "cache_salt": "s"}, None)  # type: ignore[arg-type]
        assert defaults[-1].prompt == "shown"

    use(scenario)


def test_prefix_cache_and_snapshot(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert await llm.reset_prefix_cache()
        prompt = list(range(40))
        await collect(llm, prompt, GREEDY)
        assert (await collect(llm, prompt, GREEDY))[-1].num_cached_tokens == 32
        async for _ in llm.generate(prompt, ENDLESS, "seen"):
            seen = await llm.snapshot()
            assert not await llm.reset_prefix_cache()
            break
        (request,) = seen.requests
        assert (request.request_id, request.state, request.num_sequences) == ("seen", "running", 1)
        assert request.num_prompt_tokens == 40
        assert request.num_output_tokens >= 1
        held = seen.owners == 0
        assert (held == (seen.ref_counts == 1)).all()
        # The newest token's KV is written by the next step.
        computed = 40 + request.num_output_tokens - 1
        assert held.sum() in (-(-computed // 8), -(-(computed + 1) // 8))
        assert seen.cached.sum() >= 5
        await wait_until_idle(llm)
        assert await llm.reset_prefix_cache()
        after = await llm.snapshot()
        assert (after.owners == -1).all()
        assert not after.cached.any()
        assert (await collect(llm, prompt, GREEDY))[-1].num_cached_tokens == 0

    use(scenario)


def test_b119_another_event_loop_while_one_runs_is_refused(use: Use) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        found: list[BaseException] = []

        def other() -> None:
            try:
                asyncio.run(collect(llm, "x", GREEDY))
            except RuntimeError as error:
                found.append(error)

        async for _ in llm.generate("x", ENDLESS):
            thread = threading.Thread(target=other)
            thread.start()
            await asyncio.to_thread(thread.join)
            break
        assert "in use by another event loop" in str(found[0])

    use(scenario)


def test_b119_what_a_loop_leaves_open_ends_with_it(shared: AsyncLLM, use: Use) -> None:
    async def leave() -> None:
        (ids,) = await shared.encode([parse_prompt("x")])
        stream = shared.submit("left open", parse_prompt("x"), ids, ENDLESS)
        await anext(stream)

    asyncio.run(leave())

    async def scenario(llm: AsyncLLM) -> None:
        assert (await collect(llm, "x", GREEDY, request_id="left open"))[-1].finished

    use(scenario)
