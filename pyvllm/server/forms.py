"""Constrained output, as requests ask for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import orjson

from pyvllm.parameter_error import parameter_error
from pyvllm.server.errors import bad_request
from pyvllm.server.protocol import GenerationBody, ResponseFormat
from pyvllm.structured_outputs import StructuredOutputsParams

_FIELDS: Final = tuple(item.name for item in dataclasses.fields(StructuredOutputsParams))

_GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Names of older clients -> fields of `StructuredOutputsParams`."""


def structured_outputs(value: object) -> StructuredOutputsParams:
    """The field of that name. Raises `ParameterError`."""
    if not isinstance(value, dict):
        raise parameter_error("structured_outputs", "an object", value)
    for name in value:
        if name not in _FIELDS:
            raise parameter_error("structured_outputs", f"an object with fields of {', '.join(_FIELDS)}", name)
    return _form(**{name: entry for name, entry in value.items() if entry is not None})


def _form(**fields: Any) -> StructuredOutputsParams:
    """Schemas become text here, since the standard library takes seconds for what may be in a body."""
    found = {name: fields.get(name) for name in ("json", "structural_tag")}
    written = {name: orjson.dumps(value).decode() for name, value in found.items() if isinstance(value, dict)}
    return StructuredOutputsParams(**(fields | written))


def response_form(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    """What `response_format` means. Raises `ApiError`, or `ParameterError` naming `structured_outputs`."""
    if wanted.type == "text":
        return None
    if wanted.type == "structural_tag":
        return _form(structural_tag={"structures": wanted.structures, "triggers": wanted.triggers})
    if wanted.type == "json_object":
        return _form(json_object=True)
    schema: Any = (wanted.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        message = "response_format must have a JSON schema in json_schema.schema with the type json_schema"
        raise bad_request("response_format", message)
    return _form(json=schema)


def form_fields(body: GenerationBody) -> list[str]:
    """The fields of a request that ask for a form of the text; there may be one at most."""
    found = [
        name for name in ("structured_outputs", "response_format", *_GUIDED) if body.__dict__.get(name) is not None
    ]
    if body.response_format is not None and body.response_format.type == "text":
        found.remove("response_format")
    return found


def asked_form(body: GenerationBody, given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The form that a request asks for. Raises `ApiError`, or `ParameterError` naming `structured_outputs`.

    `given`: its sampling parameters.
    """
    names = form_fields(body)
    if body.guided_whitespace_pattern is not None and body.guided_json is None:
        name = "guided_whitespace_pattern"
        raise bad_request(name, f"{name} must only be given with guided_json")
    if not names:
        return None
    if len(names) > 1:
        raise bad_request(names[1], f"{names[1]} must not be given beside {names[0]}")
    (name,) = names
    if name == "structured_outputs":
        form: StructuredOutputsParams = given[name]
        return form
    if body.response_format is not None and name == "response_format":
        return response_form(body.response_format)
    options = {_GUIDED[name]: getattr(body, name), "whitespace_pattern": body.guided_whitespace_pattern}
    return _form(**options)
