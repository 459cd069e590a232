"""Reading the fields of a `config.json`, naming what is wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pyvllm.layers.rope import ROPE_TYPES, RopeSpec

_MISSING = object()


def integer(config: Mapping[str, Any], name: str, default: Any = _MISSING, *, most: int = (1 << 31) - 1) -> int:
    """A field that is a whole number from 1 to `most`; `default` if it is absent or null."""
    value = _get(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"config field {called(config, name)} is {value!r}, must be a whole number >= 1 and <= {most}")
    return value


def number(config: Mapping[str, Any], name: str, default: Any = _MISSING) -> float:
    """A field that is a finite number above 0; `default` if it is absent or null."""
    value = _get(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config field {called(config, name)} is {value!r}, must be a finite number > 0")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false; `default` if it is absent or null."""
    value = _get(config, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"config field {called(config, name)} is {value!r}, must be true or false")
    return value


def choice(config: Mapping[str, Any], name: str, allowed: Collection[str], default: Any = _MISSING) -> str:
    """A field that is one of a few words; `default` if it is absent or null."""
    value = _get(config, name, default)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"config field {called(config, name)} is {value!r}, supported: {', '.join(allowed)}")
    return str(value)


def _get(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    if value is None:
        value = default
    if value is _MISSING:
        names = dict.fromkeys((called(config, name), name))
        raise ValueError(f"config field {' or '.join(names)} is missing")
    return value


class _Renamed(dict[str, Any]):
    """A config with fields under other names than in its file, which messages use. `|` keeps that."""

    def __init__(self, fields: Mapping[str, Any], called: Mapping[str, str]) -> None:
        super().__init__(fields)
        self.called = called

    def __or__(self, other: Mapping[str, Any]) -> _Renamed:  # type: ignore[override]
        return _Renamed({**self, **other}, self.called)

    def __ror__(self, other: Mapping[str, Any]) -> _Renamed:  # type: ignore[override]
        return _Renamed({**other, **self}, self.called)


def renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The config with fields of other names, old -> new, also under the new name where that is absent or null."""
    known = config.called if isinstance(config, _Renamed) else {}
    olds = {new: old for old, new in names.items() if config.get(new) is None}
    fields = {new: config[old] for new, old in olds.items() if config.get(old) is not None}
    return _Renamed({**config, **fields}, {**known, **{new: known.get(old, old) for new, old in olds.items()}})


def called(config: Mapping[str, Any], name: str) -> str:
    """What the file calls a field."""
    return config.called.get(name, name) if isinstance(config, _Renamed) else name


def rope(config: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int) -> RopeSpec:
    """Rotary positions in the old spelling (`rope_theta`, `rope_scaling`) or the new one (`rope_parameters`)."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    fields = config.get(name) or {}
    if not isinstance(fields, Mapping) or any(isinstance(value, Mapping) for value in fields.values()):
        raise ValueError(f"config field {name} is {fields!r}, must be one set of rope parameters")
    outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    fields = outer | {key: value for key, value in fields.items() if value is not None}
    fields = _Renamed(fields, config.called if isinstance(config, _Renamed) else {})
    if "rope_type" not in fields and "type" in fields:
        fields["rope_type"] = fields["type"]
    rope_type = choice(fields, "rope_type", ROPE_TYPES, "default")
    dim = int(head_dim * number(fields, "partial_rotary_factor", 1.0))
    if dim % 2 or not 0 < dim <= head_dim:
        factor = called(config, "partial_rotary_factor")
        raise ValueError(
            f"config fields {called(config, 'head_dim')} and {factor} rotate {dim} of {head_dim} dimensions"
        )
    trained_len = max_position_embeddings
    if rope_type in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        trained_len = integer(config, name, integer(fields, name, max_position_embeddings))
    spec = RopeSpec(rope_type=rope_type, theta=number(fields, "rope_theta", 10000.0), dim=dim, trained_len=trained_len)
    if rope_type == "yarn" and spec.theta <= 1:
        raise ValueError(f"config field {called(fields, 'rope_theta')} is {spec.theta}, must be > 1 with yarn")
    if rope_type == "dynamic" and dim < 4:
        raise ValueError(
            f"config fields rotate {dim} of {head_dim} dimensions, must be at least 4 with dynamic scaling"
        )
    if rope_type == "longrope" and trained_len < 2:
        raise ValueError(f"config field original_max_position_embeddings is {trained_len}, must be > 1 with longrope")
    if rope_type == "default":
        return spec
    if rope_type == "yarn":
        return _yarn(spec, fields, default_factor=max_position_embeddings / trained_len)
    if rope_type == "longrope":
        return _longrope(spec, fields, default_factor=max_position_embeddings / trained_len)
    spec = replace(spec, factor=number(fields, "factor"))
    if rope_type == "llama3":
        low, high = number(fields, "low_freq_factor"), number(fields, "high_freq_factor")
        if low >= high:
            raise ValueError(f"config field low_freq_factor is {low}, must be below high_freq_factor {high}")
        spec = replace(spec, low_freq_factor=low, high_freq_factor=high)
    return spec


def _yarn(spec: RopeSpec, fields: Mapping[str, Any], *, default_factor: float) -> RopeSpec:
    factor = number(fields, "factor", default_factor)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = growth(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        attention_factor = growth(number(fields, "mscale")) / growth(number(fields, "mscale_all_dim"))
    return replace(
        spec,
        factor=factor,
        beta_fast=number(fields, "beta_fast", 32.0),
        beta_slow=number(fields, "beta_slow", 1.0),
        truncate=flag(fields, "truncate", True),
        attention_factor=number(fields, "attention_factor", attention_factor),
    )


def _longrope(spec: RopeSpec, fields: Mapping[str, Any], *, default_factor: float) -> RopeSpec:
    factor = number(fields, "factor", default_factor)
    growth = math.sqrt(1 + math.log(factor) / math.log(spec.trained_len)) if factor > 1 else 1.0
    return replace(
        spec,
        factor=factor,
        short_factors=_factors(fields, "short_factor", spec.dim // 2),
        long_factors=_factors(fields, "long_factor", spec.dim // 2),
        attention_factor=number(fields, "attention_factor", growth),
    )


def _factors(fields: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"config field {name} is {values!r}, must be {count} numbers, one a pair of dimensions")
    return tuple(number({name: value}, name) for value in values)
