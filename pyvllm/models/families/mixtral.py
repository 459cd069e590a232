"""Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.moe import ExpertsSpec
from pyvllm.models.base import LLAMA_NAMES, Family, base_spec, optional_window, rms_norm
from pyvllm.models.config_fields import integer
from pyvllm.models.spec import ModelSpec

_NAMES: Final = (
    *((name, slot) for name, slot in LLAMA_NAMES if ".mlp." not in name),
    ("layers.N.block_sparse_moe.gate", "layers.N.router"),
    ("layers.N.block_sparse_moe.experts.E.w1", "layers.N.experts.E.gate"),
    ("layers.N.block_sparse_moe.experts.E.w3", "layers.N.experts.E.up"),
    ("layers.N.block_sparse_moe.experts.E.w2", "layers.N.experts.E.down"),
)


def mixtral(config: Mapping[str, Any]) -> ModelSpec:
    """Mistral with experts."""
    fields = {"num_key_value_heads": 8, "rope_theta": 1e6} | dict(config)
    spec = base_spec(fields, names=_NAMES, norm=rms_norm(config, eps=1e-5), max_position_embeddings=131072)
    num_experts = integer(config, "num_local_experts", 8)
    return replace(
        spec,
        windows=(optional_window(config),) * spec.num_layers,
        experts=ExpertsSpec(
            num_experts=num_experts,
            top_k=integer(config, "num_experts_per_tok", 2, most=num_experts),
            intermediate_size=spec.intermediate_size,
            normalise=True,
            layers=frozenset(range(spec.num_layers)),
        ),
    )


FAMILIES: Final = (Family(name="Mixtral", architectures=("MixtralForCausalLM",), make=mixtral),)
