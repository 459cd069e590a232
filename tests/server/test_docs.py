"""The commands of docs/serving.md and of the README's server do what is said there."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pyvllm.server import command
from tests.async_requests import PATIENCE_S
from tests.server.conftest import Served

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
README = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
README_CURLS = [block for block in README if block.startswith("curl")]
README_SERVES = [block for block in README if block.startswith("pyvllm serve")]
SHELL = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
CURLS = [block for block in SHELL if block.startswith("curl")]
SERVES = [block for block in SHELL if block.startswith("pyvllm serve")]
(PYTHON,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(YAML,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
HOST = "http://localhost:8000"


def test_all_commands_are_of_a_kind_that_is_tested() -> None:
    assert len(CURLS) >= 5
    assert len(SERVES) >= 5
    assert len(CURLS) + len(SERVES) == len(SHELL)
    assert (len(README_SERVES), len(README_CURLS)) == (1, 1)  # a quick start: one command, one line


@pytest.mark.parametrize("block", CURLS + README_CURLS)
def test_curl_lines_are_answered(server: Served, block: str) -> None:
    line = block.replace(HOST, server.url).replace("curl", "curl --silent --show-error --fail", 1)
    result = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 20
    assert '"error":' not in result.stdout


@pytest.mark.parametrize("block", SERVES + README_SERVES)
def test_flags_are_known(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_flags(parser)
    words = shlex.split(block)
    assert words[:2] == ["pyvllm", "serve"]
    engine_args, args = command.parsed_args(parser, parser.parse_args(words[2:]))
    assert engine_args.model == "smollm2-135m"
    assert args.port == 8000


def test_python_lines_run(server: Served) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PYTHON.replace(HOST, server.url)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
