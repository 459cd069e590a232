"""Constrained output, as requests ask for it."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from pyvllm.parameter_error import parameter_error
from pyvllm.server.errors import bad_request, not_supported
from pyvllm.server.protocol import ResponseFormat
from pyvllm.structured_outputs import StructuredOutputsParams

_FIELDS: Final = tuple(item.name for item in dataclasses.fields(StructuredOutputsParams))


def structured_outputs(value: object) -> StructuredOutputsParams:
    """The field of that name. Raises `ParameterError`."""
    if not isinstance(value, dict):
        raise parameter_error("structured_outputs", "an object", value)
    for name in value:
        if name not in _FIELDS:
            raise parameter_error("structured_outputs", f"an object with fields of {', '.join(_FIELDS)}", name)
    return StructuredOutputsParams(**{name: entry for name, entry in value.items() if entry is not None})


def response_form(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    """What `response_format` means. Raises `ApiError`, or `ParameterError` naming `structured_outputs`."""
    if wanted.type == "text":
        return None
    if wanted.type == "structural_tag":
        raise not_supported("response_format", "there are no structural tags")
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema: Any = (wanted.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        message = "response_format must have a JSON schema in json_schema.schema with the type json_schema"
        raise bad_request("response_format", message)
    return StructuredOutputsParams(json=schema)
