"""Engine configuration: frozen dataclasses whose field docstrings are also the command line's help."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import warnings
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, Final, Literal, Self, get_args

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
LoadFormat = Literal["auto", "safetensors", "pt", "npcache", "gguf", "dummy"]
"""Format of a model's weights; npcache is read as pt, dummy reads none."""
Device = Literal["auto", "cuda", "cpu"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""What log-probabilities are taken from, and whether they are the logits themselves."""
PreemptionMode = Literal["auto", "swap", "recompute"]
SchedulingPolicy = Literal["fcfs", "priority"]

MAX_SWAP_GIB = 1 << 20
# Fields of EngineArgs that are text; in place of a path's text they take a path.
_TEXTS = (
    *("model", "tokenizer", "chat_template", "generation_config", "download_dir"),
    *("revision", "tokenizer_revision"),
)


@dataclass(frozen=True, kw_only=True)
class DeviceDefaults:
    """What `EngineArgs` fields of the same names are if nobody sets them."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool


# A GPU needs more tokens at once to be busy, and reads long runs of KV memory faster. On a CPU nothing would run beside
# the step.
DEVICE_DEFAULTS: Final = {
    "cpu": DeviceDefaults(block_size=16, max_num_seqs=256, max_num_batched_tokens=4096, async_scheduling=False),
    "cuda": DeviceDefaults(block_size=64, max_num_seqs=1024, max_num_batched_tokens=8192, async_scheduling=True),
}
"""By device type."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """All an engine can be told. Raises `ValueError` naming the field, its value and the allowed range."""

    model: str
    """A folder in Hugging Face's layout, a .gguf file, the name of a model on the hub, or the alias smollm2-135m."""

    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model: a folder, a file or a name on the hub."""

    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, outputs have no text."""

    trust_remote_code: bool = False
    """Accepted for programs written for vLLM; code from a checkpoint is never needed nor run."""

    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""

    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer on the hub."""

    hf_token: str | bool | None = field(default=None, repr=False)
    """Token for the hub; True or None: the stored one, if there is one."""

    hf_overrides: dict[str, Any] | None = None
    """Entries put over those of config.json before the model is chosen."""

    download_dir: str | None = None
    """Where downloads are kept. None: Hugging Face's cache."""

    load_format: LoadFormat = "auto"
    """Format of the weights; dummy: random ones."""

    device: Device = "auto"
    """Where the model computes. auto: on the first GPU that CUDA shows, else on the CPU."""

    dtype: Dtype = "auto"
    """Type of weights and activations. auto: what the model's config says, then what its weights have; quantised
    weights run in bfloat16, and so does float16 on a CPU, which computes it slowly."""

    max_model_len: int | str | None = None
    """Most tokens of prompt and output together: a number, 16k (16,000), 16K (16,384), or auto (or -1): as many as the
    KV pool holds, at most the model's own length. None: the model's own length."""

    seed: int | None = 0
    """Seeds the draws of requests that have no seed of their own. None: at random."""

    chat_template: str | None = None
    """Chat template, as text or the path of a file, in place of the model's own."""

    generation_config: str = "auto"
    """Where default sampling parameters come from: auto: the model's generation_config.json; vllm: nowhere; else the
    folder of that file."""

    override_generation_config: dict[str, Any] | None = None
    """Entries put over those of generation_config.json."""

    max_logprobs: int = 20
    """Most log-probabilities a request may ask for at each position; -1: no limit."""

    logprobs_mode: LogprobsMode = "raw_logprobs"
    """What logprobs hold. raw: of the model's own logits; processed: of those that tokens are drawn from, after
    penalties, masks, temperature and filters; logits: these themselves, in place of log-probabilities. Prompts have
    raw ones only."""

    logits_processors: dict[str, str] | None = None
    """Functions that requests may name as logits_processors: name -> module:function. Their modules are imported."""

    enforce_eager: bool = False
    """Use no CUDA graphs; a CPU never does."""

    block_size: int | None = None
    """Tokens in a block of KV memory. None: 64 on a GPU, 16 on a CPU."""

    gpu_memory_utilization: float = 0.92
    """Share of the GPU's memory that the engine uses: weights, the largest step, and for the rest the KV pool."""

    gpu_memory_gib: float | None = None
    """The same as a number of GiB, in place of gpu_memory_utilization."""

    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV pool. None on a GPU: what gpu_memory_utilization leaves. None on a CPU: PYVLLM_CPU_KVCACHE_SPACE
    GiB if that is set; else a quarter of the free memory up to 4 GiB, or what one longest request needs if that is more
    and fits in half of it. A CPU's pool takes memory only as requests touch it."""

    num_gpu_blocks_override: int | None = None
    """Blocks of the KV pool, whatever memory they take."""

    swap_space: float | None = None
    """GiB of host memory to which preempted sequences are swapped; 0 turns swapping off. None: 4, but no more than the
    KV pool has. Taken when the first sequence is swapped."""

    preemption_mode: PreemptionMode = "auto"
    """What happens to a sequence that gives way when the KV pool is full. auto: a lone sequence is recomputed, those
    that share memory are swapped."""

    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike."""

    max_num_seqs: int | None = None
    """Most sequences that run at once. None: 1024 on a GPU, 256 on a CPU."""

    max_num_batched_tokens: int | None = None
    """Most tokens of one step. None: 8192 on a GPU, 4096 on a CPU, or the longest prompt if that is more and chunked
    prefill is off."""

    enable_chunked_prefill: bool = True
    """Let a prompt longer than what is left of a step's tokens run over several steps."""

    disable_cascade_attn: bool = False
    """Let each sequence read all of its KV blocks in decode steps, also those that a GPU's kernels could read once for
    all sequences that begin with them. Without windows of attention only; results are the same up to rounding."""

    scheduling_policy: SchedulingPolicy = "fcfs"
    """fcfs: first come, first served; priority: lower numbers first."""

    async_scheduling: bool | None = None
    """Prepare each step while the one before still runs. None: yes on a GPU, no on a CPU, where
    nothing would overlap."""

    disable_log_stats: bool = True
    """Do not log throughput and memory use every PYVLLM_LOG_STATS_INTERVAL (10) seconds."""

    max_context_len_to_capture: InitVar[object] = None
    max_seq_len_to_capture: InitVar[object] = None
    use_v2_block_manager: InitVar[object] = None
    num_scheduler_steps: InitVar[object] = None
    guided_decoding_backend: InitVar[object] = None

    def __post_init__(
        self,
        max_context_len_to_capture: object,
        max_seq_len_to_capture: object,
        use_v2_block_manager: object,
        num_scheduler_steps: object,
        guided_decoding_backend: object,
    ) -> None:
        """Warn of arguments that no longer mean anything, then check what needs no model."""
        old = {
            "max_context_len_to_capture": max_context_len_to_capture,
            "max_seq_len_to_capture": max_seq_len_to_capture,
            "use_v2_block_manager": use_v2_block_manager,
            "num_scheduler_steps": num_scheduler_steps,
            "guided_decoding_backend": guided_decoding_backend,
        }
        for name, value in old.items():
            if value is not None:
                warnings.warn(f"{name}={value!r} has no effect any more", FutureWarning, stacklevel=3)
        self._check_texts()
        self._check_kinds()
        self._check_numbers()
        if self.max_model_len is not None:
            parse_length("max_model_len", self.max_model_len)

    def _check_texts(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, name, value)
            required = name in ("model", "generation_config")
            if (required or value is not None) and (not isinstance(value, str) or not value):
                kind = "a folder, a file or a name" if name == "model" else "a string that is not empty"
                raise ValueError(f"{name} must be {'' if required else 'None or '}{kind}, got {value!r}")
        if not isinstance(self.hf_token, str | bool | None):
            raise ValueError("hf_token must be None, True, False or a string")

    def _check_kinds(self) -> None:
        flags = {"bool": "True or False", "bool | None": "None, True or False"}
        for item in fields(self):
            value, expected = getattr(self, item.name), flags.get(str(item.type))
            if expected and not isinstance(value, bool) and not (value is None and "None" in expected):
                raise ValueError(f"{item.name} must be {expected}, got {value!r}")
        choices = {
            "device": Device,
            "dtype": Dtype,
            "load_format": LoadFormat,
            "logprobs_mode": LogprobsMode,
            "preemption_mode": PreemptionMode,
            "scheduling_policy": SchedulingPolicy,
        }
        for name, kind in choices.items():
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        for name in ("hf_overrides", "override_generation_config"):
            if not isinstance(getattr(self, name), dict | None):
                raise ValueError(f"{name} must be None or a dict, got {getattr(self, name)!r}")

        names = self.logits_processors or {}
        if not isinstance(names, dict) or not all(isinstance(text, str) for pair in names.items() for text in pair):
            raise ValueError(f"logits_processors must be None or a dict of name to module:function, got {names!r}")

    def _check_numbers(self) -> None:
        required: dict[str, tuple[int, int | None]] = {"max_logprobs": (-1, (1 << 31) - 1)}
        optional: dict[str, tuple[int, int | None]] = {
            "block_size": (1, 128),
            "kv_cache_memory_bytes": (1, None),
            "num_gpu_blocks_override": (1, 1 << 31),
            "max_num_seqs": (1, (1 << 31) - 1),
            "seed": (0, (1 << 63) - 1),
            "max_num_batched_tokens": (1, (1 << 31) - 1),
        }
        for name, (low, high) in (required | optional).items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if type(value) is not int or value < low or (high is not None and value > high):
                span = f"of at least {low}" if high is None else f"from {low} to {high}"
                raise ValueError(f"{name} must be an integer {span}, got {value!r}")
        swap = self.swap_space
        if swap is not None and (type(swap) not in (int, float) or not 0 <= swap <= MAX_SWAP_GIB):
            raise ValueError(f"swap_space must be None or a number of GiB from 0 to {MAX_SWAP_GIB}, got {swap!r}")
        share, gib = self.gpu_memory_utilization, self.gpu_memory_gib
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be a number above 0 and at most 1, got {share!r}")
        if gib is not None and (type(gib) not in (int, float) or not 0 < gib < math.inf):
            raise ValueError(f"gpu_memory_gib must be None or a number of GiB above 0, got {gib!r}")

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> Self:
        """From keyword arguments. Raises `TypeError` for an unknown one, with the nearest name there is."""
        names = [name for name in cls.__dataclass_fields__ if name != "model"]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
                raise TypeError(f"unknown engine argument {name!r}{hint}")
        return cls(model=model, **options)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field. Without a flag its entry is absent, so that the field's default holds."""
        from pyvllm.arguments import add_field_arguments

        group = parser.add_argument_group("engine")
        group.add_argument("--model", default=argparse.SUPPRESS, help="what to run (or as the first argument)")
        add_field_arguments(group, cls, skip={"model"})
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """From a parsed command line that may have entries of others too."""
        names = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in vars(namespace).items() if name in names})


