"""The table of supported families in docs/models.md."""

from __future__ import annotations

from pyvllm.models.registry import FAMILIES

FEATURES = {
    "CPU, GPU": "yes",
    "prefix cache, chunked prefill, beams, `n` > 1": "yes",
    "tensor parallel": "to come",
    "LoRA": "to come",
    "quantised weights": "GGUF (LLaMA and its kin), MXFP4 (GPT-OSS), expanded at load; others to come",
}
"""Of all families alike, since one decoder runs them."""


def support_table() -> str:
    """Markdown: each family, its names in `config.json`, and what its results are compared with; features of all."""
    lines = ["| family | `architectures` in `config.json` | compared with |", "| --- | --- | --- |"]
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.architectures)
        lines.append(f"| {family.name} | {names} | {family.verified} |")
    lines += ["", "| feature of all families | |", "| --- | --- |"]
    lines += [f"| {feature} | {state} |" for feature, state in FEATURES.items()]
    return "\n".join(lines)
