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
    kernels = select(device, dtype)
    place = _place_on_cpu if device.type == "cpu" else _place_on_gpu
    decoder, layout = place(args, files, spec, dtype, device, kernels)
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
        str(dtype).removeprefix("torch."),
        device,
        kernels.name,
        layout.limits.max_model_len,
        layout.pool.num_gpu_blocks * layout.block_size,
    )
    runner = Runner(
        decoder,
        kv_cache,
        kernels,
        max_num_seqs=layout.limits.max_num_seqs,
        staging_words=staging_words(layout.limits, block_size=layout.block_size),
        logprobs_mode=args.logprobs_mode,
    )
    return runner, layout


def _place_on_cpu(
    args: EngineArgs,
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    kernels: AnyKernels,
) -> tuple[Decoder, Layout]:
    """Sizes follow from numbers alone: what does not fit is found before anything is read."""
    limits, block_size = _limits(args, spec, device)
    bytes_of_block = block_bytes(spec, block_size=block_size, dtype=dtype)
    available = available_memory_bytes()
    source, num_bytes = cpu_pool_bytes(
        args,
        block_size=block_size,
        block_bytes=bytes_of_block,
        max_model_len=limits.max_model_len,
        available_bytes=available,
    )
    layout = _layout(args, limits, block_size, bytes_of_block, num_bytes, source, [], kernels)
    needed = _weight_bytes(spec, dtype)
    if needed > available:
        raise ValueError(
            f"the weights take {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, but only "
            f"{available / GIB:.1f} GiB of memory are free"
        )
    return _load(args, files, spec, layout.limits, dtype, device), layout


def _place_on_gpu(
    args: EngineArgs,
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    kernels: AnyKernels,
) -> tuple[Decoder, Layout]:
    """The pool gets what is seen to be left once the weights are there and the largest steps have run."""
    limits, block_size = _limits(args, spec, device)
    budget = memory_budget(args, device)
    needed = _weight_bytes(spec, dtype)
    if needed > budget.num_bytes:
        raise ValueError(
            f"the weights take {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, but {budget.source} is "
            f"{budget.num_bytes / GIB:.1f} GiB of {device}"
        )
    decoder = _load(args, files, spec, limits, dtype, device)
    sizes = [] if args.enforce_eager else graph_sizes(limits.max_num_seqs)
    use = measure_memory(
        budget, decoder, kernels, limits, block_size=block_size, sizes=sizes, dtype=dtype, device=device
    )
    logger.info("memory of %s\n%s", device, use.table())
    num_bytes, source = gpu_pool_bytes(args, use, device)
    bytes_of_block = block_bytes(spec, block_size=block_size, dtype=dtype)
    return decoder, _layout(args, limits, block_size, bytes_of_block, num_bytes, source, sizes, kernels)


def _limits(args: EngineArgs, spec: ModelSpec, device: torch.device) -> tuple[StepLimits, int]:
    """Of a step, before the pool is known; tokens of a block."""
    defaults = DEVICE_DEFAULTS[device.type]
    max_model_len = resolve_max_model_len(args, spec.max_position_embeddings, usual=spec.usual_len)
    return resolve_step_limits(args, max_model_len, defaults), args.block_size or defaults.block_size


def _layout(
    args: EngineArgs,
    limits: StepLimits,
    block_size: int,
    bytes_of_block: int,
    pool_bytes: int,
    source: str,
    sizes: list[int],
    kernels: AnyKernels,
) -> Layout:
    pool = pool_sizes(args, pool_bytes, source=source, block_size=block_size, block_bytes=bytes_of_block)
    max_model_len = limit_to_pool(args, limits.max_model_len, num_blocks=pool.num_gpu_blocks, block_size=block_size)
    limits = replace(limits, max_model_len=max_model_len)
    cascade_tokens = _CASCADE_TOKENS if kernels.cascades and not args.disable_cascade_attn else 0
    return Layout(limits=limits, pool=pool, block_size=block_size, graph_sizes=sizes, cascade_tokens=cascade_tokens)


def _weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    slots = Decoder(spec, max_model_len=1, dtype=dtype, device=torch.device("meta")).slots().values()
    return sum(slot.numel() for slot in slots) * dtype.itemsize


def _load(
    args: EngineArgs,
    files: ModelFiles,
    spec: ModelSpec,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    decoder = Decoder(spec, max_model_len=limits.max_model_len, dtype=dtype, device=device)
    load_weights(spec, decoder.slots(), files, load_format=args.load_format, progress=sys.stderr.isatty())
    return decoder
