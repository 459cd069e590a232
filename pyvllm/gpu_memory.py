"""How much of a GPU's memory the KV pool gets: what the engine may use, less what its largest step was seen to take."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from pyvllm import _core
from pyvllm.config import EngineArgs, StepLimits
from pyvllm.kernels import AnyKernels
from pyvllm.kv_cache import KVCache
from pyvllm.memory import GIB
from pyvllm.models import Decoder
from pyvllm.runner import Runner
from pyvllm.sampling_params import SamplingParams
from pyvllm.staging import staging_words

_TRIAL_TOKENS: Final = 3
"""Tokens that each trial request generates: steps that prefill, record a graph, and replay it."""
_SMALL_BATCHES: Final = range(1, 17)
"""Tokens of a step with matrix products of their own."""
_CASCADE_SIZES: Final = (4, 16)
"""Sequences of a cascade that small and large kernels serve."""
_JOINING_TOKENS: Final = (2, 16)
"""Of a prompt in the same step as another sequence's next token: few and many have kernels of their own."""
# All that a sampler can be asked for at once, and beams, which it takes another way.
_GREEDIEST: Final = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.1, repetition_penalty=1.1, logprobs=5
)
_BEAMS: Final = SamplingParams(use_beam_search=True, n=2, temperature=0.0, repetition_penalty=1.1, logprobs=5)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the engine may use of a GPU, bytes; taken before it uses any."""

    num_bytes: int
    source: str
    """The argument that says so, with its value."""
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Where a GPU's memory goes, bytes."""

    budget: Budget
    weights: int
    step: int
    """Temporaries of the largest step, recorded graphs included."""
    libraries: int
    """What CUDA and its libraries took beside torch's own memory, once all kernels had run."""

    @property
    def left(self) -> int:
        """For the KV pool; below 0 if not even the rest fits."""
        return self.budget.num_bytes - self.weights - self.step - self.libraries

    def table(self) -> str:
        """A line for each part."""
        parts = {
            f"budget: {self.budget.source}, of {self.budget.total / GIB:.1f} GiB in all": self.budget.num_bytes,
            "weights": self.weights,
            "largest step and CUDA graphs": self.step,
            "CUDA and its libraries": self.libraries,
            "left for the KV pool": self.left,
        }
        return "\n".join(f"{size / GIB:10.2f} GiB  {name}" for name, size in parts.items())


def memory_budget(args: EngineArgs, device: torch.device) -> Budget:
    """See the docstrings of `gpu_memory_utilization` and `gpu_memory_gib` in `EngineArgs`.

    Raises `ValueError` with the numbers if less than that is free.
    """
    gc.collect()  # engines that were dropped refer to themselves
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if args.gpu_memory_gib is not None:
        num_bytes, source = int(args.gpu_memory_gib * GIB), f"gpu_memory_gib {args.gpu_memory_gib}"
    else:
        share = args.gpu_memory_utilization
        num_bytes, source = int(share * total), f"gpu_memory_utilization {share}"
    if num_bytes > free:
        raise ValueError(
            f"{source} is {num_bytes / GIB:.1f} GiB, but of {device}'s {total / GIB:.1f} GiB only {free / GIB:.1f} are "
            "free: lower it, or end what else uses this GPU"
        )
    return Budget(num_bytes=num_bytes, source=source, total=total, free=free)


