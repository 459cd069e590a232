"""The programs in benches/, which run what `pyvllm bench` runs."""

import importlib
import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benches.kernels.__main__ import MODULES, main

BENCHES = Path(__file__).parents[2] / "benches"


def run(monkeypatch: pytest.MonkeyPatch, script: str, *flags: str) -> int | str | None:
    """The exit status of a program."""
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHES / script), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("script", ["throughput.py", "throughput_cpu.py", "latency.py"])
def test_scripts_are_the_commands(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tmp_path: Path, script: str
) -> None:
    path = tmp_path / "report.json"
    flags = ["--model", str(tiny_llama), "--input-len", "4", "--output-len", "3", "--dtype", "float32"]
    flags += ["--device", "cpu"]
    flags += ["--max-model-len", "500", "--output-json", str(path)]
    flags += ["--batch-size", "2"] if script == "latency.py" else ["--num-prompts", "2", "--repeats", "1"]
    assert run(monkeypatch, script, *flags) == 0
    report = json.loads(path.read_text())
    engines = [result.get("engine") for result in report["results"]]
    expected = {
        "throughput.py": ("throughput", ["pyvllm"]),
        "throughput_cpu.py": ("throughput", ["pyvllm", "transformers"]),
        "latency.py": ("latency", [None]),
    }
    assert (report["benchmark"], engines) == expected[script]


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_kernels_have_cases_that_need_no_argument(name: str) -> None:
    cases = importlib.import_module(f"benches.kernels.{name}").cases
    inspect.signature(cases).bind()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "there is no GPU" in capsys.readouterr().err


def test_an_unknown_module_of_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", "--only", "glue,nono"])
    with pytest.raises(SystemExit):
        main()
    assert "got 'nono'" in capsys.readouterr().err
