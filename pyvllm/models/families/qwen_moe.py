"""Qwen 2 and Qwen 3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.moe import ExpertsSpec
from pyvllm.models.base import Family
from pyvllm.models.config_fields import flag, integer, renamed
from pyvllm.models.families.llama import qwen2, qwen3
from pyvllm.models.spec import ModelSpec

EXPERT_NAMES: Final = (
    ("layers.N.mlp.gate", "layers.N.router"),
    ("layers.N.mlp.experts.E.gate_proj", "layers.N.experts.E.gate"),
    ("layers.N.mlp.experts.E.up_proj", "layers.N.experts.E.up"),
    ("layers.N.mlp.experts.E.down_proj", "layers.N.experts.E.down"),
)
_SHARED_NAMES: Final = (
    ("layers.N.mlp.shared_expert.gate_proj", "layers.N.shared.gate"),
    ("layers.N.mlp.shared_expert.up_proj", "layers.N.shared.up"),
    ("layers.N.mlp.shared_expert.down_proj", "layers.N.shared.down"),
    ("layers.N.mlp.shared_expert_gate", "layers.N.shared_score"),
)


def qwen2_moe(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen 2 with experts, one of them shared by all tokens and weighed by a gate of its own."""
    fields = {"num_key_value_heads": 16} | dict(config)
    spec = replace(qwen2(fields), qkv_bias=flag(config, "qkv_bias", True))
    shared_size = integer(config, "shared_expert_intermediate_size", 5632)
    experts = _experts(config, spec.num_layers, num_experts=60, top_k=4, width=1408)
    return replace(
        spec,
        names=spec.names + EXPERT_NAMES + _SHARED_NAMES,
        experts=replace(experts, shared_size=shared_size, shared_gate=True),
    )


def qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen 3 with experts."""
    fields = {"num_key_value_heads": 4, "max_window_layers": 0} | dict(config)
    spec = qwen3(fields)
    experts = _experts(config, spec.num_layers, num_experts=128, top_k=8, width=768)
    return replace(spec, names=spec.names + EXPERT_NAMES, experts=experts)


def _experts(config: Mapping[str, Any], num_layers: int, *, num_experts: int, top_k: int, width: int) -> ExpertsSpec:
    """The numbers are the defaults of their fields. Some layers, if so asked, keep their MLP."""
    fields = renamed(config, {"num_local_experts": "num_experts"})
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise ValueError(f"config field mlp_only_layers is {plain!r}, must be a list of layers")
    step = integer(config, "decoder_sparse_step", 1)
    num_experts = integer(fields, "num_experts", num_experts)
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=integer(config, "num_experts_per_tok", top_k, most=num_experts),
        intermediate_size=integer(config, "moe_intermediate_size", width),
        normalise=flag(config, "norm_topk_prob"),
        layers=frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in plain),
    )


FAMILIES: Final = (
    Family(name="Qwen 1.5 and 2 with experts", architectures=("Qwen2MoeForCausalLM",), make=qwen2_moe),
    Family(name="Qwen 3 with experts", architectures=("Qwen3MoeForCausalLM",), make=qwen3_moe),
)
