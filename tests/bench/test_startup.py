"""`pyvllm bench startup`: processes that are started and timed."""

import json
from pathlib import Path

import pytest

from pyvllm.cli import main


def test_cold_and_warm_starts(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(["bench", "startup", str(tiny_llama), "--device", "cpu", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [(result["engine"], result["caches"]) for result in results] == [("pyvllm", "cold"), ("pyvllm", "warm")]
    for result in results:
        parts = [result[name] for name in ("import_s", "load_s", "generate_s")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(result["first_token_s"])
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| engine | caches | import")
    assert len(table) == 6


def test_a_process_that_fails_is_an_error(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--max-model-len", "100k", "--warm-runs", "0"]
    assert main(["bench", "startup", str(tiny_llama), *flags]) == 1
    errors = capfd.readouterr().err
    assert "ValueError: max_model_len must be at most 512" in errors
    assert "the process ended with status 1; what it said is above" in errors
