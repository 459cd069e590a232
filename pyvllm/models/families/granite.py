"""Granite 3 and 4, with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.moe import ExpertsSpec
from pyvllm.models.base import LLAMA_NAMES, Family, base_spec
from pyvllm.models.config_fields import flag, integer, number
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored


def granite(config: Mapping[str, Any]) -> ModelSpec:
    """LLaMA with four factors."""
    bias = flag(config, "attention_bias")
    return replace(
        base_spec(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        embed_scale=number(config, "embedding_multiplier", 1.0),
        scale=number(config, "attention_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
    )


def granite_moe(config: Mapping[str, Any]) -> ModelSpec:
    """Granite with experts, all of a layer in one tensor; some models have an MLP that all tokens share besides."""
    spec = granite(config)
    num_experts = integer(config, "num_local_experts", 8)
    width, shared = spec.intermediate_size, config.get("shared_intermediate_size")
    shared = integer(config, "shared_intermediate_size") if shared else None
    pair = ("layers.N.experts.E.gate", "layers.N.experts.E.up")
    names: tuple[tuple[str, str | Stored], ...] = (
        *((name, slot) for name, slot in LLAMA_NAMES if ".mlp." not in name),
        ("layers.N.block_sparse_moe.router.layer", "layers.N.router"),
        (
            "layers.N.block_sparse_moe.input_linear",
            Stored(slots=pair, experts=num_experts, rows=(width, width)),
        ),
        (
            "layers.N.block_sparse_moe.output_linear",
            Stored(slots=("layers.N.experts.E.down",), experts=num_experts),
        ),
        (
            "layers.N.shared_mlp.input_linear",
            Stored(slots=("layers.N.shared.gate", "layers.N.shared.up"), rows=(shared or 0, shared or 0)),
        ),
        ("layers.N.shared_mlp.output_linear", "layers.N.shared.down"),
    )
    experts = ExpertsSpec(
        num_experts=num_experts,
        top_k=integer(config, "num_experts_per_tok", 2, most=num_experts),
        intermediate_size=width,
        normalise=True,
        shared_size=shared,
        layers=frozenset(range(spec.num_layers)),
    )
    return replace(spec, names=names, experts=experts)


FAMILIES: Final = (
    Family(name="Granite 3", architectures=("GraniteForCausalLM",), make=granite),
    Family(
        name="Granite 3 with experts",
        architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        make=granite_moe,
    ),
)
