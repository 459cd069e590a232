"""ChatGLM 2 and 3, GLM 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import Family, base_spec, rms_norm
from pyvllm.models.config_fields import flag, integer, number, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored, fused_qkv

_FIELDS: Final = {
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}


def chatglm(config: Mapping[str, Any]) -> ModelSpec:
    """ChatGLM 2 and 3, GLM 4 in its first spelling: half of each head is rotated, pairs being neighbours."""
    for name, wanted in (("rmsnorm", True), ("post_layer_norm", True), ("add_bias_linear", False)):
        if flag(config, name, wanted) != wanted:
            raise ValueError(f"config field {name} is {config[name]!r}, supported: {str(wanted).lower()}")
    fields = renamed(config, _FIELDS)
    heads = integer(fields, "num_attention_heads")
    grouped = flag(config, "multi_query_attention")
    fields["num_key_value_heads"] = None
    if grouped:
        fields = renamed({"multi_query_group_num": 1} | fields, {"multi_query_group_num": "num_key_value_heads"})
    ratio = number(config, "rope_ratio", 1.0)
    # Nothing but its name tells ChatGLM 2, where the ratio divides positions, from ChatGLM 3.
    if "chatglm2" in str(config.get("_name_or_path")).lower():
        fields["rope_scaling"] = {"rope_type": "linear", "factor": ratio}
    else:
        fields["rope_theta"] = 10000.0 * ratio
    fields["partial_rotary_factor"] = 0.5
    spec = base_spec(fields, norm=rms_norm(fields, eps=1e-5, weight_in_float32=True))
    after = flag(config, "apply_residual_connection_post_layernorm")
    interleaved = flag(config, "original_rope", True)
    width = spec.intermediate_size
    return replace(
        spec,
        max_position_embeddings=integer(fields, "max_position_embeddings", 2048),  # the ratio is counted in
        ropes=tuple(rope and replace(rope, interleaved=interleaved) for rope in spec.ropes),
        arrangement="normed_residual" if after else "sequential",
        qkv_bias=flag(config, "add_qkv_bias"),
        names=(
            ("embedding.word_embeddings", "embed"),
            ("encoder.layers.N.input_layernorm", "layers.N.norm1"),
            (
                "encoder.layers.N.self_attention.query_key_value",
                fused_qkv(heads, spec.num_kv_heads, spec.head_dim, groups=1 if grouped else heads),
            ),
            ("encoder.layers.N.self_attention.dense", "layers.N.o"),
            ("encoder.layers.N.post_attention_layernorm", "layers.N.norm2"),
            (
                "encoder.layers.N.mlp.dense_h_to_4h",
                Stored(slots=("layers.N.gate", "layers.N.up"), rows=(width, width)),
            ),
            ("encoder.layers.N.mlp.dense_4h_to_h", "layers.N.down"),
            ("encoder.final_layernorm", "final_norm"),
            ("output_layer", "head"),
        ),
        prefixes=("transformer.",),
    )


def glm(config: Mapping[str, Any]) -> ModelSpec:
    """GLM 4 as transformers writes it."""
    return _glm(config, norm_names={"layers.N.post_attention_layernorm": "layers.N.norm2"})


def glm4(config: Mapping[str, Any]) -> ModelSpec:
    """GLM 4 of 2025: norms after attention and MLP too."""
    spec = _glm(
        config,
        norm_names={
            "layers.N.post_self_attn_layernorm": "layers.N.attention_out_norm",
            "layers.N.post_attention_layernorm": "layers.N.norm2",
            "layers.N.post_mlp_layernorm": "layers.N.mlp_out_norm",
        },
    )
    return replace(spec, norms=("norm1", "norm2", "attention_out_norm", "mlp_out_norm"))


def _glm(config: Mapping[str, Any], *, norm_names: Mapping[str, str]) -> ModelSpec:
    fields = {"num_key_value_heads": 2, "head_dim": 128} | dict(config)
    fields = {"partial_rotary_factor": 0.5} | fields
    norm = rms_norm(config, eps=1.5625e-07)
    spec = base_spec(fields, norm=norm, max_position_embeddings=131072)
    width = spec.intermediate_size
    return replace(
        spec,
        ropes=tuple(rope and replace(rope, interleaved=True) for rope in spec.ropes),
        qkv_bias=flag(config, "attention_bias", True),
        names=(
            ("embed_tokens", "embed"),
            ("layers.N.input_layernorm", "layers.N.norm1"),
            ("layers.N.self_attn.q_proj", "layers.N.q"),
            ("layers.N.self_attn.k_proj", "layers.N.k"),
            ("layers.N.self_attn.v_proj", "layers.N.v"),
            ("layers.N.self_attn.o_proj", "layers.N.o"),
            *norm_names.items(),
            ("layers.N.mlp.gate_up_proj", Stored(slots=("layers.N.gate", "layers.N.up"), rows=(width, width))),
            ("layers.N.mlp.down_proj", "layers.N.down"),
            ("norm", "final_norm"),
            ("lm_head", "head"),
        ),
    )


FAMILIES: Final = (
    Family(
        name="ChatGLM 2, ChatGLM 3, GLM 4 in its first spelling",
        architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        make=chatglm,
        verified="the same weights as GLM in transformers",
    ),
    Family(name="GLM 4", architectures=("GlmForCausalLM",), make=glm),
    Family(name="GLM 4 of 2025", architectures=("Glm4ForCausalLM",), make=glm4),
)
