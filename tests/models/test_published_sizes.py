"""Configs of published checkpoints: the number of parameters is the published one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyvllm.models import Decoder, build_spec

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (
        124_439_808,
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12, "n_ctx": 1024,
         "n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
    ),
    "starcoder": (
        15_517_456_384,
        {"architectures": ["GPTBigCodeForCausalLM"], "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576,
         "n_positions": 8192, "vocab_size": 49152, "multi_query": True, "activation_function": "gelu"},
    ),
    "gpt-j-6b": (
        6_050_882_784,
        {"architectures": ["GPTJForCausalLM"], "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048,
         "rotary_dim": 64, "vocab_size": 50400, "tie_word_embeddings": False, "n_inner": None},
    ),
    "pythia-70m": (
        70_426_624,
        {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 512, "num_hidden_layers": 6, "vocab_size": 50304,
         "num_attention_heads": 8, "intermediate_size": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000,
         "use_parallel_residual": True, "tie_word_embeddings": False},
    ),
    "opt-125m": (
        125_239_296,
        {"architectures": ["OPTForCausalLM"], "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "ffn_dim": 3072, "vocab_size": 50272, "word_embed_proj_dim": 768, "max_position_embeddings": 2048,
         "do_layer_norm_before": True, "_remove_final_layer_norm": False},
    ),
    "opt-350m": (
        331_196_416,
        {"architectures": ["OPTForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "ffn_dim": 4096, "vocab_size": 50272, "word_embed_proj_dim": 512, "max_position_embeddings": 2048,
         "do_layer_norm_before": False},
    ),
    "bloom-560m": (
        559_214_592,
        {"architectures": ["BloomForCausalLM"], "n_embed": 1024, "hidden_size": 1024, "n_layer": 24,
         "num_attention_heads": 16, "vocab_size": 250880, "apply_residual_connection_post_layernorm": False},
    ),
    "falcon-rw-1b": (
        1_311_625_216,
        {"architectures": ["FalconForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 50304,
         "num_attention_heads": 32, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False,
         "new_decoder_architecture": False},
    ),
    "falcon-7b": (
        6_921_720_704,
        {"architectures": ["FalconForCausalLM"], "hidden_size": 4544, "num_hidden_layers": 32, "vocab_size": 65024,
         "num_attention_heads": 71, "alibi": False, "bias": False, "multi_query": True, "parallel_attn": True,
         "new_decoder_architecture": False},
    ),
    "mpt-7b": (
        6_649_286_656,
        {"architectures": ["MPTForCausalLM"], "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432,
         "expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "norm_type": "low_precision_layernorm",
         "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "qk_ln": False,
                         "clip_qkv": None, "prefix_lm": False, "softmax_scale": None}},
    ),
    "llama-2-7b": (
        6_738_415_616,
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
         "num_attention_heads": 32, "intermediate_size": 11008, "rms_norm_eps": 1e-5},
    ),
    "llama-3.1-8b": (
        8_030_261_248,
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "rope_theta": 500000.0,
         "max_position_embeddings": 131072,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                          "original_max_position_embeddings": 8192}},
    ),
    "mistral-7b": (
        7_241_732_096,
        {"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096},
    ),
    "mixtral-8x7b": (
        46_702_792_704,
        {"architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
         "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen-7b": (
        7_721_324_544,
        {"architectures": ["QWenLMHeadModel"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 151936,
         "num_attention_heads": 32, "intermediate_size": 22016, "kv_channels": 128, "seq_length": 8192,
         "rotary_emb_base": 10000, "rotary_pct": 1.0, "no_bias": True, "use_dynamic_ntk": True},
    ),
    "qwen2.5-0.5b": (
        494_032_768,
        {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 151936,
         "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True},
    ),
    "qwen3-0.6b": (
        596_049_920,
        {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28, "vocab_size": 151936,
         "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "head_dim": 128,
         "tie_word_embeddings": True},
    ),
    "qwen1.5-moe-a2.7b": (
        14_315_784_192,
        {"architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 151936,
         "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "num_experts": 60,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4},
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936,
         "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "head_dim": 128,
         "num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {"architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 24, "vocab_size": 201088,
         "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 2880, "head_dim": 64,
         "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
         "quantization_config": {"quant_method": "mxfp4"}},
    ),
    "olmoe-1b-7b": (
        6_919_161_856,
        {"architectures": ["OlmoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 50304,
         "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64,
         "num_experts_per_tok": 8},
    ),
    "gemma-2b": (
        2_506_172_416,
        {"architectures": ["GemmaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 18, "vocab_size": 256000,
         "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 16384, "head_dim": 256,
         "hidden_act": "gelu"},
    ),
    "gemma-2-2b": (
        2_614_341_888,
        {"architectures": ["Gemma2ForCausalLM"], "hidden_size": 2304, "num_hidden_layers": 26, "vocab_size": 256000,
         "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 9216, "head_dim": 256},
    ),
    "gemma-3-1b": (
        999_885_952,
        {"architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "num_hidden_layers": 26, "vocab_size": 262144,
         "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 6912, "head_dim": 256,
         "sliding_window": 512, "sliding_window_pattern": 6},
    ),
    "phi-2": (
        2_779_683_840,
        {"architectures": ["PhiForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 32, "vocab_size": 51200,
         "num_attention_heads": 32, "intermediate_size": 10240, "partial_rotary_factor": 0.4},
    ),
    "phi-3-mini-4k": (
        3_821_079_552,
        {"architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "num_hidden_layers": 32, "vocab_size": 32064,
         "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 8192, "sliding_window": 2047},
    ),
    "smollm3-3b": (
        3_075_098_624,
        {"architectures": ["SmolLM3ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 36, "vocab_size": 128256,
         "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 11008},
    ),
    "olmo-2-7b": (
        7_298_617_344,
        {"architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 100352,
         "num_attention_heads": 32, "intermediate_size": 11008, "rope_theta": 500000},
    ),
    "stablelm-2-1.6b": (
        1_644_515_328,
        {"architectures": ["StableLmForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 100352,
         "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 5632, "use_qkv_bias": True,
         "partial_rotary_factor": 0.25},
    ),
    "starcoder2-3b": (
        3_030_371_328,
        {"architectures": ["Starcoder2ForCausalLM"], "hidden_size": 3072, "num_hidden_layers": 30, "vocab_size": 49152,
         "num_attention_heads": 24, "num_key_value_heads": 2, "intermediate_size": 12288, "use_bias": True},
    ),
    "command-r": (
        34_980_831_232,
        {"architectures": ["CohereForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 40, "vocab_size": 256000,
         "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 22528},
    ),
    "internlm2-7b": (
        7_737_708_544,
        {"architectures": ["InternLM2ForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 92544,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "bias": False,
         "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    "baichuan2-7b": (
        7_505_973_248,
        {"architectures": ["BaichuanForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 125696,
         "num_attention_heads": 32, "intermediate_size": 11008},
    ),
    "baichuan-13b": (
        13_264_901_120,
        {"architectures": ["BaichuanForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 40, "vocab_size": 64000,
         "num_attention_heads": 40, "intermediate_size": 13696, "model_max_length": 4096},
    ),
    "chatglm3-6b": (
        6_243_584_000,
        {"architectures": ["ChatGLMModel"], "hidden_size": 4096, "num_layers": 28, "padded_vocab_size": 65024,
         "num_attention_heads": 32, "ffn_hidden_size": 13696, "kv_channels": 128, "multi_query_attention": True,
         "multi_query_group_num": 2, "add_qkv_bias": True, "add_bias_linear": False, "seq_length": 8192},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_has_as_many_parameters_as_published(name: str) -> None:
    expected, config = CONFIGS[name]
    decoder = Decoder(build_spec(config), max_model_len=8, dtype=torch.bfloat16, device=torch.device("meta"))
    assert sum(slot.numel() for slot in decoder.slots().values()) == expected
