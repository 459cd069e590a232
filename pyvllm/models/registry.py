"""Which families there are."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from pyvllm.models.base import Family, MakeSpec
from pyvllm.models.families import (
    aquila,
    baichuan,
    bloom,
    cohere,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_oss,
    granite,
    internlm,
    llama,
    mixtral,
    mpt,
    olmo,
    opt,
    phi,
    qwen,
    qwen_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from pyvllm.models.spec import ModelSpec

FAMILIES: Final[tuple[Family, ...]] = (
    *llama.FAMILIES,
    *mixtral.FAMILIES,
    *qwen_moe.FAMILIES,
    *gpt_oss.FAMILIES,
    *gpt2.FAMILIES,
    *opt.FAMILIES,
    *bloom.FAMILIES,
    *falcon.FAMILIES,
    *mpt.FAMILIES,
    *gemma.FAMILIES,
    *phi.FAMILIES,
    *smollm3.FAMILIES,
    *olmo.FAMILIES,
    *granite.FAMILIES,
    *stablelm.FAMILIES,
    *starcoder2.FAMILIES,
    *cohere.FAMILIES,
    *internlm.FAMILIES,
    *baichuan.FAMILIES,
    *aquila.FAMILIES,
    *qwen.FAMILIES,
    *glm.FAMILIES,
)
"""All that come with pyvllm."""


ENTRY_POINTS: Final = "pyvllm.models"
"""Group of entry points of installed packages that add families: `Architecture = "module:function"`."""


class Registry:
    """Architecture -> what makes its specification from the contents of `config.json`.

    First counts what was registered or comes with pyvllm, then the entry points of installed packages.
    """

    def __init__(self, families: tuple[Family, ...]) -> None:
        self._makers: dict[str, MakeSpec | str] = {
            architecture: family.make for family in families for architecture in family.architectures
        }

    def register_model(self, architecture: str, make_spec: MakeSpec | str) -> None:
        """Add a family, or replace one, for models loaded from now on in this process.

        `architecture`: its name in `config.json`. `make_spec`: a function from the contents of `config.json` to a
        `ModelSpec`, or `module:name` of one, imported when it is needed. Raises `ValueError` for anything else.
        """
        if not architecture or not isinstance(architecture, str):
            raise ValueError(f"architecture must be a name as in config.json, got {architecture!r}")
        if not callable(make_spec) and not (isinstance(make_spec, str) and make_spec.count(":") == 1):
            raise ValueError(f"make_spec must be a function or 'module:name' of one, got {make_spec!r}")
        self._makers[architecture] = make_spec

    def get_supported_archs(self) -> list[str]:
        """The architectures that can be loaded."""
        return list(dict.fromkeys((*self._makers, *entry_points(group=ENTRY_POINTS).names)))

    def build_spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """The specification of the model with these contents of `config.json`, in old or new spelling.

        Raises `ValueError` naming the field and its value for an unknown architecture, a missing field, and whatever a
        model asks for that is not supported.
        """
        quantization = config.get("quantization_config")
        if quantization and not (isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"):
            raise ValueError(f"config field quantization_config is {quantization!r}, supported: quant_method mxfp4")
        architectures = config.get("architectures") or []
        if not isinstance(architectures, list):
            raise ValueError(f"config field architectures is {architectures!r}, must be a list of names")
        for architecture in architectures:
            make_spec = self._maker(architecture) if isinstance(architecture, str) else None
            if make_spec is not None:
                return make_spec(config)
        supported = ", ".join(self.get_supported_archs())
        raise ValueError(f"config field architectures is {architectures!r}, supported: {supported}")

    def _maker(self, architecture: str) -> MakeSpec | None:
        make_spec = self._makers.get(architecture)
        if make_spec is None:
            added = tuple(entry_points(group=ENTRY_POINTS, name=architecture))
            return added[0].load() if added else None
        if not isinstance(make_spec, str):
            return make_spec
        module, _, name = make_spec.partition(":")
        found: MakeSpec = getattr(importlib.import_module(module), name)
        return found


ModelRegistry: Final = Registry(FAMILIES)
"""The one that models are loaded with."""
