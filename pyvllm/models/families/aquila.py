"""Aquila 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyvllm.models.base import Family, base_spec, rms_norm
from pyvllm.models.spec import ModelSpec


def aquila(config: Mapping[str, Any]) -> ModelSpec:
    """LLaMA whose norms round only once in half precision."""
    return base_spec(config, norm=rms_norm(config, weight_in_float32=True))


FAMILIES: Final = (
    Family(
        name="Aquila, Aquila 2",
        architectures=("AquilaModel", "AquilaForCausalLM"),
        make=aquila,
        verified="the same weights as LLaMA in transformers",
    ),
)
