"""SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import Family, base_spec, layer_windows, optional_window
from pyvllm.models.config_fields import flag, integer
from pyvllm.models.spec import ModelSpec


def smollm3(config: Mapping[str, Any]) -> ModelSpec:
    """LLaMA without rotary positions in every fourth layer."""
    fields = {"num_key_value_heads": 4, "rope_theta": 2e6} | dict(config)
    spec = base_spec(fields, max_position_embeddings=32768, tied=True)
    rotated = config.get("no_rope_layers")
    if rotated is None:
        interval = integer(config, "no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % interval != 0) for layer in range(spec.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != spec.num_layers:
        raise ValueError(
            f"config field no_rope_layers is {rotated!r}, must have {spec.num_layers} entries, 1 in layers with "
            "rotary positions and 0 in those without"
        )
    window = optional_window(config) if flag(config, "use_sliding_window") else None
    bias = flag(config, "attention_bias")
    return replace(
        spec,
        ropes=tuple(rope if on else None for rope, on in zip(spec.ropes, rotated, strict=True)),
        windows=layer_windows(config, spec.num_layers, window, lambda layer: not rotated[layer]),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
    )


FAMILIES: Final = (Family(name="SmolLM3", architectures=("SmolLM3ForCausalLM",), make=smollm3),)
