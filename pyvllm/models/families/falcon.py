"""Falcon: RW (ALiBi), 7B (one KV head), 40B and 180B, 11B; in today's and in the first spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import Family, alibi_slopes, base_spec, layer_norm, with_mlp_size
from pyvllm.models.config_fields import flag, integer, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import fused_qkv

_FIELDS: Final = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
}


def falcon(config: Mapping[str, Any]) -> ModelSpec:
    """Falcon as transformers writes it."""
    return _falcon(config, parallel=True, new=False)


def refined_web(config: Mapping[str, Any]) -> ModelSpec:
    """Falcon as it came out first: a number of KV heads meant the new architecture, and flags had other defaults."""
    new = config.get("model_type") == "RefinedWeb" or (config.get("n_head_kv") or 1) != 1
    return _falcon(config, parallel=new, new=new)


def _falcon(config: Mapping[str, Any], *, parallel: bool, new: bool) -> ModelSpec:
    """`parallel` and `new`: what `parallel_attn` and `new_decoder_architecture` mean if they are absent."""
    fields = with_mlp_size(renamed(config, _FIELDS)) | {"head_dim": None, "num_key_value_heads": None}
    fields = renamed(fields, {"num_kv_heads": "num_key_value_heads"})
    new = flag(config, "new_decoder_architecture", new)
    heads = integer(fields, "num_attention_heads")
    if not new:
        fields["num_key_value_heads"] = 1 if flag(config, "multi_query", True) else heads
    alibi = flag(config, "alibi")
    spec = base_spec(
        fields,
        norm=layer_norm(config, "layer_norm_epsilon"),
        activation="gelu",
        rotary=not alibi,
        tied=True,
    )
    bias = flag(config, "bias")
    two_norms = new and integer(config, "num_ln_in_parallel_attn", 2) == 2
    parallel = new or flag(config, "parallel_attn", parallel)
    num_kv_heads = spec.num_kv_heads
    groups = num_kv_heads if new or num_kv_heads > 1 else 1
    # The bias is added before the scores are scaled.
    slopes = tuple(slope * spec.head_dim**-0.5 for slope in alibi_slopes(heads)) if alibi else None
    return replace(
        spec,
        alibi_slopes=slopes,
        arrangement="parallel" if parallel else "sequential",
        norms=("norm1", "norm2") if two_norms or not parallel else ("norm1",),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        names=(
            ("word_embeddings", "embed"),
            ("h.N.input_layernorm", "layers.N.norm1"),
            ("h.N.ln_attn", "layers.N.norm1"),
            ("h.N.self_attention.query_key_value", fused_qkv(heads, num_kv_heads, spec.head_dim, groups=groups)),
            ("h.N.self_attention.dense", "layers.N.o"),
            ("h.N.post_attention_layernorm", "layers.N.norm2"),
            ("h.N.ln_mlp", "layers.N.norm2"),
            ("h.N.mlp.dense_h_to_4h", "layers.N.up"),
            ("h.N.mlp.dense_4h_to_h", "layers.N.down"),
            ("ln_f", "final_norm"),
            ("lm_head", "head"),
        ),
        prefixes=("transformer.",),
    )


FAMILIES: Final = (
    Family(name="Falcon", architectures=("FalconForCausalLM",), make=falcon),
    Family(name="Falcon in its first spelling", architectures=("RWForCausalLM",), make=refined_web),
)
