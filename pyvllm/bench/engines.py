"""The engines that `pyvllm bench throughput` compares, behind one interface."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from pyvllm.bench.workloads import Request, Workload
from pyvllm.config import EngineArgs

Sequences: TypeAlias = list[list[int]]
"""Generated token ids: all sequences of the first request, then those of the second, and so on."""
_TRANSFORMERS_BATCH: Final = 32


class BenchEngine(Protocol):
    """A loaded model."""

    name: str
    """As in reports."""

    def job(self, workload: Workload, temperature: float) -> Callable[[], Sequences]:
        """Get all ready that is not to be timed; calling the result runs the workload."""

    def close(self) -> None:
        """Free the model's memory."""


class PyvllmEngine:
    """Ours."""

    name = "pyvllm"

    def __init__(self, args: EngineArgs) -> None:
        """Load the model."""
        from pyvllm.llm import LLM

        self.llm: LLM = LLM.from_engine_args(args)

    def job(self, workload: Workload, temperature: float) -> Callable[[], Sequences]:
        """See `BenchEngine`."""
        from pyvllm.sampling_params import SamplingParams

        prompts, params = _prompts(workload), [SamplingParams(**fields) for fields in _params(workload, temperature)]
        return lambda: _token_ids(self.llm.generate(prompts, params, use_tqdm=False))

    def close(self) -> None:
        """See `BenchEngine`."""
        self.llm.close()
        _free_memory()


class VllmEngine:
    """vLLM, from its own package, with its defaults but for what `EngineArgs` says."""

    name = "vllm"

    def __init__(self, args: EngineArgs) -> None:
        """Load the model."""
        self._vllm: Any = importlib.import_module("vllm")
        self._llm: Any = self._vllm.LLM(**_vllm_options(args))

    def job(self, workload: Workload, temperature: float) -> Callable[[], Sequences]:
        """See `BenchEngine`."""
        prompts = _prompts(workload)
        params = [self._vllm.SamplingParams(**fields) for fields in _params(workload, temperature)]
        return lambda: _token_ids(self._llm.generate(prompts, params, use_tqdm=False))

    def close(self) -> None:
        """See `BenchEngine`."""
        engine: Any = getattr(self._llm.llm_engine, "engine_core", None)
        if hasattr(engine, "shutdown"):
            engine.shutdown()
        del self._llm
        _free_memory()


class TransformersEngine:
    """transformers' `generate`: batches in the order of the requests, padded on the left, each to its longest."""

    name = "transformers"

    def __init__(self, args: EngineArgs) -> None:
        """Load the model, or make one with random weights."""
        import torch
        import transformers

        from pyvllm.hub import find_model
        from pyvllm.loading import choose_device, resolve_dtype

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        files, device = find_model(args), choose_device(args)
        dtype = resolve_dtype(args, files.config, files, device)
        auto = transformers.AutoModelForCausalLM
        if args.load_format == "dummy":
            with torch.device(device):
                model = auto.from_config(transformers.AutoConfig.from_pretrained(str(files.path)), dtype=dtype)
        elif files.gguf_file is not None:
            dense = transformers.GgufConfig(dequantize=True)
            model = auto.from_pretrained(
                str(files.path.parent), gguf_file=files.path.name, dtype=dtype, quantization_config=dense
            )
        else:
            model = auto.from_pretrained(str(files.path), dtype=dtype)
        self._model: Any = model.to(device).eval()
        self._device = device

    def job(self, workload: Workload, temperature: float) -> Callable[[], Sequences]:
        """See `BenchEngine`."""
        requests = [request for request in workload.requests for _ in range(workload.n)]
        batches = [requests[i : i + _TRANSFORMERS_BATCH] for i in range(0, len(requests), _TRANSFORMERS_BATCH)]
        return lambda: [row for batch in batches for row in self._generate(batch, temperature)]

    def _generate(self, batch: Sequence[Request], temperature: float) -> Sequences:
        import torch

        longest = max(len(request.prompt) for request in batch)
        output_len = max(request.output_len for request in batch)
        padding = [longest - len(request.prompt) for request in batch]
        ids = [[0] * pad + request.prompt for pad, request in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        made = self._model.generate(
            torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
            **sampling,
        )
        rows: Sequences = made[:, longest:].tolist()
        return [row[: request.output_len] for row, request in zip(rows, batch, strict=True)]

    def close(self) -> None:
        """See `BenchEngine`."""
        del self._model
        _free_memory()


ENGINES: Final[dict[str, Callable[[EngineArgs], BenchEngine]]] = {
    "pyvllm": PyvllmEngine,
    "vllm": VllmEngine,
    "transformers": TransformersEngine,
}
"""What `--engines` knows."""


def check_engines(names: Sequence[str]) -> None:
    """Raise `ValueError` for an engine that is unknown or not installed."""
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"engines must be some of {', '.join(ENGINES)}, got {name!r}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"engines has {name!r}, but the package {name} is not installed here")


def _vllm_options(args: EngineArgs) -> dict[str, Any]:
    """What differs from our defaults and has the same name there."""
    shared = (
        *("model", "tokenizer", "skip_tokenizer_init", "load_format", "dtype", "max_model_len", "seed"),
        *("enforce_eager", "block_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "hf_overrides"),
        *("enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
    )
    defaults = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    options = {name: getattr(args, name) for name in shared if getattr(args, name) != defaults[name]}
    # The same work: vLLM's own defaults for these depend on the kind of GPU.
    return {"enable_prefix_caching": args.enable_prefix_caching, "max_num_seqs": 1024} | options


def _prompts(workload: Workload) -> list[Any]:
    return [{"prompt_token_ids": request.prompt} for request in workload.requests]


def _params(workload: Workload, temperature: float) -> list[dict[str, Any]]:
    fixed = {"n": workload.n, "temperature": temperature, "ignore_eos": True, "detokenize": False}
    return [fixed | {"max_tokens": request.output_len} for request in workload.requests]


def _token_ids(outputs: Sequence[Any]) -> Sequences:
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
