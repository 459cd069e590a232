"""The engine on a GPU: graphs and run-ahead change no token; memory is measured and refused with numbers.

The tests of the rest of the suite run on a GPU too where there is one: equality with transformers, the solo-run oracle.
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
from tests.idle import engine_of

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

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
    with LLM(str(model), dtype="float32", max_num_seqs=32, max_model_len=256, **options) as llm:
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
    with LLM(str(model), dtype="float32", max_num_seqs=8, max_model_len=256) as llm:
        runner: Any = engine_of(llm)._runner
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert (1, 0, 0) in runner._graphs._recorded


def test_tokens_of_a_cpu_are_those_of_a_gpu(model: Path, expected: list[list[int]]) -> None:
    assert generate(model, device="cpu") == expected


def test_a_pool_as_large_as_memory_allows(model: Path) -> None:
    """All but what the table names; a smaller budget gives a smaller pool."""
    sizes = []
    for gib in (4, 8):
        with LLM(str(model), dtype="float32", max_num_seqs=32, max_model_len=256, gpu_memory_gib=gib) as llm:
            sizes.append(engine_of(llm).stats().num_gpu_blocks)
    block_bytes = 2 * 2 * 2 * 64 * 32 * 4  # layers, K and V, KV heads, tokens, head size, float32
    assert abs((sizes[1] - sizes[0]) * block_bytes - 4 * 2**30) < 2**28


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_gib": 100_000}, r"gpu_memory_gib 100000 is 100000.0 GiB, but of cuda:0's .* are free"),
        ({"kv_cache_memory_bytes": 1 << 50}, r"kv_cache_memory_bytes is .* GiB; .* are free. Where its memory goes:"),
        ({"gpu_memory_gib": 0.01}, r"left for the KV pool"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(model), dtype="float32", max_model_len=256, **options)


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_launch_never_waits_for_the_device(model: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all is compiled and recorded: prompts, decode steps, and both beside each other."""
    # Three at a time, of different lengths: prompts begin beside others' decode steps.
    with LLM(str(model), dtype=dtype, max_num_seqs=3, max_model_len=256, enable_prefix_caching=False) as llm:
        runner: Any = engine_of(llm)._runner
        launch = runner.launch
        kinds: set[str] = set()

        def strict(buffer: NDArray[np.int32]) -> Any:
            num_seqs, num_decodes = int(buffer[Header.NUM_SEQS]), int(buffer[Header.NUM_DECODES])
            kinds.add("decodes" if num_decodes == num_seqs else "mixed" if num_decodes else "prompts")
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(buffer)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        def run() -> list[list[int]]:
            outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        expected = run()
        monkeypatch.setattr(runner, "launch", strict)
        assert run() == expected
    assert kinds == {"prompts", "mixed", "decodes"}


# --- cascades ---------------------------------------------------------------------------------------------------------


def prompts_that_begin_alike() -> list[list[int]]:
    """4 groups of 24 that share two blocks: 11,776 keys a step are read once."""
    return [[(7 * (i % 4) + 3 * j) % 250 for j in range(128)] + [i, *range(i % 9)] for i in range(96)]


def tokens_and_kinds(model: Path, params: SamplingParams, **options: Any) -> tuple[list[list[int]], set[int]]:
    """Tokens, and the kinds of cascades that recorded graphs have."""
    with LLM(str(model), dtype="float32", max_num_seqs=128, max_model_len=256, **options) as llm:
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
