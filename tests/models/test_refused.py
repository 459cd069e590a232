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
    ],
)
def test_is_named(architecture: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_spec(plain_config(architectures=[architecture]) | fields)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "OPTForCausalLM", "MPTForCausalLM"])
def test_texts_end_where_learned_positions_do(architecture: str) -> None:
    spec = build_spec(plain_config(architectures=[architecture]))
    Decoder(spec, max_model_len=64, dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match="max_model_len is 65, must be at most 64: the model has learned no further"):
        Decoder(spec, max_model_len=65, dtype=torch.float32, device=CPU)
