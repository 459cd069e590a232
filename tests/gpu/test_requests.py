"""All that a request can ask for, on a GPU: what comes back is what a CPU gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm import LLM, AsyncLLM, EngineArgs, RequestOutput, SamplingParams
from pyvllm.inputs import TokensPrompt
from pyvllm.logprobs import LogprobDict
from pyvllm.sampling_params import StructuredOutputsParams
from tests.async_requests import collect
from tests.conftest import TinyCheckpoint
from tests.gpu.on_gpu import OPTIONS

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

SHARED = [7 * i % 250 for i in range(70)]
THREE_NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 3, "maxItems": 3}
PROCESSORS = {"next": "tests.some_processors:next_one"}
REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "penalties": SamplingParams(
        temperature=0, max_tokens=40, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
    ),
    "filters": SamplingParams(seed=1, max_tokens=40, temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
    "all of the vocabulary": SamplingParams(seed=2, max_tokens=40, temperature=0.8),
    "samples": SamplingParams(n=4, seed=3, max_tokens=20),
    "biases": SamplingParams(seed=4, max_tokens=20, min_tokens=15, logit_bias={5: 3.0, 257: 9.0, 11: -100.0}),
    "few tokens": SamplingParams(seed=5, max_tokens=20, allowed_token_ids=list(range(64, 90))),
    "words not said": SamplingParams(seed=6, max_tokens=20, bad_words=["a", "the"], allowed_token_ids=[64, 65, 260]),
    "ends": SamplingParams(seed=7, max_tokens=60, stop=["A", "é"], stop_regex="[0-9]", stop_token_ids=[200]),
    "log-probabilities": SamplingParams(temperature=0, max_tokens=20, logprobs=5, prompt_logprobs=2),
    "drawn with log-probabilities": SamplingParams(seed=8, max_tokens=20, logprobs=1, top_k=50),
    "beams": SamplingParams(use_beam_search=True, best_of=4, n=4, temperature=0, max_tokens=20),
    "JSON": SamplingParams(seed=9, max_tokens=40, structured_outputs=StructuredOutputsParams(json=THREE_NUMBERS)),
    "an expression": SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[a-f]{3}(-[0-9]{2}){2}")
    ),
    "choices": SamplingParams(
        n=3, seed=10, max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["first", "second", "third"])
    ),
    "a function": SamplingParams(seed=11, max_tokens=20, logits_processors=["next"]),
}
PROMPTS = [(SHARED if i % 2 else []) + [(13 * i + 7 * j) % 250 for j in range(3 + 4 * i)] for i in range(len(REQUESTS))]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen3")


def generate(model: Path, **options: Any) -> list[RequestOutput]:
    with LLM(str(model), logits_processors=PROCESSORS, **(OPTIONS | options)) as llm:
        return llm.generate(PROMPTS, list(REQUESTS.values()), use_tqdm=False)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[RequestOutput]:
    return generate(model, device="cpu")


def values(entries: Sequence[LogprobDict | None] | None) -> list[dict[int, float]]:
    return [{token_id: entry.logprob for token_id, entry in (entries_of or {}).items()} for entries_of in entries or []]


def assert_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for what, mine, its in zip(REQUESTS, found, expected, strict=True):
        for one, other in zip(mine.outputs, its.outputs, strict=True):
            assert one.token_ids == other.token_ids, what
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason), what
            assert one.stop_reason == other.stop_reason, what
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3), what
            assert values(one.logprobs) == [pytest.approx(entry, abs=1e-4) for entry in values(other.logprobs)], what
        its_prompt = values(its.prompt_logprobs)
        assert values(mine.prompt_logprobs) == [pytest.approx(entry, abs=1e-4) for entry in its_prompt], what


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_requests_of_every_kind_at_once(model: Path, expected: list[RequestOutput], eager: bool) -> None:
    assert_equal(generate(model, enforce_eager=eager), expected)


def test_an_engine_in_a_process_of_its_own(model: Path, expected: list[RequestOutput]) -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), logits_processors=PROCESSORS, **OPTIONS))

    async def run() -> list[RequestOutput]:
        streams = (
            collect(llm, TokensPrompt(prompt_token_ids=prompt), params)
            for prompt, params in zip(PROMPTS, REQUESTS.values(), strict=True)
        )
        return [outputs[-1] for outputs in await asyncio.gather(*streams)]

    try:
        assert_equal(asyncio.run(run()), expected)
    finally:
        llm.shutdown()
