"""InternLM 1, 2, 2.5 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import Family, base_spec, rms_norm
from pyvllm.models.config_fields import flag, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import fused_qkv


def internlm(config: Mapping[str, Any]) -> ModelSpec:
    """InternLM 1: LLaMA with biases in attention."""
    fields = dict(config)
    rotary = config.get("rotary")
    if isinstance(rotary, Mapping) and not config.get("rope_scaling"):
        fields["rope_theta"] = rotary.get("base", 10000)
        if rotary.get("type") == "dynamic":
            fields["rope_scaling"] = {"type": "dynamic", "factor": rotary.get("scaling_factor", 1.0)}
    bias = flag(config, "bias", True)
    return replace(base_spec(fields), qkv_bias=bias, o_bias=bias)


def internlm2(config: Mapping[str, Any]) -> ModelSpec:
    """InternLM 2 and 2.5: LLaMA with q, k and v fused by KV head."""
    spec = base_spec(config, norm=rms_norm(config), max_position_embeddings=32768)
    qkv = fused_qkv(spec.num_heads, spec.num_kv_heads, spec.head_dim, groups=spec.num_kv_heads)
    bias = flag(config, "bias")
    return replace(
        spec,
        qkv_bias=bias,
        o_bias=bias,
        names=(
            ("tok_embeddings", "embed"),
            ("layers.N.attention_norm", "layers.N.norm1"),
            ("layers.N.attention.wqkv", qkv),
            ("layers.N.attention.wo", "layers.N.o"),
            ("layers.N.ffn_norm", "layers.N.norm2"),
            ("layers.N.feed_forward.w1", "layers.N.gate"),
            ("layers.N.feed_forward.w3", "layers.N.up"),
            ("layers.N.feed_forward.w2", "layers.N.down"),
            ("norm", "final_norm"),
            ("output", "head"),
        ),
    )


def internlm3(config: Mapping[str, Any]) -> ModelSpec:
    """InternLM 3: LLaMA with flags for biases of q, k, v and of all else."""
    fields = renamed(config, {"attention_bias": "qkv_bias", "mlp_bias": "bias"})
    bias = flag(fields, "bias")
    spec = base_spec({"num_key_value_heads": 2} | fields, max_position_embeddings=32768)
    return replace(spec, qkv_bias=flag(fields, "qkv_bias"), o_bias=bias, mlp_bias=bias)


FAMILIES: Final = (
    Family(
        name="InternLM 1",
        architectures=("InternLMForCausalLM",),
        make=internlm,
        verified="the same weights as LLaMA in transformers",
    ),
    Family(
        name="InternLM 2, InternLM 2.5",
        architectures=("InternLM2ForCausalLM",),
        make=internlm2,
        verified="the same weights as LLaMA in transformers",
    ),
    Family(
        name="InternLM 3",
        architectures=("InternLM3ForCausalLM",),
        make=internlm3,
        verified="the same weights as LLaMA in transformers",
    ),
)
