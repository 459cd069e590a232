"""Reports and tables of benchmarks."""

import json
from pathlib import Path

import pytest

from pyvllm.bench.report import Report, summary, table
from pyvllm.config import EngineArgs


def test_the_file_is_complete_after_each_result(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report("test", {"engine_args": EngineArgs(model="m", hf_token="secret"), "path": path}, path)
    assert json.loads(path.read_text())["results"] == []
    for number in (1, 2):
        report.add({"number": number})
        found = json.loads(path.read_text())
        assert [result["number"] for result in found["results"]] == [1, 2][:number]
    assert found["settings"]["path"] == str(path)
    assert found["settings"]["engine_args"]["model"] == "m"
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    Report("test", {"engine_args": EngineArgs(model="m", hf_token="secret")}, path)
    assert "secret" not in path.read_text()


def test_table_aligns_numbers_and_has_all_columns() -> None:
    rows = [{"name": "a", "count": 12_345, "rate": 0.12345}, {"name": "bc", "rate": 1234.5, "more": None}]
    assert table(rows).splitlines() == [
        "| name |  count |  rate | more |",
        "| ---- | -----: | ----: | ---: |",
        "| a    | 12,345 | 0.123 |      |",
        "| bc   |        | 1,234 |      |",
    ]


def test_summary_by_hand() -> None:
    assert summary([0.001, 0.003, 0.002], [0, 50, 100]) == pytest.approx({"mean": 2, "p0": 1, "p50": 2, "p100": 3})
    assert summary([2e-6], [99.9], unit=1e6) == pytest.approx({"mean": 2, "p99.9": 2})
    assert summary([], [50]) == {}
