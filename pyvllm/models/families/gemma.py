"""Gemma 1, 2 and 3 (the text part): norms multiply by 1 + weight, the embedding is scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.layers.norm import NormSpec
from pyvllm.models.base import (
    HEAD_NORM_NAMES,
    LLAMA_NAMES,
    Family,
    base_spec,
    layer_windows,
    optional_window,
    ropes_by_window,
)
from pyvllm.models.config_fields import flag, integer, number, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored

_FOUR_NORMS: Final = (
    ("layers.N.post_attention_layernorm", "layers.N.attention_out_norm"),
    ("layers.N.pre_feedforward_layernorm", "layers.N.norm2"),
    ("layers.N.post_feedforward_layernorm", "layers.N.mlp_out_norm"),
)
_GEMMA3_DEFAULTS: Final = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def gemma(config: Mapping[str, Any]) -> ModelSpec:
    """Gemma 1."""
    fields = {"num_key_value_heads": 16, "head_dim": 256} | dict(config)
    # Early files say gelu and mean its tanh form.
    if fields.get("hidden_act") == "gelu":
        fields["hidden_act"] = "gelu_pytorch_tanh"
    return _gemma(fields, names=LLAMA_NAMES)


def gemma2(config: Mapping[str, Any]) -> ModelSpec:
    """Gemma 2: norms after attention and MLP too, soft caps, a window in every second layer."""
    fields = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096} | dict(config)
    spec = _gemma(fields, names=dict(LLAMA_NAMES) | dict(_FOUR_NORMS))
    return replace(
        spec,
        norms=("norm1", "norm2", "attention_out_norm", "mlp_out_norm"),
        scale=integer(config, "query_pre_attn_scalar", 256) ** -0.5,
        softcap=_cap({"attn_logit_softcapping": 50.0} | dict(config), "attn_logit_softcapping"),
        logit_softcap=_cap({"final_logit_softcapping": 30.0} | dict(config), "final_logit_softcapping"),
        windows=layer_windows(fields, spec.num_layers, optional_window(fields), lambda layer: layer % 2 == 0),
    )


def gemma3(config: Mapping[str, Any]) -> ModelSpec:
    """Gemma 3, text alone: norms of heads; of six layers, five have a window and rotary positions of their own."""
    fields = _GEMMA3_DEFAULTS | {name: value for name, value in config.items() if value is not None}
    layers = integer(fields, "num_hidden_layers")
    pattern = integer(fields, "sliding_window_pattern", 6)
    windows = layer_windows(fields, layers, integer(fields, "sliding_window"), lambda layer: (layer + 1) % pattern != 0)
    names = dict(LLAMA_NAMES) | dict(HEAD_NORM_NAMES) | dict(_FOUR_NORMS)
    spec = _gemma(fields, names=names, max_len=131072, rotary=False)
    return replace(
        spec,
        norms=("norm1", "norm2", "attention_out_norm", "mlp_out_norm"),
        qk_norm=QueryKeyNorm(norm=spec.norm),
        scale=integer(fields, "query_pre_attn_scalar") ** -0.5,
        softcap=_cap(config, "attn_logit_softcapping"),
        logit_softcap=_cap(config, "final_logit_softcapping"),
        windows=windows,
        ropes=ropes_by_window(fields, spec, windows, local={"rope_theta": fields["rope_local_base_freq"]}),
    )


def gemma3_with_images(config: Mapping[str, Any]) -> ModelSpec:
    """The text part of a Gemma 3 that sees images too: its other weights are skipped."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config field text_config is {text!r}, must be an object")
    spec = gemma3(dict(text) | {"architectures": config["architectures"]})
    parts = ("vision_tower.", "multi_modal_projector.")
    return replace(
        spec,
        prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
        skipped=(*parts, *(f"model.{part}" for part in parts)),
    )


def _gemma(
    config: Mapping[str, Any],
    *,
    names: Mapping[str, str] | tuple[tuple[str, str], ...],
    max_len: int = 8192,
    rotary: bool = True,
) -> ModelSpec:
    if flag(config, "use_bidirectional_attention"):
        raise ValueError("config field use_bidirectional_attention is true, supported: false")
    fields = config
    if config.get("hidden_activation") is not None:
        fields = renamed({**config, "hidden_act": None}, {"hidden_activation": "hidden_act"})
    norm = NormSpec(eps=number(config, "rms_norm_eps", 1e-6), weight_in_float32=True, float32_parameters=True)
    spec = base_spec(
        fields,
        names=tuple((name, _plus_one(slot)) for name, slot in dict(names).items()),
        norm=norm,
        max_position_embeddings=max_len,
        activation="gelu_pytorch_tanh",
        rotary=rotary,
        tied=True,
    )
    bias = flag(config, "attention_bias")
    return replace(spec, qkv_bias=bias, o_bias=bias, embed_scale=spec.hidden_size**0.5)


def _plus_one(slot: str) -> str | Stored:
    return Stored(slots=(slot,), plus=1.0) if "norm" in slot else slot


def _cap(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else number(config, name)


FAMILIES: Final = (
    Family(name="Gemma", architectures=("GemmaForCausalLM",), make=gemma),
    Family(name="Gemma 2", architectures=("Gemma2ForCausalLM",), make=gemma2),
    Family(name="Gemma 3 (text)", architectures=("Gemma3ForCausalLM",), make=gemma3),
    Family(
        name="Gemma 3 (the text part of models with images)",
        architectures=("Gemma3ForConditionalGeneration",),
        make=gemma3_with_images,
    ),
)
