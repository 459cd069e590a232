"""The engine on a GPU: graphs, run-ahead and cascades change no token, and nothing waits for the device.

Two modules of the rest of the suite run on a GPU too where there is one: equality with transformers, the solo-run
oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pyvllm import LLM, SamplingParams
from pyvllm.step import Header
from tests.conftest import TinyCheckpoint
from tests.gpu.on_gpu import OPTIONS
from tests.idle import engine_of

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

PROMPTS = [[(31 * i + 7 * j) % 250 for j in range(1 + 5 * i % 40)] for i in range(24)]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen3")


def params(i: int) -> SamplingParams:
    """Of every kind, and of different lengths, so that batches shrink through many graph sizes."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": i},
        {"temperature": 0.9, "seed": i, "top_p": 0.8, "top_k": 30},
        {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.2},
    ]
    return SamplingParams(max_tokens=8 + 3 * i, ignore_eos=True, **kinds[i // 6])


def generate(model: Path, **options: Any) -> list[list[int]]:
    with LLM(str(model), **(OPTIONS | options)) as llm:
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        engine_of(llm).check_invariants()
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Each step launched kernel by kernel, once the one before it is committed."""
    found = generate(model, enforce_eager=True, async_scheduling=False)
    assert [len(ids) for ids in found] == [8 + 3 * i for i in range(len(PROMPTS))]
    return found


@pytest.mark.parametrize(("eager", "run_ahead"), [(False, False), (False, True), (True, True)])
def test_graphs_and_run_ahead_change_no_token(
    model: Path, expected: list[list[int]], eager: bool, run_ahead: bool
) -> None:
    assert generate(model, enforce_eager=eager, async_scheduling=run_ahead) == expected


def test_decode_steps_are_replayed(model: Path) -> None:
    with LLM(str(model), **OPTIONS) as llm:
        runner: Any = engine_of(llm)._runner
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert (1, 0, 0) in runner._graphs._recorded


def test_tokens_of_a_cpu_are_those_of_a_gpu(model: Path, expected: list[list[int]]) -> None:
    assert generate(model, device="cpu") == expected


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_read_that_nothing_wrote(model: Path, expected: list[list[int]]) -> None:
    """The start, which compiles kernels without running them, included. New memory holds NaN and the greatest ids."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert generate(model, enforce_eager=True) == expected
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_in_half_precision_too(tiny_checkpoint: TinyCheckpoint, family: str, count: int) -> None:
    """Rounding depends on the number of rows: there are always as many sequences as a graph is for."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    path = tiny_checkpoint(family, sizes | (experts if family == "qwen3_moe" else {}))
    found = []
    for eager in (True, False):
        options = OPTIONS | {"dtype": "bfloat16", "enforce_eager": eager, "async_scheduling": not eager}
        with LLM(str(path), **options) as llm:
            kinds = [
                SamplingParams(temperature=i % 2, seed=i, top_k=20 * (i // 2), max_tokens=30, ignore_eos=True)
                for i in range(count)
            ]
            outputs = llm.generate([list(range(9 * i, 9 * i + 7)) for i in range(count)], kinds, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert len({tuple(ids) for ids in found[0]}) == count


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_waits_for_the_device_but_for_results(model: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all is compiled and recorded: in steps of prompts, decode steps, and both beside each other. (The one wait
    for a step's results, on an event, is not what torch counts.)
    """
    # Three at a time, of different lengths: prompts begin beside others' decode steps. The first three are longer than
    # a token, which would make a decode step of a prompt.
    prompts, all_params = PROMPTS[::-1], [params(i) for i in reversed(range(len(PROMPTS)))]
    options = OPTIONS | {"dtype": dtype, "max_num_seqs": 3, "enable_prefix_caching": False}
    with LLM(str(model), **options) as llm:
        runner: Any = engine_of(llm)._runner
        launch = runner.launch
        kinds: set[str] = set()

        def watched(buffer: NDArray[np.int32]) -> Any:
            num_seqs, num_decodes = int(buffer[Header.NUM_SEQS]), int(buffer[Header.NUM_DECODES])
            kinds.add("decodes" if num_decodes == num_seqs else "mixed" if num_decodes else "prompts")
            return launch(buffer)

        def run() -> list[list[int]]:
            outputs = llm.generate(prompts, all_params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        expected = run()
        monkeypatch.setattr(runner, "launch", watched)
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert run() == expected
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert kinds == {"prompts", "mixed", "decodes"}


# --- cascades ---------------------------------------------------------------------------------------------------------


def prompts_that_begin_alike() -> list[list[int]]:
    """4 groups of 24 that share two blocks: 11,776 keys a step are read once."""
    return [[(7 * (i % 4) + 3 * j) % 250 for j in range(128)] + [i, *range(i % 9)] for i in range(96)]


def tokens_and_kinds(model: Path, params: SamplingParams, **options: Any) -> tuple[list[list[int]], set[int]]:
    """Tokens, and the kinds of cascades that recorded graphs have."""
    with LLM(str(model), **(OPTIONS | {"max_num_seqs": 128} | options)) as llm:
        outputs = llm.generate(prompts_that_begin_alike()[: 96 // params.n], params, use_tqdm=False)
        engine = engine_of(llm)
        engine.check_invariants()
        runner: Any = engine._runner
        kinds = {work for *_, work in runner._graphs._recorded}
        return [list(sample.token_ids) for output in outputs for sample in output.outputs], kinds


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, n=4, max_tokens=24, ignore_eos=True),
    ],
    ids=["shared prompts", "samples of one prompt"],
)
def test_cascades_change_no_token(model: Path, params: SamplingParams) -> None:
    expected, kinds = tokens_and_kinds(model, params, disable_cascade_attn=True)
    assert kinds == {0}
    tokens, kinds = tokens_and_kinds(model, params)
    assert tokens == expected
    assert 2 in kinds
