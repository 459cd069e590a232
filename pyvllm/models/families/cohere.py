"""Command R."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.models.base import LLAMA_NAMES, Family, base_spec, layer_norm
from pyvllm.models.config_fields import flag, number
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored


def cohere(config: Mapping[str, Any]) -> ModelSpec:
    """Attention and MLP side by side on one norm; pairs of neighbours are rotated; logits have a factor."""
    norm = layer_norm(config, "layer_norm_eps", bias=False)
    spec = base_spec({"rope_theta": 500000.0} | dict(config), norm=norm, max_position_embeddings=8192, tied=True)
    bias = flag(config, "attention_bias")
    head_norms = (
        ("layers.N.self_attn.q_norm", Stored(slots=("layers.N.q_norm.E",), experts=spec.num_heads)),
        ("layers.N.self_attn.k_norm", Stored(slots=("layers.N.k_norm.E",), experts=spec.num_kv_heads)),
    )
    return replace(
        spec,
        ropes=tuple(rope and replace(rope, interleaved=True) for rope in spec.ropes),
        arrangement="parallel",
        norms=("norm1",),
        qk_norm=QueryKeyNorm(norm=norm, over="each_head") if flag(config, "use_qk_norm") else None,
        qkv_bias=bias,
        o_bias=bias,
        logit_scale=number(config, "logit_scale", 0.0625),
        names=(*LLAMA_NAMES, *head_norms),
    )


FAMILIES: Final = (Family(name="Command R", architectures=("CohereForCausalLM",), make=cohere),)
