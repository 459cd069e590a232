"""Models that exist only as a configuration: their weights are random, which costs what trained ones cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pyvllm.config import EngineArgs

LLAMA3_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}
QWEN3_06B: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "initializer_range": 0.02,
}
BENCH_MODELS: Final = {"llama3-8b": LLAMA3_8B, "qwen3-0.6b": QWEN3_06B}
"""By the name that `--model` takes."""


def write_model(name: str, folder: Path) -> Path:
    """Write the configuration of one of `BENCH_MODELS` into `folder`, which is made, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BENCH_MODELS[name], indent=2), encoding="utf-8")
    return folder


@contextlib.contextmanager
def bench_args(args: EngineArgs) -> Iterator[EngineArgs]:
    """`args` for token ids without text; one of `BENCH_MODELS` becomes a folder, there within the `with` block."""
    with contextlib.ExitStack() as stack:
        if args.model in BENCH_MODELS:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyvllm-bench-")))
            folder = write_model(args.model, root / args.model)
            args = dataclasses.replace(args, model=str(folder), load_format="dummy")
        yield dataclasses.replace(args, skip_tokenizer_init=True)
