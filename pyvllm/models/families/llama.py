"""LLaMA and what differs from it in a few flags: Yi, Mistral, Qwen 2, Qwen 3, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.models.base import HEAD_NORM_NAMES, LLAMA_NAMES, Family, base_spec, layer_windows, optional_window
from pyvllm.models.config_fields import flag
from pyvllm.models.spec import ModelSpec

_YI_NAMES: Final = (("layers.N.ln1", "layers.N.norm1"), ("layers.N.ln2", "layers.N.norm2"))


def llama(config: Mapping[str, Any]) -> ModelSpec:
    """LLaMA 1 to 3, SmolLM2, and Yi with its own architecture name or without."""
    bias = flag(config, "attention_bias")
    return replace(
        base_spec(config, names=LLAMA_NAMES + _YI_NAMES),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
    )


def mistral(config: Mapping[str, Any]) -> ModelSpec:
    """Mistral: a window in all layers. `sliding_window` absent means 4096, null means none."""
    spec = base_spec({"num_key_value_heads": 8} | dict(config), max_position_embeddings=131072)
    window = optional_window({"sliding_window": 4096} | dict(config))
    return replace(spec, windows=(window,) * spec.num_layers)


def ministral(config: Mapping[str, Any]) -> ModelSpec:
    """Ministral: a window in those layers that `layer_types` names, in all if that is absent."""
    fields = {"num_key_value_heads": 8} | dict(config)
    spec = base_spec(fields, max_position_embeddings=131072)
    window = optional_window({"sliding_window": 4096} | dict(config))
    return replace(spec, windows=layer_windows(config, spec.num_layers, window, lambda layer: True))


def qwen2(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen 2 and 2.5: biases of q, k and v; a window, if any, in the upper layers."""
    spec = base_spec({"num_key_value_heads": 32} | dict(config), max_position_embeddings=32768)
    return replace(spec, qkv_bias=True, windows=qwen_windows(config, spec.num_layers))


def qwen3(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen 3: norms of query and key heads, whose size is a field of its own; windows as in Qwen 2."""
    bias = flag(config, "attention_bias")
    spec = base_spec({"num_key_value_heads": 32, "head_dim": 128} | dict(config), max_position_embeddings=32768)
    return replace(
        spec,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QueryKeyNorm(norm=spec.norm),
        names=spec.names + HEAD_NORM_NAMES,
        windows=qwen_windows(config, spec.num_layers),
    )


def qwen_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Of each layer, its window: from layer `max_window_layers` on, if `use_sliding_window`."""
    window = optional_window({"sliding_window": 4096} | dict(config)) if flag(config, "use_sliding_window") else None
    first = config.get("max_window_layers")
    first = 28 if first is None else first
    if type(first) is not int:
        raise ValueError(f"config field max_window_layers is {first!r}, must be a whole number")
    return layer_windows(config, num_layers, window, lambda layer: layer >= first)


FAMILIES: Final = (
    Family(
        name="LLaMA 1 to 3, SmolLM2, Vicuna, Yi",
        architectures=("LlamaForCausalLM", "LLaMAForCausalLM", "YiForCausalLM"),
        make=llama,
    ),
    Family(name="Mistral", architectures=("MistralForCausalLM",), make=mistral),
    Family(name="Ministral", architectures=("MinistralForCausalLM",), make=ministral),
    Family(name="Qwen 2, Qwen 2.5", architectures=("Qwen2ForCausalLM",), make=qwen2),
    Family(name="Qwen 3", architectures=("Qwen3ForCausalLM",), make=qwen3),
)
