"""Baichuan 1 and 2: the 7B has rotary positions, the 13B ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.models.base import LLAMA_NAMES, Family, alibi_slopes, base_spec
from pyvllm.models.config_fields import integer, renamed
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored, fused_qkv

_HIDDEN_SIZE_7B: Final = 4096
_VOCAB_SIZE_2: Final = 125696
"""Of Baichuan 2, to which tokens may have been added. Its output matrix is stored as it was before its rows were made
unit vectors."""


def baichuan_7b(config: Mapping[str, Any]) -> ModelSpec:
    """The first 7B, which has an architecture name of its own."""
    return _baichuan(config, alibi=False)


def baichuan(config: Mapping[str, Any]) -> ModelSpec:
    """All others: what the name does not tell, the hidden size does."""
    return _baichuan(config, alibi=integer(config, "hidden_size") != _HIDDEN_SIZE_7B)


def _baichuan(config: Mapping[str, Any], *, alibi: bool) -> ModelSpec:
    fields = renamed(config, {"model_max_length": "max_position_embeddings"}) | {"num_key_value_heads": None}
    spec = base_spec(fields, max_position_embeddings=4096, rotary=not alibi)
    names = dict[str, str | Stored](LLAMA_NAMES)
    names["layers.N.self_attn.W_pack"] = fused_qkv(spec.num_heads, spec.num_heads, spec.head_dim)
    if spec.vocab_size >= _VOCAB_SIZE_2:
        names["lm_head"] = Stored(slots=("head",), unit_rows=True)
    return replace(spec, alibi_slopes=alibi_slopes(spec.num_heads) if alibi else None, names=tuple(names.items()))


FAMILIES: Final = (
    Family(
        name="Baichuan 7B",
        architectures=("BaiChuanForCausalLM",),
        make=baichuan_7b,
        verified="the same weights as LLaMA in transformers",
    ),
    Family(
        name="Baichuan 13B, Baichuan 2",
        architectures=("BaichuanForCausalLM",),
        make=baichuan,
        verified="the same weights as LLaMA in transformers, for ALiBi under a mask with its biases",
    ),
)
