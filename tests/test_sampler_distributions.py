"""Draws of the samplers of the CPU against the exact distributions. `tests/gpu/test_sampling.py`: the same on a GPU."""

from __future__ import annotations

import pytest

from pyvllm.kernels.cpu import CpuKernels
from pyvllm.kernels.reference import ReferenceKernels
from tests.distribution_cases import NAMES, check_distribution

FILTERED = [name for name in NAMES if "top" in name or "min" in name or name == "everything"]


@pytest.mark.parametrize("name", NAMES)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    check_distribution(name, CpuKernels())


@pytest.mark.parametrize("name", ["plain", "mask", *FILTERED])
def test_draws_of_plain_torch_follow_the_exact_distribution(name: str) -> None:
    check_distribution(name, ReferenceKernels())


@pytest.mark.parametrize("name", FILTERED)
def test_draws_from_more_tokens_than_are_looked_at_first(name: str) -> None:
    check_distribution(name, CpuKernels(), vocab_size=600)
