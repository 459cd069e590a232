"""GPT-OSS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyvllm.layers.moe import ClampedGate, ExpertsSpec
from pyvllm.models.base import LLAMA_NAMES, Family, base_spec, layer_windows, optional_window, rms_norm
from pyvllm.models.config_fields import flag, integer, number
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored

_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(config: Mapping[str, Any]) -> ModelSpec:
    """Experts with biases and a clamped gate, attention with sinks, a window in every second layer."""
    fields = {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128} | dict(config)
    if not fields.get("rope_scaling") and not fields.get("rope_parameters"):
        fields["rope_parameters"] = _ROPE
    norm = rms_norm(config, eps=1e-5, weight_in_float32=True)
    spec = base_spec({"rope_theta": 150000.0} | fields, norm=norm, max_position_embeddings=131072)
    num_experts = integer(config, "num_local_experts", 128)
    bias = flag(config, "attention_bias", True)
    return replace(
        spec,
        windows=layer_windows(fields, spec.num_layers, optional_window(fields), lambda layer: layer % 2 == 0),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        experts=ExpertsSpec(
            num_experts=num_experts,
            top_k=integer(config, "num_experts_per_tok", 4, most=num_experts),
            intermediate_size=spec.intermediate_size,
            normalise=True,
            bias=True,
            clamped_gate=ClampedGate(
                alpha=number(config, "swiglu_alpha", 1.702), limit=number(config, "swiglu_limit", 7.0)
            ),
            layers=frozenset(range(spec.num_layers)),
        ),
        names=_names(num_experts, spec.intermediate_size),
    )


def _names(num_experts: int, width: int) -> tuple[tuple[str, str | Stored], ...]:
    """Matrices of all experts are one tensor, kept as [in, out], in which gates and values alternate."""

    def stored(*slots: str, transposed: bool = False) -> Stored:
        rows = (1,) * len(slots) if len(slots) > 1 else ()
        return Stored(slots=slots, transposed=transposed, experts=num_experts, groups=width, rows=rows)

    gate, up, down = (f"layers.N.experts.E.{name}" for name in ("gate", "up", "down"))
    return (
        *((name, slot) for name, slot in LLAMA_NAMES if ".mlp." not in name),
        ("layers.N.self_attn.sinks", "layers.N.sinks"),
        ("layers.N.mlp.router", "layers.N.router"),
        ("layers.N.mlp.experts.gate_up_proj", stored(gate, up, transposed=True)),
        ("layers.N.mlp.experts.gate_up_proj_bias", stored(f"{gate}.bias", f"{up}.bias")),
        ("layers.N.mlp.experts.down_proj", stored(down, transposed=True)),
        ("layers.N.mlp.experts.down_proj_bias", stored(f"{down}.bias")),
    )


FAMILIES: Final = (Family(name="GPT-OSS", architectures=("GptOssForCausalLM",), make=gpt_oss),)
