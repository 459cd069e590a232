"""Memory of a GPU is measured, and refused with the numbers. Other processes must leave the GPU alone meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm import LLM
from tests.conftest import TinyCheckpoint
from tests.idle import engine_of

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 32, "max_model_len": 256}


@pytest.fixture(scope="module")
def model(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen3")


def test_a_pool_as_large_as_memory_allows(model: Path) -> None:
    """All but what the table names; a smaller budget gives a smaller pool."""
    sizes = []
    for gib in (4, 8):
        with LLM(str(model), gpu_memory_gib=gib, **OPTIONS) as llm:
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
        LLM(str(model), **(OPTIONS | options))
