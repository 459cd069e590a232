"""How many KV blocks an engine gets."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from pyvllm.config import DEVICE_DEFAULTS, EngineArgs, env

GIB = 1 << 30
DEFAULT_SWAP_GIB = 4
DEFAULT_CPU_POOL_BYTES = 4 * GIB
MAX_POOL_TOKENS = (1 << 31) - 1
"""Slots travel in plans as int32."""


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """Blocks of KV memory."""

    num_gpu_blocks: int
    """Where the model computes, even if that is a CPU."""
    num_cpu_blocks: int
    """Where preempted sequences are swapped to."""


def cpu_pool_bytes(
    args: EngineArgs, *, block_size: int, block_bytes: int, max_model_len: int, available_bytes: int
) -> tuple[str, int]:
    """What sets the size of a CPU's pool, and the size: see the docstring of `kv_cache_memory_bytes`.

    `block_bytes`: KV of all layers for one block. `available_bytes`: memory that is free now.
    """
    if args.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes", args.kv_cache_memory_bytes
    space = env("CPU_KVCACHE_SPACE")
    if space:
        return "PYVLLM_CPU_KVCACHE_SPACE", _env_bytes(space)
    longest = -(-max_model_len // block_size) * block_bytes
    usual = min(DEFAULT_CPU_POOL_BYTES, available_bytes // 4)
    if longest <= available_bytes // 2:
        usual = max(usual, longest)
    return "free memory", min(usual, longest * (args.max_num_seqs or DEVICE_DEFAULTS["cpu"].max_num_seqs))


def pool_sizes(args: EngineArgs, pool_bytes: int, *, source: str, block_size: int, block_bytes: int) -> PoolSizes:
    """Blocks that fit into `pool_bytes`, which `source` gives, and into `swap_space`.

    Raises `ValueError` if the pool cannot hold a single block, or if `num_gpu_blocks_override` asks for more than can
    be addressed.
    """
    most_blocks = MAX_POOL_TOKENS // block_size
    num_blocks = args.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = min(pool_bytes // block_bytes, most_blocks)
        if num_blocks < 1:
            raise ValueError(f"{source} must be at least {block_bytes} bytes, those of one block, got {pool_bytes}")
    if num_blocks > most_blocks:
        raise ValueError(
            f"num_gpu_blocks_override must be at most {most_blocks} (blocks of {block_size} tokens), got {num_blocks}"
        )
    if args.swap_space is None:
        num_swap_blocks = min(DEFAULT_SWAP_GIB * GIB // block_bytes, num_blocks)
    else:
        num_swap_blocks = int(args.swap_space * GIB) // block_bytes
    return PoolSizes(num_gpu_blocks=num_blocks, num_cpu_blocks=num_swap_blocks)


def _env_bytes(space: str) -> int:
    try:
        gib = float(space)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise ValueError(f"PYVLLM_CPU_KVCACHE_SPACE must be a number of GiB above 0, got {space!r}")
    return int(gib * GIB)


def available_memory_bytes() -> int:
    """Memory that new allocations can have: what the machine has free, within the limit of this process' cgroup."""
    limits = [_free_in_machine()]
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        limits.append(limit - used + _droppable_file_cache())
    return max(0, min(limits))


def _droppable_file_cache() -> int:
    """Bytes of files (a model that was just downloaded) in the cgroup's use, which the system gives up on demand."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(maxsplit=1) for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("inactive_file", "active_file"))


def _free_in_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
