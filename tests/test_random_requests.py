"""Random parameters, many at a time: a request gets what it gets alone, and nothing of it stays behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLMEngine, ParameterError, RequestOutput, SamplingParams
from pyvllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from tests.idle import assert_idle
from tests.test_solo_run import Setup, engine

VOCAB = 320
EOS = 257
SETUPS = [
    Setup(block_size=4, num_blocks=40, budget=16, swap_blocks=40, max_num_seqs=16, run_ahead=True),
    Setup(block_size=8, num_blocks=24, budget=64, swap_blocks=20, max_num_seqs=12),
    Setup(block_size=1, num_blocks=150, budget=32, mode="recompute", max_num_seqs=12, run_ahead=True),
]
FORMS: list[dict[str, Any]] = [
    {"regex": "[ab]{1,9}"},
    {"choice": ["x", "xy", "yes"]},
    {"json": {"type": "integer"}},
    {"regex": "(é|😀){2,5}"},
    {"grammar": 'root ::= "a" root | "b"'},
]


def random_fields(rng: random.Random) -> dict[str, Any]:
    """Fields of `SamplingParams`, now and then such that contradict one another."""
    optional: dict[str, Any] = {
        "n": rng.randint(1, 3),
        "best_of": rng.randint(1, 4),
        "top_k": rng.choice([-1, 1, 2, 50, VOCAB - 1, 10**9]),
        "top_p": rng.choice([0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
        "min_p": rng.choice([1e-9, 0.1, 0.5, 1]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.choice([1e-3, 0.5, 1.3, 100, 1e30]),
        "stop": rng.sample(["a", "the", "e ", " ", "\ufffd", "é", "xyz"], rng.randint(1, 3)),
        "stop_regex": rng.choice(["[0-9]", "[a-e]{2}", ".[^a]x", r"\s"]),
        "stop_token_ids": rng.sample(range(VOCAB), rng.randint(1, 40)),
        "bad_words": rng.sample(["a", "the", "in on", "e", "zz"], rng.randint(1, 2)),
        "min_tokens": rng.choice([1, 3, 8]),
        "logprobs": rng.choice([0, 1, 5]),
        "prompt_logprobs": rng.choice([0, 1, 5]),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.randint(1, 20))},
        "allowed_token_ids": rng.sample(range(VOCAB), rng.choice([1, 2, 20, 300])),
        "detokenize": False,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": rng.choice([1, 3, -1]),
        "structured_outputs": StructuredOutputsParams(**rng.choice(FORMS)),
    }
    fields = {name: value for name, value in optional.items() if rng.random() < 0.15}
    fields |= {"max_tokens": rng.choice([1, 2, 5, 12, None]), "output_kind": rng.choice(list(RequestOutputKind))}
    return fields | {"temperature": rng.choice([0, 1e-6, 1e-5, 0.3, 1, 5, 1e4]), "seed": rng.randrange(1 << 40)}


def facts(output: RequestOutput) -> list[tuple[object, ...]]:
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


def run(llm: LLMEngine, wanted: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, RequestOutput]:
    """The last output of each request that the engine takes, with all its text and ids even if it gave deltas."""
    for name, (prompt, params) in list(wanted.items()):
        try:
            llm.add_request(name, {"prompt_token_ids": prompt}, params)
        except ParameterError:
            del wanted[name]
    done: dict[str, RequestOutput] = {}
    so_far: dict[tuple[str, int], tuple[str, list[int]]] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            for one in output.outputs:
                if wanted[output.request_id][1].output_kind == RequestOutputKind.DELTA:
                    text, ids = so_far.get((output.request_id, one.index), ("", []))
                    one.text, one.token_ids = text + one.text, ids + one.token_ids
                    so_far[output.request_id, one.index] = one.text, one.token_ids
            if output.finished:
                done[output.request_id] = output
        llm._engine.check_invariants()
    while llm._engine.has_unfinished():  # what was launched ahead
        llm.step()
    assert_idle(llm._engine)
    return done


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_random_requests_together_equal_their_solo_runs(tiny_llama: Path, setup: Setup) -> None:
    rng = random.Random(str(setup))
    crowd, roomy = engine(tiny_llama, setup), engine(tiny_llama, Setup(caching=False))
    compared = 0
    for _ in range(3):
        shared = [rng.randrange(VOCAB) for _ in range(20)]
        wanted = {}
        for i in range(14):
            prompt = shared[: rng.randint(0, 20)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            try:
                wanted[f"r{i}"] = (prompt, SamplingParams(**random_fields(rng)))
            except ParameterError:
                continue
        done = run(crowd, wanted)
        assert done.keys() == wanted.keys()
        for name, output in done.items():
            prompt, params = wanted[name]
            params.output_kind = RequestOutputKind.FINAL_ONLY
            alone = run(roomy, {name: (prompt, params)})[name]
            assert (output.error is None) == (alone.error is None), params
            if output.error is None:
                compared += 1
                check(output, alone, params)
    assert compared > 20


def check(output: RequestOutput, alone: RequestOutput, params: SamplingParams) -> None:
    for one in alone.outputs:
        assert params.allowed_token_ids is None or set(one.token_ids) <= {*params.allowed_token_ids, EOS}
        assert params.max_tokens is None or len(one.token_ids) <= params.max_tokens
        assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
        assert one.cumulative_logprob is None or one.cumulative_logprob <= 1e-3
    assert facts(output) == facts(alone), params
