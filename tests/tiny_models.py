"""Tiny random models in float32: made by transformers, and loaded into the decoder without reading files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from pyvllm.kernels import AnyKernels, select
from pyvllm.kv_cache import KVCache
from pyvllm.models import Decoder, ModelSpec
from tests.plans import Entry, plan_buffer, view

CPU = torch.device("cpu")
VOCAB_SIZE = 96
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 300.0}
# Name -> (model type, fields of its config beside SIZES).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_new"}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-nemo": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
}


def hf_model(name: str) -> Any:
    """A random model whose constants (norms, biases) are random too."""
    model_type, fields = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | fields))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float(parameter_name.endswith("norm.weight")), std=0.3)
    return model


def config_of(model: Any) -> dict[str, Any]:
    """What its config.json holds."""
    return dict(model.config.to_dict()) | {"architectures": [type(model).__name__]}


def load(spec: ModelSpec, state: Mapping[str, Tensor], *, max_model_len: int = 80) -> Decoder:
    decoder = Decoder(spec, max_model_len=max_model_len, dtype=torch.float32, device=CPU)
    slots = decoder.slots()
    with torch.no_grad():
        for name, tensor in state.items():
            parts = spec.unpack(name, tensor)
            assert parts is not None, name
            for slot, part in parts:
                slots.pop(slot).copy_(part)
    assert not slots
    return decoder


class Paged:
    """Feeds a decoder sequences, their KV strewn over a pool."""

    def __init__(self, decoder: Decoder, *, block_size: int, kernels: AnyKernels | None = None) -> None:
        self.decoder = decoder
        self.kernels = kernels or select(CPU, torch.float32)
        self.block_size = block_size
        num_blocks = 400 // block_size + 8
        self.kv = KVCache(
            decoder.spec,
            num_blocks=num_blocks,
            num_host_blocks=0,
            block_size=block_size,
            dtype=torch.float32,
            device=CPU,
        )
        self.free = torch.randperm(num_blocks).tolist()
        self.lens: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    def entry(self, sequence: int, token_ids: Sequence[int]) -> Entry:
        start = self.lens.get(sequence, 0)
        self.lens[sequence] = start + len(token_ids)
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.block_size < self.lens[sequence]:
            table.append(self.free.pop())
        return Entry(token_ids=token_ids, start=start, blocks=list(table))

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Query tokens by sequence -> logits [query tokens, V] by sequence."""
        order = sorted(tokens, key=lambda sequence: len(tokens[sequence]) != 1)
        buffer = plan_buffer([self.entry(i, tokens[i]) for i in order], block_size=self.block_size)
        step = view(buffer)
        hidden = self.decoder.forward(step, torch.zeros(1, dtype=torch.int32), self.kv.layers, self.kernels)
        parts = torch.split(self.decoder.logits(hidden, self.kernels), [len(tokens[i]) for i in order])
        return dict(zip(order, parts, strict=True))


def random_ids(length: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,)).tolist()


def hf_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def plain_config(**fields: Any) -> dict[str, Any]:
    return SIZES | {"architectures": ["LlamaForCausalLM"]} | fields
