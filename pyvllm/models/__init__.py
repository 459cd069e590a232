"""Model families by the name that `config.json` gives in `architectures`.

A family is a function from the contents of `config.json` to a `ModelSpec`; the other names here are what such functions
are written with. `ModelRegistry.register_model` adds one from outside: see examples/custom_family.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.layers.moe import ExpertsSpec
from pyvllm.layers.norm import NormSpec
from pyvllm.layers.rope import RopeSpec
from pyvllm.models.base import (
    HEAD_NORM_NAMES,
    LLAMA_NAMES,
    Family,
    alibi_slopes,
    base_spec,
    layer_norm,
    rms_norm,
    with_mlp_size,
)
from pyvllm.models.config_fields import choice, flag, integer, number, renamed
from pyvllm.models.decoder import Decoder
from pyvllm.models.registry import FAMILIES, ModelRegistry
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored, fused_qkv

__all__ = [
    "FAMILIES",
    "HEAD_NORM_NAMES",
    "LLAMA_NAMES",
    "Decoder",
    "ExpertsSpec",
    "Family",
    "ModelRegistry",
    "ModelSpec",
    "NormSpec",
    "QueryKeyNorm",
    "RopeSpec",
    "Stored",
    "alibi_slopes",
    "base_spec",
    "build_spec",
    "choice",
    "flag",
    "fused_qkv",
    "integer",
    "layer_norm",
    "number",
    "renamed",
    "rms_norm",
    "with_mlp_size",
]


def build_spec(config: Mapping[str, Any]) -> ModelSpec:
    """See `Registry.build_spec`."""
    return ModelRegistry.build_spec(config)
