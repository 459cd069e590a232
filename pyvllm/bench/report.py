"""What a benchmark writes: one JSON file with all that its figures depend on, and a table."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

_PACKAGES: Final = ("pyvllm", "torch", "triton", "transformers", "vllm", "numpy")

Row: TypeAlias = Mapping[str, Any]
"""A line of a table: column -> value."""


def say(text: str) -> None:
    """Print progress to stderr, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """Print a result to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """Of what is installed here and could matter."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_facts() -> dict[str, Any]:
    """The GPU if torch finds one, and the processor."""
    import torch

    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return facts


class Report:
    """Results as they come; the file is complete after each."""

    def __init__(self, benchmark: str, settings: Mapping[str, Any], path: Path | None) -> None:
        """`settings`: what was asked for. `path`: of the JSON file, None for none.

        Raises `OSError` now if it cannot be written, and not after an hour.
        """
        self.results: list[dict[str, Any]] = []
        """One for each measurement."""
        self._path = path
        self._head = {
            "benchmark": benchmark,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "device": device_facts(),
            "settings": {name: _plain(value) for name, value in settings.items()},
        }
        self.write()

    def add(self, result: Mapping[str, Any]) -> None:
        """Keep a result and write the file anew."""
        self.results.append(dict(result))
        self.write()

    def write(self) -> None:
        """Write the file, in one piece: what reads it meanwhile never sees half of it."""
        if self._path is None:
            return
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(self._head | {"results": self.results}, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._path)

    def footer(self) -> str:
        """Versions, device and date, for below the table."""
        head = self._head
        facts = {**head["versions"], **head["device"], "date": head["date"]}  # type: ignore[dict-item]
        return ", ".join(f"{name} {value}" for name, value in facts.items())


def _plain(value: Any) -> Any:
    """As JSON can hold it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def summary(seconds: Sequence[float], percentiles: Sequence[float], unit: float = 1e3) -> dict[str, float]:
    """Mean and percentiles of times, `unit` to the second (1e3: milliseconds). {} without any."""
    if not seconds:
        return {}
    values = np.asarray(seconds) * unit
    return {"mean": float(values.mean()), **{f"p{at:g}": float(np.percentile(values, at)) for at in percentiles}}


def table(rows: Sequence[Row]) -> str:
    """A Markdown table; columns are those of all rows, in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [all(not isinstance(row.get(name), str) for row in rows) for name in columns]
    lines = [_line(line, widths, numeric) for line in cells]
    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([lines[0], _line(rule, widths, numeric), *lines[1:]])


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    )
    return "| " + " | ".join(padded) + " |"


def _cell(value: Any) -> str:
    """A number with three digits that matter or more, none of an integer's lost."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
