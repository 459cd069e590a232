"""Model families by the name that `config.json` gives in `architectures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pyvllm.models.decoder import Decoder
from pyvllm.models.families import llama
from pyvllm.models.spec import ModelSpec

__all__ = ["ARCHITECTURES", "Decoder", "ModelSpec", "build_spec"]

ARCHITECTURES: Final[Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]]] = {
    "LlamaForCausalLM": llama.llama,
    "LLaMAForCausalLM": llama.llama,
    "YiForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen3ForCausalLM": llama.qwen3,
}
"""Architecture -> what makes its specification from the contents of `config.json`."""


def build_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The specification of the model with these contents of `config.json`, in old or new spelling.

    Raises `ValueError` naming the field and its value for an unknown architecture, a missing field, and whatever a
    model asks for that is not supported.
    """
    if config.get("quantization_config"):
        raise ValueError(f"config field quantization_config is {config['quantization_config']!r}, supported: none")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"config field architectures is {architectures!r}, must be a list of names")
    for architecture in architectures:
        if isinstance(architecture, str) and architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture](config)
    raise ValueError(f"config field architectures is {architectures!r}, supported: {', '.join(ARCHITECTURES)}")
