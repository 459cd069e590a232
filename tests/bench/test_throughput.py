"""`pyvllm bench throughput`: what it counts, writes and refuses. How fast anything is, is not asserted."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLM, SamplingParams
from pyvllm.bench.engines import ENGINES, PyvllmEngine, TransformersEngine
from pyvllm.bench.options import ThroughputOptions
from pyvllm.bench.throughput import Throughput
from pyvllm.bench.workloads import Request, Workload
from pyvllm.cli import main
from pyvllm.config import EngineArgs

TINY = ["--device", "cpu", "--dtype", "float32", "--num-prompts", "3", "--input-len", "6", "--output-len", "5"]


def bench(model: Path, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the report."""
    path = tmp_path / "report.json"
    status = main(["bench", "throughput", str(model), *TINY, "--json", str(path), *flags])
    return status, json.loads(path.read_text())


def test_random_workload_on_both_engines(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--engines", "pyvllm,transformers", "--repeats", "3", "--n", "2", "--tflops", "1", "--bandwidth-tb-s", "2")
    status, report = bench(tiny_llama, tmp_path, *flags)
    assert status == 0
    ours, theirs = report["results"]
    for result in (ours, theirs):
        assert (result["workload"], result["requests"], result["n"]) == ("random3", 3, 2)
        assert (result["input_tokens"], result["output_tokens"], len(result["seconds"])) == (18, 30, 3)
        best = min(result["seconds"])
        assert result["output_tokens_per_s"] == pytest.approx(30 / best)
        assert result["input_tokens_per_s"] == pytest.approx(18 / best)
        assert result["share_of_limit"] == pytest.approx(result["ideal_seconds"] / best)
    assert (ours["engine"], theirs["engine"]) == ("pyvllm", "transformers")
    assert theirs["equal_tokens"] == 1
    assert report["versions"].keys() >= {"pyvllm", "torch", "transformers", "python"}
    assert report["settings"]["engine_args"]["dtype"] == "float32"
    assert report["settings"]["repeats"] == 3
    table = capsys.readouterr().out.splitlines()
    heads = [cell.strip() for cell in table[0].strip("|").split("|")]
    assert heads == [
        *("workload", "engine", "seconds", "output tok/s", "input tok/s", "% of limit", "ratio to transformers"),
        "equal tokens",
    ]
    assert len(table) == 6
    assert report["date"] in table[-1]


def test_engines_that_take_turns_get_the_same_prompts(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("--engines", "transformers,pyvllm", "--take-turns", "--num-prompts", "1,2", "--warmup-runs", "1")
    status, report = bench(tiny_llama, tmp_path, *flags)
    assert status == 0
    found = [(result["workload"], result["engine"], result["equal_tokens"]) for result in report["results"]]
    assert found == [
        ("random1", "transformers", None),
        ("random1", "pyvllm", 1),
        ("random2", "transformers", None),
        ("random2", "pyvllm", 1),
    ]


def test_a_fixed_workload_is_folded_into_the_vocabulary(tiny_llama: Path, tmp_path: Path) -> None:
    status, report = bench(tiny_llama, tmp_path, "--workloads", "decode1", "--repeats", "1")
    assert status == 0
    assert [(result["input_tokens"], result["output_tokens"]) for result in report["results"]] == [(128, 256)]


def test_prefix_cache_is_off_but_for_prefix(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EngineArgs] = []

    def load(args: EngineArgs) -> PyvllmEngine:
        made.append(args)
        return PyvllmEngine(args)

    monkeypatch.setitem(ENGINES, "pyvllm", load)
    options = ThroughputOptions(workloads="random,prefix", num_prompts="1", input_len=2, output_len=2, repeats=1)
    # The model's length refuses the second workload's prompts, which is all the same here.
    with pytest.raises(RuntimeError, match=r"failed: prefix on pyvllm"):
        Throughput(EngineArgs(model=str(tiny_llama), device="cpu"), options).run()
    assert [args.enable_prefix_caching for args in made] == [False, True]
    assert all(args.skip_tokenizer_init for args in made)


def test_a_workload_that_fails_is_reported_and_others_go_on(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = bench(tiny_llama, tmp_path, "--workloads", "prefill4k,random", "--repeats", "1")
    assert status == 1
    failed, good = report["results"]
    assert failed.keys() == {"workload", "engine", "error"}
    assert "prompt_token_ids has 4096 tokens" in failed["error"]
    assert good["output_tokens"] == 15
    printed = capsys.readouterr()
    assert "failed: prefill4k on pyvllm" in printed.err
    assert "| failed" in printed.out


def test_outputs_that_are_cut_are_no_result(tiny_llama: Path, tmp_path: Path) -> None:
    status, report = bench(tiny_llama, tmp_path, "--max-model-len", "9", "--repeats", "1")
    assert status == 1
    assert "3 of 3 sequences of random3 have another length than asked for" in report["results"][0]["error"]


def test_no_workload_starts_after_max_seconds(tiny_llama: Path, tmp_path: Path) -> None:
    status, report = bench(tiny_llama, tmp_path, "--max-seconds", "1e-9", "--workloads", "random,decode1")
    assert status == 0
    assert [result["skipped"] for result in report["results"]] == ["max_seconds"] * 2


def test_the_bench_models_are_made_of_their_configuration(tmp_path: Path) -> None:
    # As few layers as there can be, and tiny: only the name, the folder and the dummy weights are looked at.
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 320, "head_dim": 16}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    status, report = bench(
        Path("qwen3-0.6b"), tmp_path, "--hf-overrides", json.dumps(small), "--max-model-len", "64", "--repeats", "1"
    )
    assert status == 0
    assert report["settings"]["engine_args"]["model"] == "qwen3-0.6b"
    assert report["results"][0]["output_tokens"] == 15


def test_transformers_batches_are_padded_without_effect(tiny_llama: Path) -> None:
    prompts = [[5], list(range(30, 47)), [7, 8, 9]]
    lengths = [9, 2, 5]
    requests = [Request(prompt=ids, output_len=count) for ids, count in zip(prompts, lengths, strict=True)]
    engine = TransformersEngine(EngineArgs(model=str(tiny_llama), device="cpu", dtype="float32"))
    made = engine.job(Workload(name="test", requests=requests), temperature=0.0)()
    with LLM(str(tiny_llama), device="cpu", dtype="float32", num_gpu_blocks_override=64) as llm:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert made == [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workloads": "nano,nono"}, r"workloads must be some of nano, .*got 'nono'"),
        ({"engines": "torch"}, r"engines must be some of pyvllm, vllm, transformers, got 'torch'"),
        ({"num_prompts": "3,0"}, r"num_prompts must be comma-separated numbers of at least 1, got '3,0'"),
        ({"input_len": 0}, r"input_len must be at least 1, got 0"),
        ({"repeats": 0}, r"repeats must be at least 1, got 0"),
        ({"temperature": math.nan}, r"temperature must be at least 0, got nan"),
        ({"max_seconds": 0.0}, r"max_seconds must be above 0, got 0.0"),
        ({"tflops": 790.0}, r"bandwidth_tb_s and tflops must be given both or neither"),
    ],
)
def test_options_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputOptions(**fields)


def test_all_stands_for_the_fixed_workloads() -> None:
    assert ThroughputOptions(workloads="decode1,all").workload_names[0] == "decode1"
    assert len(ThroughputOptions(workloads="decode1,all").workload_names) == 7


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_a_peer_that_is_not_installed_is_named(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", str(tiny_llama), "--engines", "pyvllm,vllm"]) == 2
    assert "the package vllm is not installed here" in capsys.readouterr().err


def test_a_model_must_be_given_once(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput"]) == 2
    assert main(["bench", "throughput", str(tiny_llama), "--model", "other"]) == 2
    errors = capsys.readouterr().err
    assert "a model must be given, as in: pyvllm bench throughput MODEL" in errors
    assert "two models are given" in errors


def test_a_report_that_cannot_be_written_is_found_at_once(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", str(tiny_llama), "--json", str(tmp_path / "no" / "r.json")]) == 2
    errors = capsys.readouterr().err
    assert "No such file" in errors
    assert "loaded" not in errors
