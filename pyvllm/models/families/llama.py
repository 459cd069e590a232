"""LLaMA and what differs from it in a few flags: Yi, Mistral, Qwen 2, Qwen 3, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.kernels import ACTIVATIONS
from pyvllm.models.config_fields import choice, flag, integer, number, rope
from pyvllm.models.spec import ModelSpec

_NAMES: Final = (
    ("embed_tokens", "embed"),
    ("layers.N.input_layernorm", "layers.N.norm1"),
    ("layers.N.self_attn.q_proj", "layers.N.q"),
    ("layers.N.self_attn.k_proj", "layers.N.k"),
    ("layers.N.self_attn.v_proj", "layers.N.v"),
    ("layers.N.self_attn.o_proj", "layers.N.o"),
    ("layers.N.post_attention_layernorm", "layers.N.norm2"),
    ("layers.N.mlp.gate_proj", "layers.N.gate"),
    ("layers.N.mlp.up_proj", "layers.N.up"),
    ("layers.N.mlp.down_proj", "layers.N.down"),
    ("norm", "final_norm"),
    ("lm_head", "head"),
)
_YI_NAMES: Final = (("layers.N.ln1", "layers.N.norm1"), ("layers.N.ln2", "layers.N.norm2"))
_HEAD_NORM_NAMES: Final = (
    ("layers.N.self_attn.q_norm", "layers.N.q_norm"),
    ("layers.N.self_attn.k_norm", "layers.N.k_norm"),
)

# Far beyond any model: a corrupt number must not fill the memory with layers.
_MOST_LAYERS = 10_000


def llama(config: Mapping[str, Any]) -> ModelSpec:
    """LLaMA 1 to 3, SmolLM2, and Yi with its own architecture name or without."""
    bias = flag(config, "attention_bias")
    return replace(
        _base(config, max_position_embeddings=2048),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        names=_NAMES + _YI_NAMES,
    )


def mistral(config: Mapping[str, Any]) -> ModelSpec:
    """Mistral: a window in all layers. `sliding_window` absent means 4096, null means none."""
    spec = _base({"num_key_value_heads": 8} | dict(config), max_position_embeddings=131072)
    window = _window({"sliding_window": 4096} | dict(config))
    return replace(spec, windows=(window,) * spec.num_layers)


def qwen2(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen 2 and 2.5: biases of q, k and v; a window, if any, in the upper layers."""
    spec = _base({"num_key_value_heads": 32} | dict(config), max_position_embeddings=32768)
    return replace(spec, qkv_bias=True, windows=_qwen_windows(config, spec.num_layers))


def qwen3(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen 3: norms of query and key heads, whose size is a field of its own; windows as in Qwen 2."""
    bias = flag(config, "attention_bias")
    spec = _base({"num_key_value_heads": 32, "head_dim": 128} | dict(config), max_position_embeddings=32768)
    return replace(
        spec,
        qkv_bias=bias,
        o_bias=bias,
        head_norms=True,
        names=_NAMES + _HEAD_NORM_NAMES,
        windows=_qwen_windows(config, spec.num_layers),
    )


def _base(config: Mapping[str, Any], *, max_position_embeddings: int) -> ModelSpec:
    """What all of them share. `max_position_embeddings` is the default of that field."""
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"config field hidden_size is {hidden_size}, must be a multiple of num_attention_heads {num_heads}"
        )
    head_dim = integer(config, "head_dim", hidden_size // num_heads)
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config field num_key_value_heads is {num_kv_heads}, must divide num_attention_heads {num_heads}"
        )
    max_len = integer(config, "max_position_embeddings", max_position_embeddings)
    return ModelSpec(
        architecture=config["architectures"][0],
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        windows=(None,) * integer(config, "num_hidden_layers", most=_MOST_LAYERS),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope(config, head_dim=head_dim, max_position_embeddings=max_len),
        activation=choice(config, "hidden_act", ACTIVATIONS, "silu"),
        tied=flag(config, "tie_word_embeddings"),
        names=_NAMES,
    )


def _window(config: Mapping[str, Any]) -> int | None:
    """`sliding_window`; absent and null mean none."""
    return None if config.get("sliding_window") is None else integer(config, "sliding_window")


def _qwen_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = _window({"sliding_window": 4096} | dict(config)) if flag(config, "use_sliding_window") else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers")
        first = 28 if first is None else first
        if type(first) is not int:
            raise ValueError(f"config field max_window_layers is {first!r}, must be a whole number")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ValueError(f"config field layer_types is {layer_types!r}, must have {num_layers} entries, one a layer")
    kinds = {"full_attention": None, "sliding_attention": window}
    return tuple(kinds[choice({"layer_types": kind}, "layer_types", kinds)] for kind in layer_types)