def parse_length(name: str, value: object) -> int | None:
    """A number of tokens from 2048, "2048", "16k" (16,000), "16K" (16,384); None for -1 and "auto"."""
    expected = f"{name} must be a number of tokens of at least 1, such as 4096 or 16k, or auto (or -1), got {value!r}"
    if value == "auto" or (value in (-1, "-1") and not isinstance(value, bool)):
        return None
    if type(value) is int and value >= 1:
        return value
    if not isinstance(value, str):
        raise ValueError(expected)
    factors = {"k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}
    factor = factors.get(value[-1:], 1)
    try:
        number = float(value if factor == 1 else value[:-1]) * factor
        length = int(number)
    except (ValueError, OverflowError):
        raise ValueError(expected) from None
    if length != number or length < 1:
        raise ValueError(expected)
    return length


def env(name: str) -> str | None:
    """Environment variable PYVLLM_`name`, else VLLM_`name`; None if neither is set."""
    return os.environ.get(f"PYVLLM_{name}", os.environ.get(f"VLLM_{name}"))


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What one step, and one request, may hold at most."""

    max_model_len: int
    """Tokens of prompt and output of a request."""
    max_num_seqs: int
    """Sequences."""
    max_num_batched_tokens: int
    """Tokens of all sequences."""


def resolve_max_model_len(args: EngineArgs, native: int, *, usual: int | None = None) -> int:
    """The length to plan for; with `auto` the model's own, which `limit_to_pool` then lowers.

    `native`: positions the model has; `usual`: those that it should have if nothing is said, if not all of these.
    Raises `ValueError` for more than `native`, unless PYVLLM_ALLOW_LONG_MAX_MODEL_LEN is 1.
    """
    if args.max_model_len is None:
        return usual or native
    wanted = parse_length("max_model_len", args.max_model_len)
    if wanted is None:
        return native
    if wanted > native and env("ALLOW_LONG_MAX_MODEL_LEN") not in ("1", "true"):
        raise ValueError(
            f"max_model_len must be at most {native}, the positions of the model, got {wanted} "
            "(PYVLLM_ALLOW_LONG_MAX_MODEL_LEN=1 allows more, with undefined results)"
        )
    return wanted


def limit_to_pool(args: EngineArgs, max_model_len: int, *, num_blocks: int, block_size: int) -> int:
    """`max_model_len`, lowered to what the KV pool holds if it is to be found automatically.

    Raises `ValueError` with both numbers if one request of that length does not fit into the pool.
    """
    pool_tokens = num_blocks * block_size
    if max_model_len <= pool_tokens:
        return max_model_len
    if args.max_model_len is not None and parse_length("max_model_len", args.max_model_len) is None:
        return pool_tokens
    raise ValueError(
        f"max_model_len is {max_model_len} tokens, but the KV pool holds only {pool_tokens} ({num_blocks} blocks of "
        f"{block_size}): give it more memory (gpu_memory_utilization, kv_cache_memory_bytes, PYVLLM_CPU_KVCACHE_SPACE "
        f"in GiB), or lower "
        f"max_model_len to at most {pool_tokens} or to 'auto'"
    )


def resolve_step_limits(args: EngineArgs, max_model_len: int, defaults: DeviceDefaults) -> StepLimits:
    """What a step holds. Raises `ValueError` if a whole prompt must fit in a step but cannot."""
    max_num_seqs = args.max_num_seqs or defaults.max_num_seqs
    budget = args.max_num_batched_tokens
    if budget is None:
        budget = max(defaults.max_num_batched_tokens, max_num_seqs)
        if not args.enable_chunked_prefill:
            budget = max(budget, max_model_len)
    if not args.enable_chunked_prefill and budget < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens must be at least max_model_len ({max_model_len}) with enable_chunked_prefill "
            f"off, got {budget}"
        )
    return StepLimits(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
