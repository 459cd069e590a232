"""Random JSON schemas of many kinds, small enough for a random model to come to an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Schema = dict[str, Any]


def random_schema(rng: np.random.Generator, depth: int = 0) -> Schema:
    """A schema; at the top now and then one that refers to a definition of its own."""
    kinds: list[Callable[[np.random.Generator, int], Schema]] = [_number, _string, _fixed]
    if depth < 2:
        kinds += [_array, _object, _any_of] * 2
    schema = kinds[int(rng.integers(len(kinds)))](rng, depth)
    if depth == 0 and rng.random() < 0.15:
        tree = {
            "type": "object",
            "properties": {"value": schema, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    return schema


def _number(rng: np.random.Generator, depth: int) -> Schema:
    low, span = int(rng.integers(-50, 50)), int(rng.integers(1, 500))
    if rng.random() < 0.6:
        lower = "minimum" if rng.random() < 0.5 else "exclusiveMinimum"
        return {"type": "integer", lower: low, "maximum": low + span}
    return {"type": "number", "minimum": low, "maximum": low + span}


def _string(rng: np.random.Generator, depth: int) -> Schema:
    patterns = ["^[a-z]{2,5}$", "^(GET|PUT) /[a-c]*x$", r"^\d{2}:\d{2}$", "^[日本]{1,3}$"]
    formats = ["date", "time", "uuid", "ipv4", "date-time"]
    options: list[Schema] = [
        {"minLength": 1, "maxLength": int(rng.integers(2, 8))},
        {"pattern": patterns[int(rng.integers(len(patterns)))]},
        {"format": formats[int(rng.integers(len(formats)))]},
    ]
    return {"type": "string"} | options[int(rng.integers(len(options)))]


def _fixed(rng: np.random.Generator, depth: int) -> Schema:
    values: list[Any] = ["red", 'quo"te', "é😀", 7, -1.5, None, True, [1, 2], {"a": {}}]
    options: list[Schema] = [
        {"enum": values[int(rng.integers(4)) :]},
        {"const": values[int(rng.integers(len(values)))]},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["boolean", "null"]},
    ]
    return options[int(rng.integers(len(options)))]


def _array(rng: np.random.Generator, depth: int) -> Schema:
    most = int(rng.integers(1, 4))
    bounds = {"minItems": int(rng.integers(0, most + 1)), "maxItems": most}
    if rng.random() < 0.3:
        first = [random_schema(rng, depth + 1) for _ in range(int(rng.integers(1, 3)))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    return {"type": "array", "items": random_schema(rng, depth + 1)} | bounds


def _object(rng: np.random.Generator, depth: int) -> Schema:
    names = [f"{'abcé'[i]}{int(rng.integers(100))}" for i in range(int(rng.integers(1, 4)))]
    extra: list[Any] = [False, False, {"type": "integer", "minimum": 0, "maximum": 9}]
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": names[: int(rng.integers(0, len(names) + 1))],
        "additionalProperties": extra[int(rng.integers(len(extra)))],
    }


def _any_of(rng: np.random.Generator, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(int(rng.integers(2, 4)))]}
