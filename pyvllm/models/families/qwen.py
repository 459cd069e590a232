"""Qwen 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import Family, base_spec, rms_norm
from pyvllm.models.config_fields import integer, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import fused_qkv

_FIELDS: Final = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "layer_norm_epsilon": "rms_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}


def qwen(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen 1: half of `intermediate_size` is the MLP's width, and `seq_length` its longest text.

    What `use_dynamic_ntk` and `use_logn_attn` ask for begins past `seq_length`, and depends on the prompt's length.
    """
    fields = renamed(config, _FIELDS) | {"num_key_value_heads": None}
    fields["intermediate_size"] = integer(fields, "intermediate_size") // 2
    fields["max_position_embeddings"] = integer(config, "seq_length", integer(fields, "max_position_embeddings", 8192))
    spec = base_spec(fields, norm=rms_norm(fields))
    return replace(
        spec,
        qkv_bias=True,
        names=(
            ("wte", "embed"),
            ("h.N.ln_1", "layers.N.norm1"),
            ("h.N.attn.c_attn", fused_qkv(spec.num_heads, spec.num_heads, spec.head_dim)),
            ("h.N.attn.c_proj", "layers.N.o"),
            ("h.N.ln_2", "layers.N.norm2"),
            ("h.N.mlp.w2", "layers.N.gate"),
            ("h.N.mlp.w1", "layers.N.up"),
            ("h.N.mlp.c_proj", "layers.N.down"),
            ("ln_f", "final_norm"),
            ("lm_head", "head"),
        ),
        prefixes=("transformer.",),
    )


FAMILIES: Final = (
    Family(
        name="Qwen 1",
        architectures=("QWenLMHeadModel",),
        make=qwen,
        verified="the same weights as Qwen 2 in transformers",
    ),
)
