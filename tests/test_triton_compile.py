"""What Triton's compiler makes of the kernels for GPUs, without one: registers that suffice, the right products."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton_compile import CASES, EARLY, Usage


@pytest.fixture(scope="module")
def usages() -> dict[str, Usage]:
    """Of each case. Compiled in another process, since this one may interpret; Triton keeps what it compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_compile"],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: Usage(**fields) for name, fields in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.capability == 90])
def test_registers_suffice(name: str, usages: dict[str, Usage]) -> None:
    assert usages[name].stack == 0


@pytest.mark.parametrize("name", CASES)
def test_shared_memory_suffices(name: str, usages: dict[str, Usage]) -> None:
    limit = {80: 163, 86: 99, 90: 227}[CASES[name].capability] << 10
    assert usages[name].shared <= limit


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.uses_wgmma])
def test_products_are_those_of_warp_groups(name: str, usages: dict[str, Usage]) -> None:
    assert usages[name].wgmma


@pytest.mark.parametrize("name", CASES)
def test_kernels_that_begin_early_wait_and_others_know_nothing_of_it(name: str, usages: dict[str, Usage]) -> None:
    case = CASES[name]
    assert usages[name].waits == (case.kernel in EARLY and case.capability >= 90)
