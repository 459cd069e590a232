"""StableLM 2 and StableLM-Epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.models.base import LLAMA_NAMES, Family, base_spec, layer_norm
from pyvllm.models.config_fields import flag, renamed
from pyvllm.models.spec import ModelSpec

_NAMES: Final = (
    *LLAMA_NAMES,
    ("layers.N.self_attn.q_layernorm.norms.E", "layers.N.q_norm.E"),
    ("layers.N.self_attn.k_layernorm.norms.E", "layers.N.k_norm.E"),
)


def stablelm(config: Mapping[str, Any]) -> ModelSpec:
    """LLaMA with LayerNorms and partly rotated heads; the 12B norms each head by itself, beside a parallel MLP."""
    fields = renamed(config, {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"})
    fields = {"partial_rotary_factor": 0.25} | fields
    norm = layer_norm(fields, "layer_norm_eps")
    spec = base_spec(fields, names=_NAMES, norm=norm, max_position_embeddings=4096)
    parallel = flag(config, "use_parallel_residual")
    qk_norm = QueryKeyNorm(norm=replace(norm, bias=False), over="each_head")
    return replace(
        spec,
        arrangement="parallel" if parallel else "sequential",
        norms=("norm1",) if parallel else ("norm1", "norm2"),
        qk_norm=qk_norm if flag(config, "qk_layernorm") else None,
        qkv_bias=flag(config, "use_qkv_bias"),
    )


FAMILIES: Final = (
    Family(name="StableLM 2", architectures=("StableLmForCausalLM", "StableLMEpochForCausalLM"), make=stablelm),
)
