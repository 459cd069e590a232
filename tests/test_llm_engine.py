"""`LLMEngine`: requests in, steps, outputs out."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pyvllm import LLM, BeamSearchParams, EngineArgs, LLMEngine, ParameterError, SamplingParams
from pyvllm.outputs import RequestOutput
from tests.conftest import TinyCheckpoint
from tests.idle import assert_idle

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 128, "block_size": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture
def llm_engine(folder: Path) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(model=str(folder), **OPTIONS))


def run_to_end(engine: LLMEngine) -> dict[str, RequestOutput]:
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished


def test_llm_engine_steps(folder: Path, llm_engine: LLMEngine) -> None:
    assert llm_engine.add_request("a", "the", GREEDY) == "a"
    llm_engine.add_request("b", {"prompt_token_ids": [1, 2]}, GREEDY, priority=3)
    llm_engine.add_request("c", None, GREEDY, [1, 2])
    llm_engine.add_request("d", "shown", GREEDY, prompt_token_ids=[1, 2])
    assert llm_engine.get_num_unfinished_requests() == 4
    outputs = llm_engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1, 1]
    finished = run_to_end(llm_engine)
    with LLM(str(folder), **OPTIONS) as llm:
        prompts: list[Any] = ["the", [1, 2]]
        the, ids = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert finished["a"].outputs[0].token_ids == the.outputs[0].token_ids
    assert all(finished[name].outputs[0].token_ids == ids.outputs[0].token_ids for name in "bcd")
    assert (finished["c"].prompt, finished["d"].prompt) == (None, "shown")
    assert llm_engine.get_num_unfinished_requests() == 0
    assert llm_engine.step() == []


def test_llm_engine_ids(llm_engine: LLMEngine) -> None:
    with pytest.raises(TypeError, match="request_id must be a string, got int"):
        llm_engine.add_request(1, "the", GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="request_id has a lone surrogate at index 1"):
        llm_engine.add_request("a\ud800", "the", GREEDY)
    llm_engine.add_request("a", "the", GREEDY)
    with pytest.raises(ValueError, match="a"):
        llm_engine.add_request("a", "the", GREEDY)
    assert llm_engine.get_num_unfinished_requests() == 1
    llm_engine.add_request("ab", "the", GREEDY)
    llm_engine.abort_request(["a", "unknown"])
    assert llm_engine.get_num_unfinished_requests() == 1
    assert set(run_to_end(llm_engine)) == {"ab"}
    assert_idle(llm_engine._engine)


def test_llm_engine_arguments_of_the_wrong_kind(llm_engine: LLMEngine) -> None:
    wrong: list[Any] = [{}, [GREEDY], BeamSearchParams(beam_width=2, max_tokens=2)]
    for params in wrong:
        with pytest.raises(TypeError, match="params must be SamplingParams or None, got "):
            llm_engine.add_request("a", "the", params)
    with pytest.raises(ParameterError, match=r"priority must be a 64-bit integer, got 1\.5"):
        llm_engine.add_request("a", "the", GREEDY, priority=cast(Any, 1.5))
    assert not llm_engine.has_unfinished_requests()
    llm_engine.add_request("a", None, GREEDY, cast(Any, np.array([1, 2])))
    llm_engine.add_request("b", "the", GREEDY, cast(Any, np.float32(1.5)))
    finished = run_to_end(llm_engine)
    assert (finished["a"].prompt_token_ids, finished["b"].prompt) == ([1, 2], "the")


def test_llm_engine_logs_statistics(llm_engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    llm_engine.add_request("a", "the", GREEDY)
    run_to_end(llm_engine)
    with caplog.at_level("INFO", "pyvllm"):
        llm_engine.do_log_stats()
    assert "running 0, waiting 0" in caplog.text
    assert "generation 0.0 tokens/s" not in caplog.text
