"""What a config asks for and no part computes is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyvllm.models import Decoder, build_spec
from tests.tiny_models import CPU, plain_config


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("MPTForCausalLM", {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm', supported: low_precision_layernorm, "),
        ("MPTForCausalLM", {"attn_config": {"rope": True}}, r"attn_config\.rope is true, supported: false"),
        ("MPTForCausalLM", {"attn_config": {"prefix_lm": True}}, r"attn_config\.prefix_lm is true"),
        ("MPTForCausalLM", {"attn_config": {"qk_gn": True}}, r"attn_config\.qk_gn is true"),
        ("MPTForCausalLM", {"attn_config": {"sliding_window_size": 8}}, r"attn_config\.sliding_window_size is 8"),
        ("MPTForCausalLM", {"ffn_config": {"ffn_type": "mptgeglu"}}, "ffn_type is 'mptgeglu', supported: mptmlp"),
        ("MPTForCausalLM", {"attn_config": 3}, "attn_config is 3, must be an object"),
        ("MPTForCausalLM", {"attn_config": {"attn_type": "none"}}, "attn_type is 'none', supported: multihead"),
        (
            "MPTForCausalLM",
            {"attn_config": {"attn_type": "grouped_query_attention"}},
            "kv_n_heads is missing",
        ),
        ("MPTForCausalLM", {"logit_scale": "x"}, "logit_scale is 'x', must be a finite number > 0"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("Gemma3ForConditionalGeneration", {}, "text_config is None, must be an object"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types is .*, must have 3 entries"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\], must have 3 entries"),
        ("ChatGLMModel", {"rmsnorm": False}, "rmsnorm is False, supported: true"),
        ("ChatGLMModel", {"add_bias_linear": True}, "add_bias_linear is True, supported: false"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su"}}, "short_factor is None, must be 6 numbers"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 6, "long_factor": [1.0] * 5 + [0]}},
            "long_factor is 0, must be a finite number > 0",
        ),
        ("GPTJForCausalLM", {"rotary_dim": 64}, "rotary_dim is 64, must be a whole number >= 1 and <= 12"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, must be .* <= 8"),
        ("Qwen2MoeForCausalLM", {"mlp_only_layers": 3}, "mlp_only_layers is 3, must be a list of layers"),
        ("OPTForCausalLM", {"activation_function": "tanh", "hidden_act": None}, "activation_function is 'tanh'"),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 0, "new_decoder_architecture": True}, "num_ln_in_parallel_"),
        ("BloomForCausalLM", {"n_head": "x", "num_attention_heads": None}, "n_head is 'x'"),
        ("GPT2LMHeadModel", {"hidden_size": None}, "n_embd or hidden_size is missing"),
        (
            "GPTNeoXForCausalLM",
            {"rotary_emb_base": 0, "rotary_pct": 0.5},
            "rotary_emb_base is 0, must be a finite number > 0",
        ),
        ("GPTNeoXForCausalLM", {"rotary_pct": 0.25}, "head_dim and rotary_pct rotate 3 of 12 dimensions"),
        ("RWForCausalLM", {"n_head_kv": 3}, "n_head_kv is 3, must divide num_attention_heads 4"),
        (
            "ChatGLMModel",
            {"multi_query_attention": True, "multi_query_group_num": 3, "num_key_value_heads": None},
            "multi_query_group_num is 3, must divide num_attention_heads 4",
        ),
        ("Gemma2ForCausalLM", {"hidden_activation": 3}, "hidden_activation is 3, supported: silu"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1},
            "rope_theta is 1.0, must",
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            r"low_freq_factor is 4\.0, must be below high_freq_factor 1\.0",
        ),
        (
            "LlamaForCausalLM",
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "at least 4 with dynamic",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1, must be > 1 with longrope",
        ),
        ("MistralForCausalLM", {"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*awq.*mxfp4"),
    ],
)
def test_is_named(architecture: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_spec(plain_config(architectures=[architecture]) | fields)


SU = {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


@pytest.mark.parametrize(
    ("architecture", "fields", "longest", "usual"),
    [
        ("LlamaForCausalLM", {}, 64, 64),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 256, 256),
        ("InternLM2ForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 128, 128),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 256, 256),
        (
            "Qwen3ForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            128,
            128,
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}},
            64,
            64,
        ),
        ("Gemma3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 8.0}}, 64, 64),
        ("ChatGLMModel", {"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 50}, 64, 64),
        ("QWenLMHeadModel", {"seq_length": 32, "use_dynamic_ntk": True}, 32, 32),
        ("Phi3ForCausalLM", {"rope_scaling": SU, "original_max_position_embeddings": 16}, 64, 16),
    ],
)
def test_how_long_texts_may_be(architecture: str, fields: dict[str, Any], longest: int, usual: int) -> None:
    spec = build_spec(plain_config(architectures=[architecture]) | fields)
    assert (spec.max_position_embeddings, spec.usual_len) == (longest, usual)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "OPTForCausalLM", "MPTForCausalLM"])
def test_texts_end_where_learned_positions_do(architecture: str) -> None:
    spec = build_spec(plain_config(architectures=[architecture]))
    Decoder(spec, max_model_len=64, dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match="max_model_len is 65, must be at most 64: the model has learned no further"):
        Decoder(spec, max_model_len=65, dtype=torch.float32, device=CPU)
