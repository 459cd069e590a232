"""The hardware's limit against figures computed by hand, and against those published for the fixed workloads."""

import dataclasses
import math

import pytest
import torch

from pyvllm.bench.models import BENCH_MODELS
from pyvllm.bench.roofline import Hardware, Limits, ModelCost, ideal_seconds, model_cost, step_limits
from pyvllm.bench.workloads import Request, Workload, fixed_workload
from pyvllm.config import EngineArgs
from pyvllm.models import build_spec
from tests.tiny_models import plain_config

H200 = Hardware(bandwidth=4.3e12, flops=790e12)
COST = ModelCost(layer_params=1000, head_params=100, kv_bytes=16, pair_flop=6, weight_bytes=2)
SLOW = Hardware(bandwidth=1000.0, flops=2000.0)
"""A token costs a layer's product as many seconds as reading the weights takes for each 2 tokens."""


def cost_of(name: str) -> ModelCost:
    cost = model_cost(build_spec(BENCH_MODELS[name]), torch.bfloat16)
    assert cost is not None
    return cost


def limits(kv_tokens: float = math.inf, max_num_seqs: int = 1024, budget: int = 8192) -> Limits:
    return Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, kv_tokens=kv_tokens)


def work(*lengths: tuple[int, int], n: int = 1, shared_len: int = 0) -> Workload:
    requests = [Request(prompt=[1] * prompt, output_len=output) for prompt, output in lengths]
    return Workload(name="test", requests=requests, n=n, shared_len=shared_len)


def test_costs_of_the_models() -> None:
    assert dataclasses.asdict(cost_of("llama3-8b")) == {
        "layer_params": 6_979_584_000,
        "head_params": 525_336_576,
        "kv_bytes": 131_072,
        "pair_flop": 524_288,
        "weight_bytes": 2,
    }
    small = cost_of("qwen3-0.6b")
    assert (small.layer_params, small.head_params, small.kv_bytes) == (440_466_432, 155_582_464, 114_688)


@pytest.mark.parametrize(
    ("model", "kv_tokens", "name", "tokens_per_s"),
    [
        ("llama3-8b", 905e3, "nano", 13_500),
        ("llama3-8b", 905e3, "sharegpt", 17_500),
        ("llama3-8b", 905e3, "isl1024osl512", 10_600),
        ("llama3-8b", 905e3, "decode1", 286),
        ("llama3-8b", 905e3, "prefix", 65_536 / 2.20),
        ("llama3-8b", 905e3, "prefill4k", 64 / 5.11),
        ("qwen3-0.6b", 1.16e6, "nano", 36_600),
        ("qwen3-0.6b", 1.16e6, "sharegpt", 69_700),
        ("qwen3-0.6b", 1.16e6, "isl1024osl512", 26_200),
        ("qwen3-0.6b", 1.16e6, "decode1", 3520),
        ("qwen3-0.6b", 1.16e6, "prefix", 65_536 / 0.39),
    ],
)
def test_limits_of_an_h200(model: str, kv_tokens: float, name: str, tokens_per_s: float) -> None:
    fixed = fixed_workload(name, 0)
    found = fixed.output_tokens / ideal_seconds(cost_of(model), H200, limits(kv_tokens), fixed)
    assert found == pytest.approx(tokens_per_s, rel=0.006)


def test_prefixes_that_are_not_shared_cost_their_computation() -> None:
    apart = dataclasses.replace(fixed_workload("prefix", 0), shared_len=0)
    assert ideal_seconds(cost_of("llama3-8b"), H200, limits(905e3), apart) == pytest.approx(13.7, rel=0.01)


def test_one_request_by_hand() -> None:
    prompt_step = max(2.0, 8.0) + max(0.2, 0.1) + 6 * 8**2 / 2 / (0.75 * 2000)
    decode_steps = [max(2.0, 1.0) + 0.2 + context * 16 / 1000 for context in (9, 10)]
    assert ideal_seconds(COST, SLOW, limits(), work((8, 3))) == pytest.approx(prompt_step + sum(decode_steps))


def test_a_prompt_is_cut_by_the_token_budget() -> None:
    steps = [max(2.0, 4.0) + pairs * 6 / (0.75 * 2000) for pairs in (4**2 / 2, (8**2 - 4**2) / 2)]
    assert ideal_seconds(COST, SLOW, limits(budget=4), work((8, 1))) == pytest.approx(sum(steps) + 0.2)


def test_what_does_not_fit_waits() -> None:
    both = work((8, 4), (8, 4))
    alone = ideal_seconds(COST, SLOW, limits(), work((8, 4)))
    together = ideal_seconds(COST, SLOW, limits(), both)
    assert together < 2 * alone
    for tight in (limits(kv_tokens=12), limits(max_num_seqs=1)):
        assert ideal_seconds(COST, SLOW, tight, both) == pytest.approx(2 * alone)


def test_sequences_of_one_request_share_its_prompt() -> None:
    several = ideal_seconds(COST, SLOW, limits(), work((8, 3), n=4))
    prompt_step = max(2.0, 8 + 3) + max(0.2, 0.4) + (6 * 8**2 / 2 + 3 * 6 * (8**2 - 7**2) / 2) / (0.75 * 2000)
    decode_steps = [max(2.0, 4.0) + 0.4 + (8 + 4 * own) * 16 / 1000 for own in (1, 2)]
    assert several == pytest.approx(prompt_step + sum(decode_steps))


def test_limits_of_a_cpu_are_those_of_its_engine() -> None:
    cpu = torch.device("cpu")
    assert step_limits(EngineArgs(model="m"), COST, cpu) == limits(max_num_seqs=256, budget=4096)
    args = EngineArgs(model="m", max_num_seqs=3, max_num_batched_tokens=5)
    assert step_limits(args, COST, cpu) == limits(max_num_seqs=3, budget=5)


def test_models_that_the_formulas_do_not_fit_have_no_limit() -> None:
    spec = build_spec(plain_config())
    assert model_cost(spec, torch.float32) is not None
    assert model_cost(dataclasses.replace(spec, windows=(None, 7, None)), torch.float32) is None
