"""A field that a config.json leaves out means what it means to transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pyvllm.models import build_spec
from tests.models.test_families_in_llm import MODELS
from tests.tiny_models import MODELS as LLAMAS
from tests.tiny_models import SIZES

ALL: dict[str, tuple[str, dict[str, Any]]] = MODELS | {
    name: (kind, SIZES | fields) for name, (kind, fields) in LLAMAS.items()
}


@pytest.mark.parametrize("name", ALL)
def test_absent_fields(name: str) -> None:
    """Everything that transformers would fill in is left out: what a field's own default is, and layers' kinds."""
    model_type, fields = ALL[name]
    made = transformers.AutoConfig.for_model(model_type, **fields)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    config = made.to_dict() | {"architectures": [architecture]}
    defaults = type(made)().to_dict()
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    short = {
        key: value
        for key, value in config.items()
        if key in fields or key in sizes or key not in defaults or value != defaults[key]
    }
    if "layer_types" not in fields:
        short.pop("layer_types", None)

    assert build_spec(short | {"architectures": [architecture]}) == build_spec(config)
