"""Phi 1 to 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.models.base import Family, base_spec, layer_norm, optional_window, rms_norm
from pyvllm.models.config_fields import flag
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored, fused_qkv


def phi(config: Mapping[str, Any]) -> ModelSpec:
    """Phi 1, 1.5 and 2: attention and MLP side by side on one norm, biases everywhere."""
    fields = dict(config)
    fields = {"partial_rotary_factor": 0.5} | fields
    spec = base_spec(fields, norm=layer_norm(config, "layer_norm_eps"), activation="gelu_new")
    return replace(
        spec,
        arrangement="parallel",
        norms=("norm1",),
        qk_norm=QueryKeyNorm(norm=spec.norm) if flag(config, "qk_layernorm") else None,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        head_bias=True,
        names=(
            ("embed_tokens", "embed"),
            ("layers.N.input_layernorm", "layers.N.norm1"),
            ("layers.N.self_attn.q_proj", "layers.N.q"),
            ("layers.N.self_attn.k_proj", "layers.N.k"),
            ("layers.N.self_attn.v_proj", "layers.N.v"),
            ("layers.N.self_attn.dense", "layers.N.o"),
            ("layers.N.self_attn.q_layernorm", "layers.N.q_norm"),
            ("layers.N.self_attn.k_layernorm", "layers.N.k_norm"),
            ("layers.N.mlp.fc1", "layers.N.up"),
            ("layers.N.mlp.fc2", "layers.N.down"),
            ("final_layernorm", "final_norm"),
            ("lm_head", "head"),
        ),
    )


def phi3(config: Mapping[str, Any]) -> ModelSpec:
    """Phi 3 and 4: LLaMA with fused matrices; what its files call su or yarn is longrope."""
    fields = {"original_max_position_embeddings": 4096} | dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if isinstance(scaling, Mapping):
            kind = scaling.get("rope_type") or scaling.get("type")
            fields[name] = dict(scaling) | {"rope_type": "longrope" if kind in ("su", "yarn") else kind}
    spec = base_spec(fields, norm=rms_norm(config, eps=1e-5), max_position_embeddings=4096)
    width = spec.intermediate_size
    bias = flag(config, "attention_bias")
    return replace(
        spec,
        qkv_bias=bias,
        o_bias=bias,
        windows=(optional_window(config),) * spec.num_layers,
        names=(
            ("embed_tokens", "embed"),
            ("layers.N.input_layernorm", "layers.N.norm1"),
            ("layers.N.self_attn.qkv_proj", fused_qkv(spec.num_heads, spec.num_kv_heads, spec.head_dim)),
            ("layers.N.self_attn.o_proj", "layers.N.o"),
            ("layers.N.post_attention_layernorm", "layers.N.norm2"),
            ("layers.N.mlp.gate_up_proj", Stored(slots=("layers.N.gate", "layers.N.up"), rows=(width, width))),
            ("layers.N.mlp.down_proj", "layers.N.down"),
            ("norm", "final_norm"),
            ("lm_head", "head"),
        ),
    )


FAMILIES: Final = (
    Family(name="Phi 1, 1.5, 2", architectures=("PhiForCausalLM",), make=phi),
    Family(name="Phi 3, Phi 3.5, Phi 4", architectures=("Phi3ForCausalLM",), make=phi3),
)
