"""GPT-2 and its kin: GPT-BigCode, GPT-J, GPT-NeoX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import Family, base_spec, layer_norm, with_mlp_size
from pyvllm.models.config_fields import flag, integer, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored, fused_qkv

_FIELDS: Final = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
_NAMES: Final = (
    ("wte", "embed"),
    ("wpe", "positions"),
    ("h.N.ln_1", "layers.N.norm1"),
    ("h.N.attn.c_proj", "layers.N.o"),
    ("h.N.ln_2", "layers.N.norm2"),
    ("h.N.mlp.c_fc", "layers.N.up"),
    ("h.N.mlp.c_proj", "layers.N.down"),
    ("ln_f", "final_norm"),
    ("lm_head", "head"),
)


def gpt2(config: Mapping[str, Any]) -> ModelSpec:
    """GPT-2: learned positions; matrices are stored as [in, out]."""
    spec = _with_learned_positions(config, activation="gelu_new")
    names = tuple(
        (name, Stored(slots=(slot,), transposed=True)) if ".attn." in name or ".mlp." in name else (name, slot)
        for name, slot in _NAMES
    )
    qkv = fused_qkv(spec.num_heads, spec.num_kv_heads, spec.head_dim, transposed=True)
    return replace(
        spec,
        scale=None if flag(config, "scale_attn_weights", True) else 1.0,
        scale_falls_with_depth=flag(config, "scale_attn_by_inverse_layer_idx"),
        names=(*names, ("h.N.attn.c_attn", qkv)),
    )


def gpt_bigcode(config: Mapping[str, Any]) -> ModelSpec:
    """StarCoder and SantaCoder: GPT-2 with one KV head."""
    spec = _with_learned_positions(config, activation="gelu_pytorch_tanh")
    if flag(config, "multi_query", True):
        spec = replace(spec, num_kv_heads=1)
    groups = 1 if spec.num_kv_heads == 1 else spec.num_heads
    qkv = fused_qkv(spec.num_heads, spec.num_kv_heads, spec.head_dim, groups=groups)
    return replace(
        spec,
        scale=None if flag(config, "scale_attn_weights", True) else 1.0,
        names=(*_NAMES, ("h.N.attn.c_attn", qkv)),
    )


def _with_learned_positions(config: Mapping[str, Any], *, activation: str) -> ModelSpec:
    norm = layer_norm(config, "layer_norm_epsilon")
    fields = with_mlp_size(renamed(config, _FIELDS)) | {"num_key_value_heads": None, "head_dim": None}
    spec = base_spec(fields, norm=norm, max_position_embeddings=1024, activation=activation, rotary=False, tied=True)
    return replace(
        spec,
        position_offset=0,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        prefixes=("transformer.",),
    )


def gptj(config: Mapping[str, Any]) -> ModelSpec:
    """GPT-J: attention and MLP side by side on one norm; pairs of neighbours are rotated; the head has a bias."""
    fields = with_mlp_size(renamed(config, _FIELDS)) | {"num_key_value_heads": None, "head_dim": None}
    head_dim = integer(fields, "hidden_size") // integer(fields, "num_attention_heads")
    fields["partial_rotary_factor"] = integer(fields, "rotary_dim", 64, most=head_dim) / head_dim
    norm = layer_norm(config, "layer_norm_epsilon")
    spec = base_spec(fields, norm=norm, max_position_embeddings=2048, activation="gelu_new")
    return replace(
        spec,
        ropes=tuple(rope and replace(rope, interleaved=True) for rope in spec.ropes),
        arrangement="parallel",
        norms=("norm1",),
        mlp_bias=True,
        gated=False,
        head_bias=True,
        names=(
            ("wte", "embed"),
            ("h.N.ln_1", "layers.N.norm1"),
            ("h.N.attn.q_proj", "layers.N.q"),
            ("h.N.attn.k_proj", "layers.N.k"),
            ("h.N.attn.v_proj", "layers.N.v"),
            ("h.N.attn.out_proj", "layers.N.o"),
            ("h.N.mlp.fc_in", "layers.N.up"),
            ("h.N.mlp.fc_out", "layers.N.down"),
            ("ln_f", "final_norm"),
            ("lm_head", "head"),
        ),
        prefixes=("transformer.",),
    )


def gpt_neox(config: Mapping[str, Any]) -> ModelSpec:
    """Pythia, Dolly 2, RedPajama, StableLM-tuned-alpha: attention and MLP side by side, or one after the other."""
    fields = renamed(config, {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    fields = {"partial_rotary_factor": 0.25} | fields
    fields |= {"num_key_value_heads": None, "head_dim": None}
    spec = base_spec(fields, norm=layer_norm(config, "layer_norm_eps"), activation="gelu")
    bias = flag(config, "attention_bias", True)
    return replace(
        spec,
        arrangement="parallel" if flag(config, "use_parallel_residual", True) else "sequential",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        gated=False,
        names=(
            ("embed_in", "embed"),
            ("layers.N.input_layernorm", "layers.N.norm1"),
            (
                "layers.N.attention.query_key_value",
                fused_qkv(spec.num_heads, spec.num_heads, spec.head_dim, groups=spec.num_heads),
            ),
            ("layers.N.attention.dense", "layers.N.o"),
            ("layers.N.post_attention_layernorm", "layers.N.norm2"),
            ("layers.N.mlp.dense_h_to_4h", "layers.N.up"),
            ("layers.N.mlp.dense_4h_to_h", "layers.N.down"),
            ("final_layer_norm", "final_norm"),
            ("embed_out", "head"),
            ("lm_head", "head"),
        ),
        prefixes=("gpt_neox.",),
    )


FAMILIES: Final = (
    Family(name="GPT-2", architectures=("GPT2LMHeadModel",), make=gpt2),
    Family(name="GPT-BigCode: StarCoder, SantaCoder", architectures=("GPTBigCodeForCausalLM",), make=gpt_bigcode),
    Family(name="GPT-J", architectures=("GPTJForCausalLM",), make=gptj),
    Family(
        name="GPT-NeoX: Pythia, Dolly 2, RedPajama, StableLM-tuned-alpha",
        architectures=("GPTNeoXForCausalLM",),
        make=gpt_neox,
    ),
)
