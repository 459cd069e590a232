"""What engines of the tests are told on a GPU that several processes use at the same time."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 32,
    "max_model_len": 256,
    "gpu_memory_gib": 4,
    "num_gpu_blocks_override": 1024,
}
"""For a tiny model. With the number of blocks given, what other processes take does not matter."""
