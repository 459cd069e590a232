"""OPT, with the norms and projections of its 350m, and Galactica, which has neither biases nor weights of norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.norm import NormSpec
from pyvllm.models.base import Family, base_spec
from pyvllm.models.config_fields import flag, integer, renamed
from pyvllm.models.spec import ModelSpec

_NAMES: Final = (
    ("embed_tokens", "embed"),
    ("embed_positions", "positions"),
    ("project_in", "project_in"),
    ("project_out", "project_out"),
    ("layers.N.self_attn_layer_norm", "layers.N.norm1"),
    ("layers.N.self_attn.q_proj", "layers.N.q"),
    ("layers.N.self_attn.k_proj", "layers.N.k"),
    ("layers.N.self_attn.v_proj", "layers.N.v"),
    ("layers.N.self_attn.out_proj", "layers.N.o"),
    ("layers.N.final_layer_norm", "layers.N.norm2"),
    ("layers.N.fc1", "layers.N.up"),
    ("layers.N.fc2", "layers.N.down"),
    ("final_layer_norm", "final_norm"),
    ("lm_head", "head"),
)


def opt(config: Mapping[str, Any]) -> ModelSpec:
    """OPT: learned positions that begin at row 2."""
    fields = renamed(config, {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"})
    fields |= {"num_key_value_heads": None, "head_dim": None}
    norm = NormSpec(eps=1e-5, centred=True, bias=True, affine=flag(config, "layer_norm_elementwise_affine", True))
    spec = base_spec(fields, names=_NAMES, norm=norm, activation="relu", rotary=False, tied=True)
    before, bias = flag(config, "do_layer_norm_before", True), flag(config, "enable_bias", True)
    embed_size = integer(config, "word_embed_proj_dim", spec.hidden_size)
    return replace(
        spec,
        position_offset=2,
        arrangement="sequential" if before else "post_norm",
        final_norm=before and not flag(config, "_remove_final_layer_norm"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        embed_size=None if embed_size == spec.hidden_size else embed_size,
        prefixes=("model.decoder.", "decoder."),
    )


FAMILIES: Final = (Family(name="OPT, OPT-IML, Galactica", architectures=("OPTForCausalLM",), make=opt),)
