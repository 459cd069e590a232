"""OLMo 1, 2 and 3, OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.layers.moe import ExpertsSpec
from pyvllm.layers.norm import NormSpec
from pyvllm.models.base import (
    HEAD_NORM_NAMES,
    LLAMA_NAMES,
    Family,
    base_spec,
    layer_windows,
    optional_window,
    rms_norm,
    ropes_by_window,
)
from pyvllm.models.config_fields import flag, integer, number, renamed
from pyvllm.models.families.qwen_moe import EXPERT_NAMES
from pyvllm.models.spec import ModelSpec

_OUT_NORMS: Final = {
    "layers.N.post_attention_layernorm": "layers.N.attention_out_norm",
    "layers.N.post_feedforward_layernorm": "layers.N.mlp_out_norm",
}


def olmo(config: Mapping[str, Any]) -> ModelSpec:
    """OLMo 1: LayerNorms without weights; queries, keys and values may be clipped."""
    spec = base_spec(config, norm=NormSpec(eps=1e-5, centred=True, affine=False))
    bias = flag(config, "attention_bias")
    clip = None if config.get("clip_qkv") is None else number(config, "clip_qkv")
    return replace(spec, clip_qkv=clip, qkv_bias=bias, o_bias=bias)


def olmo2(config: Mapping[str, Any], *, rotary: bool = True) -> ModelSpec:
    """OLMo 2: norms of what attention and MLP give instead of what they get; queries and keys are normed whole."""
    norm = rms_norm(config, eps=1e-5, weight_in_float32=True)
    names = {name: slot for name, slot in LLAMA_NAMES if "layernorm" not in name}
    spec = base_spec(config, names=(*names.items(), *_OUT_NORMS.items(), *HEAD_NORM_NAMES), norm=norm, rotary=rotary)
    bias = flag(config, "attention_bias")
    return replace(
        spec,
        norms=("attention_out_norm", "mlp_out_norm"),
        qk_norm=QueryKeyNorm(norm=norm, over="width"),
        qkv_bias=bias,
        o_bias=bias,
    )


def olmo3(config: Mapping[str, Any]) -> ModelSpec:
    """OLMo 3: OLMo 2 with a window in three layers of four, where rotary positions are not scaled."""
    fields = {"sliding_window": 4096, "rope_theta": 500000.0} | dict(config)
    spec = olmo2(fields, rotary=False)
    window = optional_window(fields)
    windows = layer_windows(fields, spec.num_layers, window, lambda layer: (layer + 1) % 4 != 0)
    return replace(spec, windows=windows, ropes=ropes_by_window(fields, spec, windows, local={}))


def olmoe(config: Mapping[str, Any]) -> ModelSpec:
    """OLMoE: OLMo 1 with experts, weights of norms, and queries and keys normed whole."""
    spec = olmo(config)
    if spec.clip_qkv is not None:  # It would be after the norms.
        raise ValueError(f"config field clip_qkv is {config['clip_qkv']!r}, supported: null")
    norm = rms_norm(config, eps=1e-5)
    fields = renamed(config, {"num_local_experts": "num_experts"})
    num_experts = integer(fields, "num_experts", 64)
    return replace(
        spec,
        norm=norm,
        qk_norm=QueryKeyNorm(norm=norm, over="width"),
        names=spec.names + HEAD_NORM_NAMES + EXPERT_NAMES,
        experts=ExpertsSpec(
            num_experts=num_experts,
            top_k=integer(config, "num_experts_per_tok", 8, most=num_experts),
            intermediate_size=spec.intermediate_size,
            normalise=flag(config, "norm_topk_prob"),
            layers=frozenset(range(spec.num_layers)),
        ),
    )


FAMILIES: Final = (
    Family(name="OLMo 1", architectures=("OlmoForCausalLM",), make=olmo),
    Family(name="OLMo 2", architectures=("Olmo2ForCausalLM",), make=olmo2),
    Family(name="OLMo 3", architectures=("Olmo3ForCausalLM",), make=olmo3),
    Family(name="OLMoE", architectures=("OlmoeForCausalLM",), make=olmoe),
)
