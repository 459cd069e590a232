"""Families after LLaMA against transformers, on tiny random models in float32: from what `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm.models import build_spec
from tests.tiny_models import (
    Paged,
    check_every_position,
    hf_logits,
    load,
    random_ids,
    random_model,
    saved_state,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.5 * i for i in range(6)],
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
}
GEMMA = {"head_dim": 12, "hidden_size": 64}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 300.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", GEMMA),
    "gemma-biases": ("gemma", GEMMA | {"attention_bias": True, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", GEMMA | {"sliding_window": 7, "query_pre_attn_scalar": 20}),
    "gemma2-no-caps": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": ("gemma3_text", GEMMA | {"sliding_window": 7, "rope_parameters": GEMMA3_ROPE, "num_hidden_layers": 7}),
    "gemma3-typed": (
        "gemma3_text",
        GEMMA | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "phi": ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    "phi-qk-norm": (
        "phi",
        {
            "qk_layernorm": True,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
        },
    ),
    "phi3": ("phi3", {"sliding_window": 7}),
    "phi3-longrope-short": (
        "phi3",
        {"rope_parameters": LONGROPE, "max_position_embeddings": 256, "original_max_position_embeddings": 64},
    ),
    "stablelm": (
        "stablelm",
        {"use_qkv_bias": True, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ),
    "stablelm-12b": (
        "stablelm",
        {
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
        },
    ),
    "olmo": ("olmo", {"clip_qkv": 1.5, "attention_bias": True}),
    "olmo2": ("olmo2", {"tie_word_embeddings": True}),
    "olmo2-yarn-mqa": ("olmo2", {"rope_parameters": YARN, "num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 300.0}},
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm-no-bias": ("glm", {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere-plus": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "ministral": (
        "ministral",
        {
            "sliding_window": 6,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral-all-windows": ("ministral", {"sliding_window": 6, "head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 16}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    model_type, fields = MODELS[name]
    model = random_model(model_type, **(SIZES | fields))
    config, state = saved_state(model, tmp_path)
    decoder = load(build_spec(config), state, max_model_len=64)
    check_every_position(decoder, lambda text: hf_logits(model, text), block_size=4)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_of_long_texts(kind: str, tmp_path: Path) -> None:
    """Where texts may be longer than in training, all positions have the factors for long ones."""
    fields: dict[str, Any] = SIZES | {"max_position_embeddings": 256, "original_max_position_embeddings": 32}
    model = random_model("phi3", **fields, rope_parameters=LONGROPE)
    config, state = saved_state(model, tmp_path)
    config["rope_scaling"] = config.pop("rope_parameters") | {"type": kind}
    config["rope_theta"], config["partial_rotary_factor"] = 100.0, 0.75
    for name in ("rope_type", "rope_theta", "partial_rotary_factor"):
        del config["rope_scaling"][name]
    spec = build_spec(config)
    text = random_ids(80)
    paged = Paged(load(spec, state, max_model_len=200), block_size=4)
    found = [paged.step({0: text[:50]})[0], paged.step({0: text[50:79]})[0], paged.step({0: text[79:]})[0]]
    torch.testing.assert_close(torch.cat(found), hf_logits(model, text), atol=1e-4, rtol=1e-5)
    short = Paged(load(spec, state, max_model_len=32), block_size=4).step({0: text[:32]})[0]
    torch.testing.assert_close(short, hf_logits(model, text[:32]), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "fields", "thetas", "kinds"),
    [
        ("Gemma3ForCausalLM", {"num_hidden_layers": 6}, (1e6, 1e4), ("default", "default")),
        (
            "Gemma3ForCausalLM",
            {"rope_theta": 5e5, "rope_local_base_freq": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            (5e5, 7.0),
            ("linear", "default"),
        ),
        ("Olmo3ForCausalLM", {}, (5e5, 5e5), ("default", "default")),
        (
            "Olmo3ForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}},
            (5e5, 5e5),
            ("yarn", "default"),
        ),
    ],
)
def test_old_spelling_of_positions_by_kind_of_layer(
    architecture: str, fields: dict[str, Any], thetas: tuple[float, float], kinds: tuple[str, str]
) -> None:
    """Of layers without and with a window."""
    spec = build_spec(SIZES | {"architectures": [architecture], "num_hidden_layers": 12} | fields)
    for window, rope in zip(spec.windows, spec.ropes, strict=True):
        assert rope is not None
        assert (rope.theta, rope.rope_type) == (thetas[window is not None], kinds[window is not None])
    assert {window is None for window in spec.windows} == {True, False}
