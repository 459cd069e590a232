"""The summary of `scripts/gpu_checks.sh`: what failed is named, and so is a group that was stopped."""

import json
from pathlib import Path

import pytest

from scripts.junit_summary import main

REPORT = """<testsuites><testsuite tests="3" failures="1" errors="1" skipped="0" time="2.5">
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure message="no">def bad():
E   assert 1 == 2
tests/a.py:1: AssertionError</failure></testcase>
<testcase classname="tests.a" name="worse"><error message="no">E   OSError: gone</error></testcase>
</testsuite></testsuites>"""


def test_groups_and_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.xml").write_text(REPORT)
    (tmp_path / "two.log").write_text("\n".join(f"line {i}" for i in range(100)))
    assert main(tmp_path, {"one": 1, "two": 137, "three": 5}) == 1
    assert capsys.readouterr().out.splitlines() == [
        "one: 1 status, 3 tests, 1 failures, 1 errors, 0 skipped, 2.5 seconds",
        "two: 137 status, 0 tests, 0 failures, 0 errors, 0 skipped, 0.0 seconds",
        "three: 5 status, 0 tests, 0 failures, 0 errors, 0 skipped, 0.0 seconds",
        "FAILED tests.a::bad: assert 1 == 2",
        "FAILED tests.a::worse: OSError: gone",
        "FAILED the group two ended with 137: line 99",
    ]
    assert json.loads((tmp_path / "summary.json").read_text())["one"]["failures"] == 1
    ends = (tmp_path / "failures.txt").read_text()
    assert "tests/a.py:1: AssertionError" in ends
    assert "line 60" in ends
    assert "line 59" not in ends


def test_groups_that_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path, {"none": 5}) == 0
    assert "FAILED" not in capsys.readouterr().out
