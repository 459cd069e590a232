"""Tiny random models in float32: made by transformers, and loaded into the decoder without reading files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from pyvllm.kernels import AnyKernels, select
from pyvllm.kv_cache import KVCache
from pyvllm.models import Decoder, ModelSpec
from pyvllm.step import HEADER_LEN, StepView
from tests.plans import Entry, plan_buffer

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
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.5 * i for i in range(32)],
    "original_max_position_embeddings": 1024,
}
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


def random_model(model_type: str, *, seed: int = 0, std: float = 0.25, **fields: Any) -> Any:
    """A random model of any family: matrices are normal(0, `std`), constants (norms, biases) are strewn about."""
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=std)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def saved_state(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_pretrained` writes: the contents of config.json, and the tensors under their names on disk."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


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
    assert not slots, slots.keys()
    return decoder


class Paged:
    """Feeds a decoder sequences, at most `num_tokens` in all, their KV strewn over a pool."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        block_size: int,
        kernels: AnyKernels | None = None,
        num_tokens: int = 400,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        self.decoder = decoder
        self.kernels = kernels or select(device, dtype)
        self.block_size = block_size
        num_blocks = num_tokens // block_size + 8
        self.kv = KVCache(
            decoder.spec,
            num_blocks=num_blocks,
            num_host_blocks=0,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )
        self.free = torch.randperm(num_blocks).tolist()
        self.lens: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    def share(self, sequence: int, of: int, blocks: int) -> None:
        """A new sequence begins with whole blocks of another, as a prefix found in the cache does."""
        self.tables[sequence] = self.tables[of][:blocks]
        self.lens[sequence] = blocks * self.block_size

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
        device = self.kv.pool.device
        step = StepView(torch.from_numpy(buffer).to(device), buffer[:HEADER_LEN].tolist())
        previous = torch.zeros(1, dtype=torch.int32, device=device)
        hidden = self.decoder.forward(step, previous, self.kv.layers, self.kernels)
        parts = torch.split(self.decoder.logits(hidden, self.kernels), [len(tokens[i]) for i in order])
        return dict(zip(order, parts, strict=True))


def check_every_position(decoder: Decoder, expected: Callable[[list[int]], Tensor], *, block_size: int) -> None:
    """Three texts side by side: one whole and then token by token, one in chunks, one that starts later. Logits are
    within 1e-4 of `expected`, which gives those of all positions of a text.
    """
    paged = Paged(decoder, block_size=block_size)
    texts = [random_ids(26), random_ids(31), random_ids(19)]
    steps = [
        {0: texts[0][:20], 1: texts[1][:1]},
        {0: texts[0][20:21], 1: texts[1][1:9], 2: texts[2][:11]},
        {0: texts[0][21:22], 1: texts[1][9:25], 2: texts[2][11:12]},
        *({0: texts[0][i : i + 1], 1: texts[1][i + 3 : i + 4], 2: texts[2][i - 10 : i - 9]} for i in range(22, 26)),
        {1: texts[1][29:30], 2: texts[2][16:19]},
        {1: texts[1][30:31]},
    ]
    found: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    fed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in steps:
        for sequence, logits in paged.step(step).items():
            found[sequence].append(logits)
            fed[sequence] += step[sequence]
    assert [fed[i] for i in range(3)] == texts
    for sequence, text in enumerate(texts):
        torch.testing.assert_close(torch.cat(found[sequence]), expected(text), atol=1e-4, rtol=1e-5)


def random_ids(length: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,)).tolist()


def hf_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def plain_config(**fields: Any) -> dict[str, Any]:
    return SIZES | {"architectures": ["LlamaForCausalLM"]} | fields
