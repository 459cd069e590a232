"""The solo-run oracle: in float32, each request's tokens equal those of its solo run, whatever runs beside it.

32 requests of every kind at once (greedy, seeded, penalties, n = 4, beams), over block sizes, token budgets, prefix
caching, pools so small that groups are recomputed and swapped, aborts, and with each step launched before the one
before it is committed.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pyvllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from pyvllm.config import PreemptionMode
from pyvllm.logprobs import LogprobDict
from tests.conftest import TinyCheckpoint
from tests.idle import assert_idle

MAX_LEN = 64
SHARED = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to run the same requests."""

    block_size: int = 16
    budget: int = 64
    caching: bool = True
    num_blocks: int = 1024
    swap_blocks: int = 0
    mode: PreemptionMode = "auto"
    run_ahead: bool = False
    max_num_seqs: int = 64


def requests(beams: bool) -> dict[str, tuple[list[int], SamplingParams]]:
    """32 requests: every second prompt begins as others do."""
    made = {}
    for i in range(32):
        own = [(37 * i + 5 * j) % 250 for j in range(1 + 3 * i % 17)]
        prompt = (SHARED + own) if i % 2 else own
        options: dict[str, Any] = {"max_tokens": 5 + i % 9, "temperature": 0.0, "ignore_eos": bool(i % 3)}
        if i % 8 == 1:
            options |= {"n": 4, "temperature": 0.8, "seed": 100 + i}
        elif i % 8 == 3:
            options |= {"temperature": 1.2, "seed": i, "top_k": 20, "top_p": 0.9, "logprobs": 2}
        elif i % 8 == 5:
            options |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "min_tokens": 5}
        elif i % 8 == 6 and beams:
            options |= {"use_beam_search": True, "best_of": 3, "n": 2, "early_stopping": bool(i % 16 > 8)}
        elif i % 8 == 7:
            options |= {"prompt_logprobs": 1, "logit_bias": {5: 2.0, 9: -100.0}}
        made[f"r{i}"] = (prompt, SamplingParams(**options))
    return made


def engine(model: Path, setup: Setup) -> LLMEngine:
    """An engine whose host pool has `swap_blocks` blocks."""
    bytes_per_block = 2 * 2 * 2 * setup.block_size * 16 * 4  # layers, K and V, KV heads, tokens, head size, float32
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            dtype="float32",
            max_model_len=MAX_LEN,
            block_size=setup.block_size,
            gpu_memory_gib=4,  # on a GPU that other processes use too
            num_gpu_blocks_override=setup.num_blocks,
            swap_space=setup.swap_blocks * bytes_per_block / 2**30,
            preemption_mode=setup.mode,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.budget,
            enable_prefix_caching=setup.caching,
            async_scheduling=setup.run_ahead,
        )
    )


def run(engine: LLMEngine, wanted: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, RequestOutput]:
    """All requests at once, to their ends."""
    for name, (prompt, params) in wanted.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def tokens(output: RequestOutput) -> list[list[int]]:
    """Generated ids of each sequence."""
    return [completion.token_ids for completion in output.outputs]


def values(entry: LogprobDict | None) -> dict[int, float]:
    """Id -> log-probability; nothing for the first token of a prompt."""
    return {token_id: logprob.logprob for token_id, logprob in (entry or {}).items()}


@pytest.fixture(scope="module")
def model(tiny_checkpoint: TinyCheckpoint) -> Path:
    """A tiny LLaMA."""
    return tiny_checkpoint("llama")


@cache
def solo_runs(model: Path) -> dict[str, RequestOutput]:
    """Each request alone, in an engine with room for everything and without caching."""
    roomy = engine(model, Setup(caching=False))
    outputs: dict[str, RequestOutput] = {}
    for name, request in requests(beams=True).items():
        outputs |= run(roomy, {name: request})
    return outputs


