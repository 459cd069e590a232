"""A model's place: its weights on a device, the memory beside them, and the runner that has both."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from typing import Final

import torch

from pyvllm.config import (
    DEVICE_DEFAULTS,
    EngineArgs,
    StepLimits,
    limit_to_pool,
    resolve_max_model_len,
    resolve_step_limits,
)
from pyvllm.cuda_graph import graph_sizes
from pyvllm.gpu_memory import gpu_pool_bytes, measure_memory, memory_budget
from pyvllm.hub import ModelFiles
from pyvllm.kernels import AnyKernels, select
from pyvllm.kv_cache import KVCache, block_bytes
from pyvllm.memory import GIB, PoolSizes, available_memory_bytes, cpu_pool_bytes, pool_sizes
from pyvllm.models import Decoder, ModelSpec
from pyvllm.runner import Runner
from pyvllm.staging import staging_words
from pyvllm.weights import load_weights

logger = logging.getLogger("pyvllm")

# With fewer keys saved, tens of MB a layer in models with 8 KV heads, a further kernel in each layer costs as much.
_CASCADE_TOKENS: Final = 8192


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Numbers that runner and scheduler share."""

    limits: StepLimits
    pool: PoolSizes
    block_size: int
    """Tokens."""
    graph_sizes: list[int]
    """Sequences that decode steps are padded to; empty: no graphs."""
    cascade_tokens: int
    """Fewest keys that cascades of a step must save reading; 0: there are no cascades."""


def load_runner(
    args: EngineArgs, files: ModelFiles, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[Runner, Layout]:
    """Load the weights and size the KV pool. Raises ValueError with the numbers if they do not fit."""
    model = _Model(args=args, files=files, spec=spec, dtype=dtype, device=device, kernels=select(device, dtype))
    decoder, layout = model.place_on_cpu() if device.type == "cpu" else model.place_on_gpu()
    kv_cache = KVCache(
        spec,
        num_blocks=layout.pool.num_gpu_blocks,
        num_host_blocks=layout.pool.num_cpu_blocks,
        block_size=layout.block_size,
        dtype=dtype,
        device=device,
    )
    logger.info(
        "%s: %s in %s on %s (%s kernels), up to %d tokens a request, KV pool of %d tokens",
        args.model,
        spec.architecture,
        model.dtype_name,
        device,
        model.kernels.name,
        layout.limits.max_model_len,
        layout.pool.num_gpu_blocks * layout.block_size,
    )
    runner = Runner(
        decoder,
        kv_cache,
        model.kernels,
        max_num_seqs=layout.limits.max_num_seqs,
        staging_words=staging_words(layout.limits, block_size=layout.block_size),
        logprobs_mode=args.logprobs_mode,
    )
    return runner, layout


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What is to be placed, and where."""

    args: EngineArgs
    files: ModelFiles
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    kernels: AnyKernels

    def place_on_cpu(self) -> tuple[Decoder, Layout]:
        """Sizes follow from numbers alone: what does not fit is found before anything is read."""
        limits = self._limits()
        available = available_memory_bytes()
        source, pool_bytes = cpu_pool_bytes(
            self.args,
            block_size=self.block_size,
            block_bytes=self._block_bytes,
            max_model_len=limits.max_model_len,
            available_bytes=available,
        )
        layout = self._layout(limits, pool_bytes, source, [])
        needed = self._weight_bytes()
        if needed > available:
            raise ValueError(
                f"the weights take {needed / GIB:.1f} GiB in {self.dtype_name}, but only {available / GIB:.1f} GiB of "
                "memory are free"
            )
        return self._load(layout.limits), layout

    def place_on_gpu(self) -> tuple[Decoder, Layout]:
        """The pool gets what is seen to be left once the weights are there and the largest steps have run."""
        limits = self._limits()
        budget = memory_budget(self.args, self.device)
        needed = self._weight_bytes()
        if needed > budget.num_bytes:
            raise ValueError(
                f"the weights take {needed / GIB:.1f} GiB in {self.dtype_name}, but {budget.source} is "
                f"{budget.num_bytes / GIB:.1f} GiB of {self.device}"
            )
        decoder = self._load(limits)
        sizes = [] if self.args.enforce_eager else graph_sizes(limits.max_num_seqs)
        use = measure_memory(
            budget,
            decoder,
            self.kernels,
            limits,
            block_size=self.block_size,
            sizes=sizes,
            dtype=self.dtype,
            device=self.device,
        )
        logger.info("memory of %s\n%s", self.device, use.table())
        pool_bytes, source = gpu_pool_bytes(self.args, use, self.device)
        return decoder, self._layout(limits, pool_bytes, source, sizes)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.args.block_size or DEVICE_DEFAULTS[self.device.type].block_size

    @property
    def dtype_name(self) -> str:
        """As users write it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def _block_bytes(self) -> int:
        return block_bytes(self.spec, block_size=self.block_size, dtype=self.dtype)

    def _limits(self) -> StepLimits:
        """Of a step, before the pool is known."""
        max_model_len = resolve_max_model_len(self.args, self.spec.max_position_embeddings, usual=self.spec.usual_len)
        return resolve_step_limits(self.args, max_model_len, DEVICE_DEFAULTS[self.device.type])

    def _layout(self, limits: StepLimits, pool_bytes: int, source: str, sizes: list[int]) -> Layout:
        pool = pool_sizes(
            self.args, pool_bytes, source=source, block_size=self.block_size, block_bytes=self._block_bytes
        )
        max_model_len = limit_to_pool(
            self.args, limits.max_model_len, num_blocks=pool.num_gpu_blocks, block_size=self.block_size
        )
        return Layout(
            limits=replace(limits, max_model_len=max_model_len),
            pool=pool,
            block_size=self.block_size,
            graph_sizes=sizes,
            cascade_tokens=_CASCADE_TOKENS if self.kernels.cascades and not self.args.disable_cascade_attn else 0,
        )

    def _weight_bytes(self) -> int:
        slots = Decoder(self.spec, max_model_len=1, dtype=self.dtype, device=torch.device("meta")).slots().values()
        return sum(slot.numel() for slot in slots) * self.dtype.itemsize

    def _load(self, limits: StepLimits) -> Decoder:
        decoder = Decoder(self.spec, max_model_len=limits.max_model_len, dtype=self.dtype, device=self.device)
        progress = sys.stderr.isatty()
        load_weights(self.spec, decoder.slots(), self.files, load_format=self.args.load_format, progress=progress)
        return decoder
