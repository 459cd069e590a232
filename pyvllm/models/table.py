"""The table of supported families in docs/models.md."""

from __future__ import annotations

from pyvllm.models.registry import FAMILIES


def support_table() -> str:
    """Markdown: each family, its names in `config.json`, and what its results are compared with."""
    lines = ["| family | `architectures` in `config.json` | compared with |", "| --- | --- | --- |"]
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.architectures)
        lines.append(f"| {family.name} | {names} | {family.verified} |")
    return "\n".join(lines)
