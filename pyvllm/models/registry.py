"""Which families there are."""

from __future__ import annotations

import importlib
import os
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
VARIABLE: Final = "PYVLLM_MODELS"
"""Environment variable with families from outside: `Architecture=module:function`, separated by commas."""


class Registry:
    """Architecture -> what makes its specification from the contents of `config.json`.

    First counts what was registered here or in a process that started this one, then what comes with pyvllm, then the
    entry points of installed packages.
    """

    def __init__(self, families: tuple[Family, ...], *, variable: str | None = None) -> None:
        """`variable`: the environment variable by which processes that this one starts know what is registered."""
        self._own: dict[str, MakeSpec] = {
            architecture: family.make for family in families for architecture in family.architectures
        }
        self._registered: dict[str, MakeSpec | str] = {}
        self._variable = variable

    def register_model(self, architecture: str, make_spec: MakeSpec | str) -> None:
        """Add a family, or replace one, for models loaded from now on in this process and in those that it starts.

        `architecture`: its name in `config.json`. `make_spec`: a function from the contents of `config.json` to a
        `ModelSpec`, or `module:name` of one, imported when it is needed. Other processes import it in any case: they
        do not know a function of the main program. Raises `ValueError` for anything else.
        """
        if not isinstance(architecture, str) or not architecture.isidentifier():
            raise ValueError(f"architecture must be a name as in config.json, got {architecture!r}")
        if not callable(make_spec) and not (isinstance(make_spec, str) and make_spec.count(":") == 1):
            raise ValueError(f"make_spec must be a function or 'module:name' of one, got {make_spec!r}")
        self._registered[architecture] = make_spec
        if self._variable is not None:
            name = make_spec if isinstance(make_spec, str) else _name(make_spec)
            pairs = (self._inherited() | {architecture: name}).items()
            os.environ[self._variable] = ",".join(f"{known}={place}" for known, place in pairs)

    def _inherited(self) -> dict[str, str]:
        text = "" if self._variable is None else os.environ.get(self._variable, "")
        pairs = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
        for architecture, _, place in pairs:
            if not architecture.isidentifier() or place.count(":") != 1:
                raise ValueError(f"{self._variable} is {text!r}, must be Architecture=module:function,...")
        return {architecture: place for architecture, _, place in pairs}

    def get_supported_archs(self) -> list[str]:
        """The architectures that can be loaded."""
        added = (*self._registered, *self._inherited(), *entry_points(group=ENTRY_POINTS).names)
        return list(dict.fromkeys((*self._own, *added)))

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
                spec = make_spec(config)
                if not isinstance(spec, ModelSpec):
                    raise ValueError(f"what is registered for {architecture} made {spec!r}, must make a ModelSpec")
                return spec
        supported = ", ".join(self.get_supported_archs())
        raise ValueError(f"config field architectures is {architectures!r}, supported: {supported}")

    def _maker(self, architecture: str) -> MakeSpec | None:
        make_spec = self._registered.get(architecture) or self._inherited().get(architecture)
        make_spec = make_spec or self._own.get(architecture)
        if make_spec is None:
            added = tuple(entry_points(group=ENTRY_POINTS, name=architecture))
            return added[0].load() if added else None
        return _import(architecture, make_spec) if isinstance(make_spec, str) else make_spec


def _name(make_spec: MakeSpec) -> str:
    return f"{make_spec.__module__}:{getattr(make_spec, '__qualname__', type(make_spec).__name__)}"


def _import(architecture: str, place: str) -> MakeSpec:
    module, _, name = place.partition(":")
    try:
        if module == "__main__":
            raise ImportError("it belongs to the program that was started, not to a module")
        found: MakeSpec = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"architecture {architecture} is registered as {place}, not to be found here: {error}"
        ) from error
    return found


ModelRegistry: Final = Registry(FAMILIES, variable=VARIABLE)
"""The one that models are loaded with."""