def assert_equals_solo(model: Path, outputs: dict[str, RequestOutput]) -> None:
    """Tokens are equal, log-probabilities close."""
    solo = solo_runs(model)
    for name, output in outputs.items():
        assert tokens(output) == tokens(solo[name]), name
        for mine, its in zip(output.outputs, solo[name].outputs, strict=True):
            assert mine.text == its.text
            assert mine.finish_reason == its.finish_reason
            if mine.cumulative_logprob is not None:
                assert mine.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-3)
        for entry, solo_entry in zip(output.prompt_logprobs or [], solo[name].prompt_logprobs or [], strict=True):
            assert values(entry) == pytest.approx(values(solo_entry), abs=1e-4)


SETUPS = [
    *(
        Setup(block_size=block_size, budget=budget, caching=caching)
        for block_size, budget, caching in [
            (1, 64, True),
            (4, 7, True),
            (16, 1, True),
            (16, 64, False),
            (4, 1, False),
            (1, 7, False),
            (4, 64, True),
        ]
    ),
    Setup(block_size=4, budget=64, num_blocks=44, swap_blocks=60),
    Setup(block_size=4, budget=7, num_blocks=24, swap_blocks=16, caching=False),
    Setup(block_size=1, budget=64, num_blocks=170, swap_blocks=400),
    Setup(block_size=4, budget=64, num_blocks=44, mode="recompute"),
    Setup(block_size=4, budget=64, num_blocks=44, swap_blocks=60, mode="swap"),
    Setup(block_size=4, budget=64, run_ahead=True),
    Setup(block_size=4, budget=7, num_blocks=24, swap_blocks=60, run_ahead=True),
    Setup(block_size=16, budget=64, num_blocks=9, swap_blocks=20, run_ahead=True, caching=False, max_num_seqs=9),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_32_requests_at_once_equal_their_solo_runs(model: Path, setup: Setup) -> None:
    """Whatever the memory, the budget and the neighbours."""
    llm = engine(model, setup)
    beams = setup.budget >= 3  # a beam group's last tokens need one step
    outputs = run(llm, requests(beams))
    if not beams:
        outputs = {name: output for name, output in outputs.items() if int(name[1:]) % 8 != 6}
    assert_equals_solo(model, outputs)
    assert len(outputs) == (32 if beams else 28)
    stats = llm._engine.stats()
    assert (stats.num_copies > 0) == (setup.block_size > 1)  # blocks of one token have no partly filled tails
    if setup.num_blocks < 1024:
        swaps = setup.mode != "recompute" and setup.swap_blocks > 0
        assert (stats.num_swap_outs > 0) == swaps
        assert (stats.num_recomputations > 0) == (setup.mode != "swap")
    if setup.caching:
        assert stats.prefix_hits > 0
    assert_idle(llm._engine)


def test_a_warm_prefix_cache_changes_nothing(model: Path) -> None:
    """The same requests twice in one engine: the second time their prompts are cached."""
    llm = engine(model, Setup(block_size=4))
    run(llm, requests(beams=True))
    outputs = run(llm, requests(beams=True))
    assert_equals_solo(model, outputs)
    assert outputs["r31"].num_cached_tokens == 0  # wants log-probabilities of its prompt
    assert outputs["r29"].num_cached_tokens > len(SHARED) - 4


@pytest.mark.parametrize("run_ahead", [False, True])
def test_aborts_at_any_step_leave_the_others_as_they_were(model: Path, run_ahead: bool) -> None:
    """A third of the requests is dropped, one a step, while the pool is too small for all."""
    llm = engine(model, Setup(block_size=4, num_blocks=44, swap_blocks=60, run_ahead=run_ahead))
    wanted = requests(beams=True)
    for name, (prompt, params) in wanted.items():
        llm.add_request(name, {"prompt_token_ids": prompt}, params)
    victims = iter([name for i, name in enumerate(wanted) if i % 3 == 0])
    done: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step() if output.finished}
        llm._engine.check_invariants()
        llm.abort_request(next(victims, []))
    assert len(done) >= 21
    assert_equals_solo(model, done)
    assert_idle(llm._engine)
