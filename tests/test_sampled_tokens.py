"""What a model's tokens and log-probabilities depend on, and what not. Names with b… are the field reports."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyvllm import LLM, SamplingParams
from pyvllm.outputs import CompletionOutput, RequestOutput
from tests.idle import assert_idle, engine_of
from tests.small_llm import OPTIONS, generate

PROMPT = [5, 6, 7]
VOCAB = 320


def say(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> CompletionOutput:
    return generate(llm, [prompt], SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | fields)))[0].outputs[0]


# --- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [False, True])
def test_b049_a_seeded_request_beside_one_without(tiny_llama: Path, run_ahead: bool) -> None:
    seeded, unseeded = (SamplingParams(max_tokens=16, ignore_eos=True, seed=seed) for seed in (1, None))
    with LLM(str(tiny_llama), async_scheduling=run_ahead, **OPTIONS) as llm:
        found = []
        for i in range(4):
            # Seeds of all generators that a sampler might read.
            torch.manual_seed(i)
            np.random.seed(i)
            random.seed(i)
            before = torch.get_rng_state()
            found.append([output.outputs[0].token_ids for output in generate(llm, [PROMPT] * 2, [seeded, unseeded])])
            assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from it"
        alone = say(llm, max_tokens=16, seed=1).token_ids
    assert [first for first, _ in found] == [alone] * 4
    assert len({tuple(second) for _, second in found}) == 4


def test_engines_of_one_seed_repeat_what_has_none(tiny_llama: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with LLM(str(tiny_llama), seed=seed, **OPTIONS) as llm:
            outputs = generate(llm, [PROMPT] * 2, SamplingParams(n=2, max_tokens=12))
            return [completion.token_ids for output in outputs for completion in output.outputs]

    first = run(3)
    assert run(3) == first
    assert len({tuple(ids) for ids in first + run(4)}) == 8


@pytest.mark.parametrize("seed", [0, -2, 2**63 - 1, -(2**63)])
def test_sample_i_uses_seed_plus_i_also_at_the_ends_of_its_range(llm: LLM, seed: int) -> None:
    outputs = generate(llm, PROMPT, SamplingParams(n=3, seed=seed, max_tokens=8, ignore_eos=True))[0].outputs
    for i, completion in enumerate(outputs):
        own = (seed + i + 2**63) % 2**64 - 2**63
        if own != -1:  # which asks for no seed
            assert say(llm, seed=own, max_tokens=8).token_ids == completion.token_ids


# --- temperature and filters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-5, 1e-6, 1e-30, 0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}])
def test_b054_tiny_temperatures_are_greedy(llm: LLM, temperature: float, filters: dict[str, Any]) -> None:
    greedy = say(llm, temperature=0, max_tokens=32, logprobs=2)
    assert greedy.logprobs is not None
    gaps = [abs(np.diff([entry.logprob for entry in row.values()])[0]) for row in greedy.logprobs]
    # Where the two best tokens are as close as the temperature, both may be drawn.
    least = 0.3 if temperature == 1e-2 else 1e-3
    certain = [i for i, gap in enumerate(gaps) if gap > least]
    assert len(certain) > 16
    prompts = [PROMPT + greedy.token_ids[:i] for i in certain]
    for seed in range(3):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=1, logprobs=0, **filters)
        found = [output.outputs[0] for output in generate(llm, prompts, params)]
        assert [one.token_ids[0] for one in found] == [greedy.token_ids[i] for i in certain]
        assert all(math.isfinite(one.cumulative_logprob or math.nan) for one in found)
    if temperature < 1e-5:
        assert say(llm, temperature=temperature, seed=1, max_tokens=32, **filters).token_ids == greedy.token_ids


def test_great_temperatures_are_nearly_uniform(llm: LLM) -> None:
    params = [SamplingParams(temperature=1e4, seed=seed, max_tokens=1) for seed in range(256)]
    tokens = [output.outputs[0].token_ids[0] for output in generate(llm, [PROMPT] * 256, params)]
    # Of 320 equally probable tokens 256 draws give 176 different ones, with a standard deviation of 6.
    assert 150 < len(set(tokens)) < 200


@pytest.mark.parametrize("seed", [0, 1])
def test_b052_edges_of_top_k(llm: LLM, seed: int) -> None:
    free = say(llm, seed=seed).token_ids
    for top_k in (-1, 0, VOCAB, VOCAB + 1, 10**9, 2**63 - 1):
        assert say(llm, seed=seed, top_k=top_k).token_ids == free
    assert say(llm, seed=seed, top_k=1).token_ids == say(llm, temperature=0).token_ids


@pytest.mark.parametrize("fields", [{"top_p": 0}, {"min_p": 1}, {"top_k": 1}])
def test_b053_b057_filters_at_their_ends_are_greedy_or_nothing(llm: LLM, fields: dict[str, Any]) -> None:
    free, greedy = say(llm, seed=5).token_ids, say(llm, temperature=0).token_ids
    assert free != greedy
    assert say(llm, seed=5, top_p=1, min_p=0, top_k=0).token_ids == free
    for seed in range(4):
        assert say(llm, seed=seed, temperature=2, **fields).token_ids == greedy


def test_b058_bias_forces_and_bans_at_each_step(llm: LLM) -> None:
    assert say(llm, temperature=0, logit_bias={7: 100}).token_ids == [7] * 12
    greedy = say(llm, temperature=0).token_ids
    banned = dict.fromkeys(greedy, -100.0)
    assert not set(say(llm, temperature=0, logit_bias=banned).token_ids) & set(greedy)
    assert say(llm, temperature=0, logit_bias={}).token_ids == greedy


# --- log-probabilities ------------------------------------------------------------------------------------------------


def values(entries: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in row.items()} for row in entries]


def test_b074_raw_logprobs_do_not_move_with_filters(llm: LLM) -> None:
    greedy = say(llm, temperature=0, logprobs=4)
    narrow = say(llm, temperature=1, top_k=1, top_p=0.01, seed=2, logprobs=4)
    assert narrow.token_ids == greedy.token_ids
    for row, expected in zip(values(narrow.logprobs), values(greedy.logprobs), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def llms(tiny_llama: Path) -> Iterator[dict[str, LLM]]:
    """Engines that may tell all log-probabilities: roomy; with chunks, run-ahead and no cache; and one of each mode."""
    options = OPTIONS | {"max_logprobs": -1}
    made = {
        "roomy": LLM(str(tiny_llama), **options),
        "chunks": LLM(
            str(tiny_llama), max_num_batched_tokens=5, enable_prefix_caching=False, async_scheduling=True, **options
        ),
    }
    yield made
    for llm in made.values():
        engine = engine_of(llm)
        while engine.has_unfinished():  # what was launched ahead
            engine.step()
        assert_idle(engine)
        llm.close()


@pytest.mark.parametrize("engine", ["roomy", "chunks"])
@pytest.mark.parametrize("count", [0, 3, -1])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"n": 3, "seed": 4, "top_k": 9},
        {"seed": 4, "allowed_token_ids": list(range(40, 60)), "bad_words": ["A"]},
        {"temperature": 0, "detokenize": False, "logit_bias": {50: 100.0}},
        {"temperature": 0, "ignore_eos": False, "stop": "q", "logit_bias": {ord("q") - 33: 3.0, 257: 2.0}},
        {"seed": 9, "stop_token_ids": list(range(0, 320, 9)), "min_tokens": 2},
    ],
)
def test_logprobs_of_each_token(llms: dict[str, LLM], engine: str, count: int, fields: dict[str, Any]) -> None:
    """A row for each token, its own first, whatever restricts or ends it; the same cold, cached and in chunks."""
    llm, prompt = llms[engine], [9, *range(60, 90), 256]
    params = SamplingParams(**({"max_tokens": 9, "ignore_eos": True} | fields), logprobs=count, prompt_logprobs=count)
    for _ in range(2):  # cold, and with a cached prefix
        (output,) = generate(llm, [prompt], params)
        check_rows(output.prompt_logprobs[1:] if output.prompt_logprobs else [], prompt[1:], count)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for completion in output.outputs:
            assert completion.logprobs is not None
            check_rows(completion.logprobs, completion.token_ids, count)
            own = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(own), abs=1e-4)
            assert params.detokenize or not completion.text
            check_values(llms["roomy"], prompt, completion)


def check_rows(rows: Any, tokens: list[int], count: int) -> None:
    assert len(rows) == len(tokens)
    for row, token in zip(rows, tokens, strict=True):
        entries = list(row.items())
        assert entries[0][0] == token
        by_rank = sorted((entry.rank, token_id) for token_id, entry in entries[1:])
        assert [token_id for _, token_id in by_rank] == [token_id for token_id, _ in entries[1:]]
        if count == -1:
            assert len(row) == VOCAB
            assert sum(math.exp(entry.logprob) for entry in row.values()) == pytest.approx(1, abs=1e-4)
        else:
            assert len(row) in (count, count + 1)
            assert set(range(1, count + 1)) <= {entry.rank for entry in row.values()}


def check_values(llm: LLM, prompt: list[int], completion: CompletionOutput) -> None:
    """Each token's log-probability is what it has as part of a prompt: the model's own, whatever was transformed."""
    whole = prompt + completion.token_ids
    (output,) = generate(llm, [whole], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    rows = values(output.prompt_logprobs[len(prompt) :])
    for expected, row in zip(rows, values(completion.logprobs), strict=True):
        assert expected.items() <= {token: pytest.approx(value, abs=1e-4) for token, value in row.items()}.items()


def test_no_logprobs_unless_asked_for(llm: LLM) -> None:
    (output,) = generate(llm, [PROMPT], SamplingParams(max_tokens=2))
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


# --- ends of sequence -------------------------------------------------------------------------------------------------


def test_b086_several_ends_of_sequence_and_min_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"eos_token_id": [257, 5]}')
    with LLM(str(model), **OPTIONS) as llm:
        for first, second in ((5, 257), (257, 5)):
            fields: dict[str, Any] = {"temperature": 0, "logit_bias": {first: 100.0, second: 90.0}}
            ended = say(llm, ignore_eos=False, min_tokens=3, max_tokens=9, **fields)
            assert len(ended.token_ids) == 4
            assert not {5, 257} & set(ended.token_ids[:3])
            assert (ended.token_ids[3], ended.finish_reason) == (first, "stop")
            assert ended.stop_reason == (5 if first == 5 else None)
            ignored = say(llm, max_tokens=6, **fields)
            assert (ignored.token_ids, ignored.finish_reason) == ([first] * 6, "length")


def finished(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_b035_b034_seeds_penalties_and_min_tokens_survive_preemption(tiny_llama: Path) -> None:
    params = [
        SamplingParams(
            seed=7 + i, max_tokens=40, min_tokens=30, frequency_penalty=2, logit_bias={257: 4.0}, stop_token_ids=[9]
        )
        for i in range(6)
    ]
    prompts = [[i, *range(60, 84)] for i in range(6)]
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        alone = [finished(generate(llm, [prompt], one)) for prompt, one in zip(prompts, params, strict=True)]
    with LLM(str(tiny_llama), **(OPTIONS | {"num_gpu_blocks_override": 20}), max_model_len=80) as llm:
        outputs = generate(llm, prompts, params)
        assert any(output.metrics and output.metrics.num_preemptions for output in outputs)
        assert [finished([output]) for output in outputs] == alone
    assert all(30 < len(ids[0]) <= 40 and not {9, 257} & set(ids[0][:30]) for ids in alone)
