"""n sequences of one prompt: what they share, and that each is what it would be alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLM, SamplingParams
from tests.idle import engine_of
from tests.small_llm import OPTIONS, generate

PROMPT = [(7 * i) % 250 for i in range(21)]
"""Two blocks of 8 tokens, and 5 tokens of a third."""


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": 1.5, "min_p": 0.02, "stop": ["a"], "repetition_penalty": 1.2, "logprobs": 2},
    ],
)
@pytest.mark.parametrize("run_ahead", [False, True])
def test_eight_sequences_are_eight_solo_runs(tiny_llama: Path, fields: dict[str, Any], run_ahead: bool) -> None:
    with LLM(str(tiny_llama), async_scheduling=run_ahead, **OPTIONS) as llm:
        params = SamplingParams(n=8, seed=40, max_tokens=32, **fields)
        (together,) = generate(llm, [PROMPT], params)
        assert len({tuple(completion.token_ids) for completion in together.outputs}) == 8
        for i, completion in enumerate(together.outputs):
            (alone,) = generate(llm, [PROMPT], SamplingParams(seed=40 + i, max_tokens=32, **fields))
            assert completion.index == i
            assert (completion.token_ids, completion.text) == (alone.outputs[0].token_ids, alone.outputs[0].text)
            assert (completion.finish_reason, completion.stop_reason) == (
                alone.outputs[0].finish_reason,
                alone.outputs[0].stop_reason,
            )


@pytest.mark.parametrize(("prompt_len", "copies"), [(21, 7), (24, 0), (8, 0), (9, 7)])
def test_the_prompt_is_computed_once_and_only_its_tail_is_copied(llm: LLM, prompt_len: int, copies: int) -> None:
    engine = engine_of(llm)
    engine.reset_prefix_cache()
    before = engine.stats()
    prompt = (PROMPT + PROMPT)[:prompt_len]
    generate(llm, [prompt], SamplingParams(n=8, seed=1, max_tokens=5, ignore_eos=True))
    after = engine.stats()
    # The last of five tokens is sampled, never computed.
    assert after.step_tokens - before.step_tokens == prompt_len + 8 * 4
    assert after.prompt_tokens - before.prompt_tokens == prompt_len
    assert after.generation_tokens - before.generation_tokens == 8 * 5
    assert after.num_copies - before.num_copies == copies


def test_a_seed_gives_different_sequences_that_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=42, max_tokens=16)
    first, again = (generate(llm, [PROMPT], params)[0].outputs for _ in range(2))
    assert [completion.token_ids for completion in first] == [completion.token_ids for completion in again]
    assert len({tuple(completion.token_ids) for completion in first}) == 4


def test_greedy_sequences_are_all_the_same(llm: LLM) -> None:
    outputs = generate(llm, [PROMPT], SamplingParams(n=3, temperature=0, max_tokens=8))[0].outputs
    assert len(outputs) == 3
    assert len({tuple(completion.token_ids) for completion in outputs}) == 1
