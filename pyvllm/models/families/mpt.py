"""MPT, in its own spelling and in that of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.models.base import Family, alibi_slopes, base_spec, layer_norm, with_mlp_size
from pyvllm.models.config_fields import choice, flag, integer, number, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import fused_qkv

_FIELDS: Final = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
_KINDS: Final = ("multihead_attention", "multiquery_attention", "grouped_query_attention")


def mpt_original(config: Mapping[str, Any]) -> ModelSpec:
    """MPT as MosaicML wrote it: what is absent means learned positions and biases."""
    return _mpt(config, alibi=False, no_bias=False)


def mpt(config: Mapping[str, Any]) -> ModelSpec:
    """MPT as transformers writes it: what is absent means ALiBi and no biases."""
    return _mpt(config, alibi=True, no_bias=True)


def _mpt(config: Mapping[str, Any], *, alibi: bool, no_bias: bool) -> ModelSpec:
    attention = config.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise ValueError(f"config field attn_config is {attention!r}, must be an object")
    _refuse(config, attention)
    fields = with_mlp_size(renamed(config, _FIELDS), integer(config, "expansion_ratio", 4)) | {"head_dim": None}
    kind = choice(attention, "attn_type", _KINDS, _KINDS[0])
    heads = integer(fields, "num_attention_heads")
    fields["num_key_value_heads"] = {_KINDS[0]: heads, _KINDS[1]: 1}.get(kind) or integer(attention, "kv_n_heads")
    alibi, bias = flag(attention, "alibi", alibi), not flag(config, "no_bias", no_bias)
    norm = layer_norm(config, "layer_norm_epsilon", bias=bias)
    spec = base_spec(fields, norm=norm, activation="gelu", rotary=False, tied=True)
    slopes = alibi_slopes(heads, number(attention, "alibi_bias_max", 8.0)) if alibi else None
    learned = not alibi and flag(config, "learned_pos_emb", True)
    return replace(
        spec,
        alibi_slopes=slopes,
        position_offset=0 if learned else None,
        scale=number(attention, "softmax_scale") if attention.get("softmax_scale") else None,
        clip_qkv=number(attention, "clip_qkv") if attention.get("clip_qkv") else None,
        qk_norm=QueryKeyNorm(norm=norm, over="width") if flag(attention, "qk_ln") else None,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        logit_scale=_logit_scale(config, spec.hidden_size),
        names=(
            ("wte", "embed"),
            ("wpe", "positions"),
            ("blocks.N.norm_1", "layers.N.norm1"),
            ("blocks.N.attn.Wqkv", fused_qkv(heads, spec.num_kv_heads, spec.head_dim)),
            ("blocks.N.attn.q_ln", "layers.N.q_norm"),
            ("blocks.N.attn.k_ln", "layers.N.k_norm"),
            ("blocks.N.attn.out_proj", "layers.N.o"),
            ("blocks.N.norm_2", "layers.N.norm2"),
            ("blocks.N.ffn.up_proj", "layers.N.up"),
            ("blocks.N.ffn.down_proj", "layers.N.down"),
            ("norm_f", "final_norm"),
            ("lm_head", "head"),
        ),
        prefixes=("transformer.",),
    )


def _refuse(config: Mapping[str, Any], attention: Mapping[str, Any]) -> None:
    """Raise for what its authors' code knows and this does not."""
    choice(config, "norm_type", ("low_precision_layernorm", "layernorm"), "low_precision_layernorm")
    for name in ("rope", "prefix_lm", "qk_gn"):
        if flag(attention, name):
            raise ValueError(f"config field attn_config.{name} is true, supported: false")
    window = attention.get("sliding_window_size")
    if window not in (None, -1):
        raise ValueError(f"config field attn_config.sliding_window_size is {window!r}, supported: -1")
    mlp = config.get("ffn_config") or {}
    if not isinstance(mlp, Mapping):
        raise ValueError(f"config field ffn_config is {mlp!r}, must be an object")
    choice(mlp, "ffn_type", ("mptmlp",), "mptmlp")


def _logit_scale(config: Mapping[str, Any], hidden_size: int) -> float:
    value = config.get("logit_scale")
    if value == "inv_sqrt_d_model":
        return float(hidden_size**-0.5)
    return 1.0 if value is None else number(config, "logit_scale")


FAMILIES: Final = (
    Family(name="MPT", architectures=("MptForCausalLM",), make=mpt),
    Family(
        name="MPT in its authors' spelling",
        architectures=("MPTForCausalLM",),
        make=mpt_original,
        verified="transformers; where it ignores fields, formulas in float64",
    ),
)
