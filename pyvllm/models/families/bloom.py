"""BLOOM and BLOOMZ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import Family, alibi_slopes, base_spec, layer_norm, with_mlp_size
from pyvllm.models.config_fields import flag, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import fused_qkv

_FIELDS: Final = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}


def bloom(config: Mapping[str, Any]) -> ModelSpec:
    """BLOOM: ALiBi, a norm after the embedding; residuals begin before or after a layer's norms."""
    fields = with_mlp_size(renamed(config, _FIELDS)) | {"num_key_value_heads": None, "head_dim": None}
    # Its own GELU is the tanh form, whatever the config says.
    fields["hidden_act"] = "gelu_pytorch_tanh"
    spec = base_spec(fields, norm=layer_norm(config, "layer_norm_epsilon"), rotary=False, tied=True)
    after = flag(config, "apply_residual_connection_post_layernorm")
    qkv = fused_qkv(spec.num_heads, spec.num_heads, spec.head_dim, groups=spec.num_heads)
    return replace(
        spec,
        alibi_slopes=alibi_slopes(spec.num_heads),
        arrangement="normed_residual" if after else "sequential",
        embed_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        names=(
            ("word_embeddings", "embed"),
            ("word_embeddings_layernorm", "embed_norm"),
            ("h.N.input_layernorm", "layers.N.norm1"),
            ("h.N.self_attention.query_key_value", qkv),
            ("h.N.self_attention.dense", "layers.N.o"),
            ("h.N.post_attention_layernorm", "layers.N.norm2"),
            ("h.N.mlp.dense_h_to_4h", "layers.N.up"),
            ("h.N.mlp.dense_4h_to_h", "layers.N.down"),
            ("ln_f", "final_norm"),
            ("lm_head", "head"),
        ),
        prefixes=("transformer.",),
    )


FAMILIES: Final = (Family(name="BLOOM, BLOOMZ", architectures=("BloomForCausalLM",), make=bloom),)
