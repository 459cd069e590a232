"""`StructuredOutputsParams`: the form that an output must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyvllm.parameter_error import parameter_error


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first six, with vLLM's names; tokens that would break the form cannot be drawn.

    What does not fit, or is larger than allowed, is refused when the request is added; what turns out to be no grammar,
    or to take too long, ends the request with an error. Raises `ParameterError` naming `structured_outputs`.
    """

    json: str | dict[str, Any] | None = None
    """JSON that fits this JSON schema. `oneOf` is read as `anyOf`; what the grammar cannot express is refused."""
    regex: str | None = None
    """A text that matches this regular expression as a whole, in Rust's syntax; `\\d`, `\\w` and `\\s` are ASCII's."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A text of this grammar, in Lark's or GBNF's notation."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with tags whose content fits schemas: `{"structures": [{"begin": …, "schema": …, "end": …}, …],
    "triggers": […]}`. Each `begin` starts with a trigger; a trigger in the text is followed by the rest of a tag."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its parts."""
    disable_additional_properties: bool = False
    """No properties but those that the schema names, where it says nothing about them."""
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace between parts of JSON. None: any, but no more than a little."""
    disable_fallback: bool = False
    """Accepted for programs written for vLLM; there is one implementation."""
    backend: str | None = None
    """Accepted for programs written for vLLM; there is one implementation."""

    def __post_init__(self) -> None:
        """Check types, and that there is one constraint."""
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            expected = f"given exactly one of {', '.join(names)}"
            raise parameter_error("structured_outputs", expected, given)
        types: dict[str, tuple[str, tuple[type, ...]]] = {
            "json": ("a JSON schema as a string or a dict", (str, Mapping)),
            "regex": ("a string", (str,)),
            "choice": ("a list of strings", (list, tuple)),
            "grammar": ("a string", (str,)),
            "json_object": ("True", (bool,)),
            "structural_tag": ("JSON as a string or a dict", (str, Mapping)),
            "whitespace_pattern": ("None or a string", (str, type(None))),
            "disable_any_whitespace": ("True or False", (bool,)),
            "disable_additional_properties": ("True or False", (bool,)),
        }
        for name in (*given, "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            expected, allowed = types[name]
            value: Any = getattr(self, name)
            fits = isinstance(value, allowed)
            if not fits or (name == "choice" and not all(isinstance(v, str) for v in value)):
                expected = f"a form whose {name} is {expected}"
                raise parameter_error("structured_outputs", expected, value)
        self.constraint()

    def constraint(self) -> tuple[str, Any]:
        """Name and content of the one constraint; JSON as text."""
        for name, value in (("json", self.json), ("structural_tag", self.structural_tag)):
            if value is not None:
                return name, value if isinstance(value, str) else _to_text(value)
        for name in ("regex", "choice", "grammar"):
            if getattr(self, name) is not None:
                return name, getattr(self, name)
        return "json_object", True


def _to_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError) as cause:
        raise parameter_error("structured_outputs", f"given a schema that JSON can express ({cause})", schema) from None


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""
