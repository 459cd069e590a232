"""From `EngineArgs` to an engine: find the model, load it, measure out its memory."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from pyvllm import _core
from pyvllm.checkpoint import has_weights, open_safetensors, open_torch
from pyvllm.config import DEVICE_DEFAULTS, EngineArgs, env
from pyvllm.engine import Engine, EngineInfo
from pyvllm.generation import default_sampling_params, eos_token_ids, read_generation_config
from pyvllm.hub import ModelFiles, find_model
from pyvllm.kv_cache import block_bytes
from pyvllm.logging import StatsLog
from pyvllm.logits_processors import as_processor, load_processors
from pyvllm.models import ModelSpec, build_spec
from pyvllm.placement import Layout, load_runner
from pyvllm.sampling_params import LogitsProcessor
from pyvllm.tokenizer import Tokenizer, find_tokenizer

logger = logging.getLogger("pyvllm")

_DTYPES: Final = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


def build_engine(args: EngineArgs) -> Engine:
    """Load the model and make an engine of it.

    Raises FileNotFoundError saying what was tried for what is not there, and ValueError naming what is damaged, not
    supported, or does not fit the model or the memory.
    """
    files = find_model(args)
    config = files.config | (args.hf_overrides or {})
    spec = build_spec(config)
    tokenizer = find_tokenizer(args, files)
    generation_config = read_generation_config(args, files.generation_config)
    defaults = default_sampling_params(args, generation_config)
    device = choose_device(args)
    dtype = resolve_dtype(args, config, files, device)
    eos = eos_token_ids(tokenizer.end_token_ids if tokenizer else (), config, generation_config)
    runner, layout = load_runner(args, files, spec, dtype, device)
    info = EngineInfo(
        model=args.model,
        max_model_len=layout.limits.max_model_len,
        vocab_size=spec.vocab_size,
        chat_template=args.chat_template,
        default_sampling_params=defaults,
        block_size=layout.block_size,
        block_bytes=block_bytes(spec, block_size=layout.block_size, dtype=dtype),
    )
    processors = load_processors(args.logits_processors or {})
    return Engine(
        info=info,
        runner=runner,
        new_scheduler=_scheduler_maker(args, spec, layout, eos, tokenizer, processors),
        processors=processors,
        tokenizer=tokenizer,
        run_ahead=DEVICE_DEFAULTS[device.type].async_scheduling
        if args.async_scheduling is None
        else args.async_scheduling,
        stats_log=None if args.disable_log_stats else StatsLog(_log_interval_s()),
    )


def choose_device(args: EngineArgs) -> torch.device:
    """See the docstring of `EngineArgs.device`. Raises ValueError if there is no such device."""
    available = torch.cuda.is_available()
    if args.device == "cuda" and not available:
        raise ValueError("device is 'cuda', but torch finds no GPU (torch.cuda.is_available() is False)")
    return torch.device("cuda", 0) if available and args.device != "cpu" else torch.device("cpu")


def resolve_dtype(args: EngineArgs, config: Mapping[str, Any], files: ModelFiles, device: torch.device) -> torch.dtype:
    """See the docstring of `EngineArgs.dtype`. Raises ValueError naming a dtype in the config that is not supported."""
    if args.dtype != "auto":
        return _DTYPES[args.dtype]
    named = config.get("dtype") or config.get("torch_dtype") or _stored_dtype(args, files)
    name = str(named).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"config field dtype is {named!r}, supported: {', '.join(_DTYPES)}; set dtype")
    if _DTYPES[name] is torch.float16 and device.type == "cpu":
        logger.info("running in bfloat16: float16, in which the model is stored, is slow on a CPU (dtype sets it)")
        return torch.bfloat16
    return _DTYPES[name]


def _stored_dtype(args: EngineArgs, files: ModelFiles) -> str:
    """Type of the first weight; bfloat16 for quantised weights and if there are none to read."""
    if files.gguf_file is not None or args.load_format == "dummy":
        return "bfloat16"
    tensors = (open_safetensors if has_weights(files.path, ".safetensors") else open_torch)(files.path)
    return next((tensor.dtype for tensor in tensors.values() if tensor.dtype in _DTYPES), "bfloat16")


def _scheduler_maker(
    args: EngineArgs,
    spec: ModelSpec,
    layout: Layout,
    eos: list[int],
    tokenizer: Tokenizer | None,
    processors: Mapping[str, LogitsProcessor],
) -> Callable[[], _core.Scheduler]:
    """What makes a scheduler without requests, each time it is called."""
    vocabulary = None
    if tokenizer is not None:
        table = tokenizer.vocabulary
        vocabulary = _core.Vocabulary(
            table.token_bytes,
            special_token_ids=table.special_token_ids,
            byte_token_ids=table.byte_token_ids,
            strip_leading_space=table.strip_leading_space,
        )
    return functools.partial(
        _core.Scheduler,
        num_gpu_blocks=layout.pool.num_gpu_blocks,
        num_cpu_blocks=layout.pool.num_cpu_blocks,
        block_size=layout.block_size,
        max_num_seqs=layout.limits.max_num_seqs,
        max_num_batched_tokens=layout.limits.max_num_batched_tokens,
        max_model_len=layout.limits.max_model_len,
        graph_sizes=layout.graph_sizes,
        cascade_tokens=layout.cascade_tokens,
        vocab_size=spec.vocab_size,
        # A tokenizer may know ids that the model has no row for.
        eos_token_ids=[token_id for token_id in eos if token_id < spec.vocab_size],
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        preemption_mode=args.preemption_mode,
        max_logprobs=args.max_logprobs,
        vocabulary=vocabulary,
        processors=[(name, as_processor([function])) for name, function in processors.items()],
        seed=secrets.randbits(63) if args.seed is None else args.seed,
    )


def _log_interval_s() -> float:
    value = env("LOG_STATS_INTERVAL") or "10"
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"PYVLLM_LOG_STATS_INTERVAL must be a number of seconds, got {value!r}") from None
