"""StarCoder 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import LLAMA_NAMES, Family, base_spec, layer_norm, optional_window
from pyvllm.models.config_fields import flag
from pyvllm.models.spec import ModelSpec

_NAMES: Final = (
    *((name, slot) for name, slot in LLAMA_NAMES if ".mlp." not in name),
    ("layers.N.mlp.c_fc", "layers.N.up"),
    ("layers.N.mlp.c_proj", "layers.N.down"),
)


def starcoder2(config: Mapping[str, Any]) -> ModelSpec:
    """LLaMA's attention with LayerNorms, an MLP without a gate, biases everywhere."""
    fields = {"num_key_value_heads": 2} | dict(config)
    norm = layer_norm(config, "norm_epsilon")
    spec = base_spec(
        fields, names=_NAMES, norm=norm, max_position_embeddings=4096, activation="gelu_pytorch_tanh", tied=True
    )
    bias = flag(config, "use_bias", True)
    return replace(
        spec,
        windows=(optional_window(config),) * spec.num_layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
    )


FAMILIES: Final = (Family(name="StarCoder 2", architectures=("Starcoder2ForCausalLM",), make=starcoder2),)
