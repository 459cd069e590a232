"""`LLM`: failures, interrupts, closing, running without a tokenizer or one step ahead."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLM, SamplingParams
from tests.idle import assert_idle, engine_of
from tests.small_llm import GREEDY, OPTIONS, generate


def boom(kind: type[BaseException]) -> Callable[..., Any]:
    def launch(buffer: object) -> Any:
        raise kind("planted")

    return launch


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_failed_step_leaves_the_engine_usable(
    llm: LLM, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(llm, "the")[0].outputs[0].token_ids
    stream = llm.stream("in", GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(engine_of(llm)._runner, "launch", boom(kind))
        with pytest.raises(kind, match="planted"):
            generate(llm, ["the", "in"])
    with pytest.raises(RuntimeError, match="the engine failed while these requests were in it"):
        next(stream)
    assert_idle(engine_of(llm))
    assert generate(llm, "the")[0].outputs[0].token_ids == expected


def test_an_interrupt_between_steps_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_unfinished() -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine_of(llm), "has_unfinished", has_unfinished)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["the", "in"])


def test_requests_aborted_behind_our_back_do_not_hang(llm: LLM) -> None:
    ids = llm.enqueue("a", GREEDY)
    engine_of(llm).abort(ids[0])
    with pytest.raises(RuntimeError, match=r"no longer in the engine"):
        llm.wait_for_completion(use_tqdm=False)


def test_r005_no_signal_handlers(tiny_llama: Path) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        generate(llm, "a")
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_after_close_everything_says_so(tiny_llama: Path) -> None:
    llm = LLM(str(tiny_llama), **OPTIONS)
    llm.close()
    llm.close()
    uses: list[Callable[[], object]] = [
        lambda: generate(llm, "a"),
        lambda: llm.stream("a"),
        lambda: llm.enqueue("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        llm.get_tokenizer,
        llm.get_metrics,
        llm.reset_prefix_cache,
        llm.get_default_sampling_params,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            use()


def test_without_a_tokenizer(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), skip_tokenizer_init=True, **OPTIONS) as llm:
        (output,) = generate(llm, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1))
        assert len(output.outputs[0].token_ids) == 4
        assert output.outputs[0].text == ""
        with pytest.raises(ValueError, match="prompt must be token ids, since the engine runs without a tokenizer"):
            generate(llm, "text")
        with pytest.raises(ValueError, match="skip_tokenizer_init is True"):
            llm.get_tokenizer()
        assert_idle(engine_of(llm))


@pytest.mark.parametrize("run_ahead", [False, True])
def test_one_step_ahead_or_not(llm: LLM, tiny_llama: Path, run_ahead: bool) -> None:
    prompts = ["the", "in the", "a"]
    params = [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=list(range(40, 120))),
        SamplingParams(n=2, seed=1, max_tokens=5),
    ]
    with LLM(str(tiny_llama), async_scheduling=run_ahead, **OPTIONS) as other:
        for _ in range(2):
            expected, found = generate(llm, prompts, params), generate(other, prompts, params)
            assert [[c.token_ids for c in o.outputs] for o in found] == [
                [c.token_ids for c in o.outputs] for o in expected
            ]
        stream = other.stream("the", GREEDY)
        next(stream)
        del stream
        assert generate(other, "the")[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
        assert_idle(engine_of(other))
