"""Families with experts against transformers, and the forms in which experts are computed against one another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm.kernels import select
from pyvllm.layers.moe import Experts, ExpertsSpec, ExpertWeights, all_experts, sorted_by_expert
from pyvllm.models import build_spec
from tests.tiny_models import CPU, check_every_position, hf_logits, load, random_model, saved_state

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
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "rope_theta": 100.0}),
    "mixtral-window": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 7}),
    "qwen2-moe": ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 40}),
    "qwen2-moe-some-layers": (
        "qwen2_moe",
        QWEN
        | {
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen3-moe": ("qwen3_moe", QWEN | {"norm_topk_prob": True, "head_dim": 16}),
    "qwen3-moe-every-second-layer": ("qwen3_moe", QWEN | {"decoder_sparse_step": 2, "head_dim": 8}),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    "granite-moe": (
        "granitemoe",
        {"num_local_experts": 5, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
                "rope_theta": 300.0,
            },
        },
    ),
    "gpt-oss-wide-heads": (
        "gpt_oss",
        {"num_local_experts": 4, "head_dim": 32, "sliding_window": 5, "num_key_value_heads": 1, "num_hidden_layers": 4},
    ),
    "granite-moe-shared": ("granitemoeshared", {"num_local_experts": 4, "shared_intermediate_size": 40}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    model_type, fields = MODELS[name]
    model = random_model(model_type, **(SIZES | fields))
    config, state = saved_state(model, tmp_path)
    decoder = load(build_spec(config), state, max_model_len=64)
    decoder.pack(select(CPU, torch.float32))
    check_every_position(decoder, lambda text: hf_logits(model, text), block_size=4)


def test_a_clip_after_norms_is_refused() -> None:
    with pytest.raises(ValueError, match=r"clip_qkv is 2\.0, supported: null"):
        build_spec(SIZES | {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 2.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("biases", [False, True])
def test_forms_agree_and_some_experts_may_be_chosen_by_nobody(
    num_tokens: int, dtype: torch.dtype, biases: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 32, dtype=dtype)
    gate_up, down = torch.randn(7, 48, 32, dtype=dtype) / 6, torch.randn(7, 32, 24, dtype=dtype) / 5
    experts = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 2)
    kernels = select(CPU, dtype)
    bias = {"gate_up_bias": torch.randn(7, 48, dtype=dtype), "down_bias": torch.randn(7, 32, dtype=dtype)}
    of = ExpertWeights(gate_up=gate_up, down=down, **(bias if biases else dict.fromkeys(bias)))
    gate = partial(kernels.gated, activation="silu")
    expected = torch.zeros(num_tokens, 32, dtype=torch.float64)
    for row in range(num_tokens):
        for weight, expert in zip(weights[row].double(), experts[row].tolist(), strict=True):
            inner, outer = (bias[name][expert].double() * biases for name in bias)
            gates, values = (gate_up[expert].double() @ x[row].double() + inner).chunk(2)
            expected[row] += weight * (down[expert].double() @ (torch.nn.functional.silu(gates) * values) + outer)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for form in (sorted_by_expert, all_experts):
        found = form(x, weights, experts, of, gate)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_shape_depends_on_the_routing_until_weights_are_packed_for_a_cpu(dtype: torch.dtype) -> None:
    """On the meta device there are no values that a shape could depend on."""
    spec = ExpertsSpec(num_experts=6, top_k=2, intermediate_size=16, normalise=True, layers=frozenset({0}))
    experts = Experts(24, spec, activation="silu", dtype=dtype, device=torch.device("meta"))
    kernels = select(torch.device("meta"), dtype)
    experts.pack(kernels)
    for num_tokens in (0, 5):
        x = torch.empty(num_tokens, 24, dtype=dtype, device="meta")
        assert experts(x, kernels).shape == x.shape
