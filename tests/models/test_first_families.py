"""Families before LLaMA against transformers, on tiny random models in float32: from what `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyvllm.models import build_spec
from tests.tiny_models import check_every_position, hf_logits, load, random_model, saved_state

GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
NEOX = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
OPT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 80,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 48,
}
BLOOM = {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 97}
FALCON = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
MPT = {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 97}
GPT_FIELDS: dict[str, Any] = GPT | {"vocab_size": 97}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT_FIELDS),
    "gpt2-odd": (
        "gpt2",
        GPT_FIELDS | {"n_inner": 72, "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt2-unscaled": ("gpt2", GPT_FIELDS | {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "bigcode-mqa": ("gpt_bigcode", GPT_FIELDS),
    "bigcode-mha": ("gpt_bigcode", GPT_FIELDS | {"multi_query": False, "n_inner": 100}),
    "gptj": ("gptj", GPT_FIELDS | {"rotary_dim": 6}),
    "gptj-full": ("gptj", GPT_FIELDS | {"rotary_dim": 12, "n_inner": 72, "activation_function": "gelu"}),
    "neox": ("gpt_neox", NEOX),
    "neox-sequential": ("gpt_neox", NEOX | {"use_parallel_residual": False, "hidden_act": "gelu_fast"}),
    "neox-no-bias": (
        "gpt_neox",
        NEOX
        | {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "opt": ("opt", OPT),
    "opt-350m": ("opt", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt-no-final-norm": ("opt", OPT | {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
    "galactica": (
        "opt",
        OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    "bloom": ("bloom", BLOOM),
    "bloom-5-heads": ("bloom", BLOOM | {"hidden_size": 40, "n_head": 5, "tie_word_embeddings": False}),
    "bloom-normed-residual": ("bloom", BLOOM | {"apply_residual_connection_post_layernorm": True}),
    "falcon-7b": ("falcon", FALCON),
    "falcon-rw": ("falcon", FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
    "falcon-40b": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-11b": (
        "falcon",
        FALCON
        | {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
            "ffn_hidden_size": 72,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "falcon-sequential-mqa": ("falcon", FALCON | {"parallel_attn": False}),
    "mpt": ("mpt", MPT),
    "mpt-clip": (
        "mpt",
        MPT | {"attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.2}, "n_heads": 6},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    model_type, fields = MODELS[name]
    model = random_model(model_type, **fields)
    config, state = saved_state(model, tmp_path)
    decoder = load(build_spec(config), state, max_model_len=64)
    check_every_position(decoder, lambda text: hf_logits(model, text), block_size=4)