def measure_memory(
    budget: Budget,
    decoder: Decoder,
    kernels: AnyKernels,
    limits: StepLimits,
    *,
    block_size: int,
    sizes: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryUse:
    """Run the largest steps that `limits` allow, and look. That also compiles and loads all that usual steps need.

    `decoder`: with its weights, on a GPU, where nothing else is yet. `sizes`: of the graphs that will be recorded.
    """
    decoder.pack(kernels)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    kv_cache = KVCache(
        decoder.spec,
        num_blocks=limits.max_num_seqs * -(-_trial_len(limits, block_size) // block_size) + 1,
        num_host_blocks=0,
        block_size=block_size,
        dtype=dtype,
        device=device,
        one_layer=True,
    )
    pool_bytes = kv_cache.pool.nbytes
    _run_trial(decoder, kv_cache, kernels, limits, block_size, sizes)
    step = torch.cuda.max_memory_reserved(device) - weights - pool_bytes
    del kv_cache
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    libraries = max(0, budget.free - free - torch.cuda.memory_reserved(device))
    return MemoryUse(budget=budget, weights=weights, step=max(0, step), libraries=libraries)


def gpu_pool_bytes(args: EngineArgs, use: MemoryUse, device: torch.device) -> tuple[int, str]:
    """Bytes of the KV pool, and what sets them. Raises `ValueError` with the table if there is no room for it."""
    wanted, source = args.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    free, _ = torch.cuda.mem_get_info(device)
    if wanted is None:
        wanted, source = use.left, "what is left for the KV pool"
    if args.num_gpu_blocks_override is None and not 0 < wanted <= free:
        raise ValueError(
            f"{source} is {wanted / GIB:.2f} GiB; {free / GIB:.2f} GiB of {device} are free. Where its memory goes:\n"
            f"{use.table()}\nRaise {use.budget.source.split()[0]}, or lower max_num_batched_tokens or max_num_seqs"
        )
    return wanted, source


def _trial_len(limits: StepLimits, block_size: int) -> int:
    """Most tokens of a trial request: its share of a step's prompts, or more than a block; and what it generates."""
    share = limits.max_num_batched_tokens // limits.max_num_seqs
    return min(max(share, block_size + 1) + _TRIAL_TOKENS, limits.max_model_len)


def _run_trial(
    decoder: Decoder,
    kv_cache: KVCache,
    kernels: AnyKernels,
    limits: StepLimits,
    block_size: int,
    sizes: list[int],
) -> None:
    """Run requests that fill a step, as prompts and as decode steps, and small batches, which have their own kernels.

    A round before, which computes nothing, compiles.
    """
    runner = Runner(
        decoder,
        kv_cache,
        kernels,
        max_num_seqs=limits.max_num_seqs,
        staging_words=staging_words(limits, block_size=block_size),
    )
    longest = max(1, _trial_len(limits, block_size) - _TRIAL_TOKENS)
    prompt = [0] * max(1, min(longest, limits.max_num_batched_tokens // limits.max_num_seqs))
    greedy = SamplingParams(temperature=0.0)
    trials = [(limits.max_num_seqs, prompt, _GREEDIEST), (limits.max_num_seqs, prompt, greedy)]
    if min(limits.max_num_seqs, limits.max_num_batched_tokens) >= _BEAMS.n:  # else there are no beams
        trials.append((limits.max_num_seqs // _BEAMS.n, prompt, _BEAMS))
    small = [
        (size, [0], greedy) if size <= limits.max_num_seqs else (1, [0] * min(size, longest), greedy)
        for size in _SMALL_BATCHES
    ]
    if kernels.cascades and longest > block_size:
        small += [(1, [0] * longest, SamplingParams(n=n)) for n in _CASCADE_SIZES if n <= limits.max_num_seqs]
    make_scheduler = partial(_trial_scheduler, decoder, kv_cache, limits, block_size)
    rounds = [[trial] for trial in trials + small]
    rounds += [[small[0], (1, [0] * min(length, longest), greedy)] for length in _JOINING_TOKENS]
    with kernels.compile_ahead():
        for arrivals in rounds:
            scheduler = make_scheduler([])
            for step in range(2):  # run ahead of the results, which there are none of
                if step < len(arrivals):
                    _add_requests(scheduler, str(step), *arrivals[step])
                if (plan := scheduler.schedule()) is not None:
                    runner.launch(plan.buffer)
    scheduler = make_scheduler(sizes)
    for trial in [*trials, small[0], small[-1]]:
        _add_requests(scheduler, "run", *trial)
        while (plan := scheduler.schedule()) is not None:
            launched = runner.launch(plan.buffer)
            scheduler.commit(launched.step, *launched.wait())


def _add_requests(scheduler: _core.Scheduler, name: str, count: int, prompt: list[int], params: SamplingParams) -> None:
    params = params.clone()
    params.max_tokens, params.ignore_eos = _TRIAL_TOKENS, True
    for number in range(count):
        scheduler.add_request(f"{name}-{number}", prompt, params)


def _trial_scheduler(
    decoder: Decoder, kv_cache: KVCache, limits: StepLimits, block_size: int, sizes: list[int]
) -> _core.Scheduler:
    return _core.Scheduler(
        num_gpu_blocks=len(kv_cache.layers[0]),
        block_size=block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=_trial_len(limits, block_size),
        vocab_size=decoder.spec.vocab_size,
        enable_prefix_caching=False,
        graph_sizes=sizes,
        cascade_tokens=1,
    )
