"""KV memory: one pool of blocks where the model computes, one on the host for sequences that are swapped out.

A pool is `[L, N, 2, K, B, D]`: layers, blocks, keys and values, KV heads, tokens of a block, head size. One allocation
for all layers lets a block be copied or swapped at once.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels
from pyvllm.models.spec import ModelSpec
from pyvllm.step import StepView

_ALIGNMENT: Final = 64
"""Bytes, as torch aligns its own memory."""


def block_bytes(spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of `block_size` tokens, all layers."""
    return spec.num_layers * 2 * spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize


class KVCache:
    """The two pools. Which block holds what is the scheduler's knowledge alone."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        one_layer: bool = False,
    ) -> None:
        """`num_blocks` on `device`, `num_host_blocks` on the host, of `block_size` tokens each.

        `one_layer`: all layers share the memory of one, for trials that look at no result.
        """
        num_layers = 1 if one_layer else spec.num_layers
        shape = (2, spec.num_kv_heads, block_size, spec.head_dim)
        # Zeros, not uninitialised: attention multiplies what pads a block by 0, which must not be NaN.
        if device.type == "cpu":
            self.pool = _lazy_zeros((num_layers, num_blocks, *shape), dtype)
        else:
            self.pool = torch.zeros(num_layers, num_blocks, *shape, dtype=dtype, device=device)
        self._host_shape = (num_layers, num_host_blocks, *shape)
        self.layers = list(self.pool.expand(spec.num_layers, *self.pool.shape[1:]).unbind(0))
        """Of each layer, `[N, 2, K, B, D]`."""

    @functools.cached_property
    def host_pool(self) -> Tensor:
        """Made when the first sequence is swapped: pinned memory, which a GPU reads and writes, takes seconds."""
        if self.pool.is_cpu:
            return _lazy_zeros(self._host_shape, self.pool.dtype)
        return torch.empty(self._host_shape, dtype=self.pool.dtype, pin_memory=True)

    def apply(self, step: StepView, kernels: AnyKernels) -> None:
        """Move blocks as the step says: out, in, then copies. Comes before anything of the step is written."""
        if step.has("swap_out"):
            kernels.swap_blocks(self.pool, self.host_pool, step.swap_out)
        if step.has("swap_in"):
            kernels.swap_blocks(self.host_pool, self.pool, step.swap_in)
        if step.has("copies"):
            kernels.copy_blocks(self.pool, step.copies)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory, which the system provides page by page at the first write (`torch.zeros` writes all)."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    except (MemoryError, ValueError) as error:  # numpy's own limit is a ValueError
        raise ValueError(
            f"{num_bytes / (1 << 30):.1f} GiB of KV memory cannot be had: lower kv_cache_memory_bytes "
            "(PYVLLM_CPU_KVCACHE_SPACE), num_gpu_blocks_override or swap_space"
        ) from error
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
