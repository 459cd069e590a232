"""Each part that only some families have, on a GPU with heads of real sizes: tokens are those of transformers.

`tests/models` compares all families with transformers at every position on a CPU; what differs here is the kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm import LLM
from tests.gpu.on_gpu import OPTIONS
from tests.test_equals_transformers import assert_greedy_equal
from tests.tiny_models import random_model

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
GPT: dict[str, Any] = {"vocab_size": 97, "n_layer": 2, "n_head": 2, "n_positions": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 300.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 36,
    "long_factor": [1.5 + 0.2 * i for i in range(36)],
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
# What -> width, type of the model, its fields. Heads have 64 to 256 dimensions.
PARTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "learned positions, biases (GPT-2)": (128, "gpt2", GPT | {"n_embd": 128}),
    "learned positions, ReLU (OPT)": (
        128,
        "opt",
        SIZES | {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 80, "num_attention_heads": 2},
    ),
    "neighbours turned, parallel (GPT-J)": (512, "gptj", GPT | {"n_embd": 512, "rotary_dim": 64}),
    "a quarter turned, parallel (NeoX)": (
        160,
        "gpt_neox",
        SIZES | {"hidden_size": 160, "num_attention_heads": 2},
    ),
    "one KV head, parallel (Falcon)": (
        256,
        "falcon",
        {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97},
    ),
    "ALiBi, norm of embeddings (BLOOM)": (128, "bloom", GPT | {"hidden_size": 128}),
    "ALiBi, no biases (MPT)": (
        256,
        "mpt",
        {"d_model": 256, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "vocab_size": 97},
    ),
    "caps, windows (Gemma 2)": (
        128,
        "gemma2",
        SIZES | {"hidden_size": 128, "head_dim": 256, "sliding_window": 7, "query_pre_attn_scalar": 20},
    ),
    "normed heads, two rotations (Gemma 3)": (
        128,
        "gemma3_text",
        SIZES
        | {
            "hidden_size": 128,
            "head_dim": 256,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "longrope (Phi 3)": (
        192,
        "phi3",
        SIZES
        | {
            "hidden_size": 192,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 16,
        },
    ),
    "YaRN, norms after (OLMo 2)": (
        256,
        "olmo2",
        SIZES | {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": YARN},
    ),
    "norms of each head, parallel (StableLM 2 12B)": (
        256,
        "stablelm",
        SIZES | {"hidden_size": 256, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "scaled logits (Command R+)": (
        256,
        "cohere",
        SIZES | {"hidden_size": 256, "logit_scale": 0.3, "use_qk_norm": True},
    ),
    "experts (Mixtral)": (256, "mixtral", SIZES | {"hidden_size": 256, "num_local_experts": 4}),
    "experts, normed heads (Qwen 3 MoE)": (256, "qwen3_moe", SIZES | EXPERTS | {"hidden_size": 256, "head_dim": 128}),
    "sinks, windows, experts (GPT-OSS)": (
        128,
        "gpt_oss",
        SIZES
        | {
            "hidden_size": 128,
            "head_dim": 64,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_tokens_equal_transformers(part: str, tmp_path: Path) -> None:
    """In chunks and side by side, through graphs. Transformers computes on the CPU."""
    width, model_type, fields = PARTS[part]
    # Not its default, fused attention, which leaves out caps in some versions.
    model = random_model(model_type, std=2 * width**-0.5, **fields, attn_implementation="eager")
    model.save_pretrained(tmp_path)
    options = OPTIONS | {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 16}
    prompts = [[(11 * i + 7 * j) % 96 for j in range(14 + 6 * i)] for i in range(4)]
    with torch.inference_mode(), LLM(str(tmp_path), skip_tokenizer_init=True, **options) as llm:
        assert_greedy_equal(model, llm, prompts, 12)
