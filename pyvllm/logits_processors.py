"""A request's own functions on its logits: found out how they are called, and called row by row."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from pyvllm.sampling_params import LogitsProcessor

_NEVER: Final = float("-inf")
_GREATEST: Final = torch.finfo(torch.float32).max

Processor: TypeAlias = Callable[[list[int], list[int], Tensor], Tensor]
"""All functions of a request as one: (prompt ids, generated ids, logits [V] float32) -> logits [V]."""
ProcessedRow: TypeAlias = tuple[int, str, Processor, list[int], list[int]]
"""As `_core.StepPlan.processed_rows` has them: row, request id, processor, prompt ids, generated ids."""


def as_processor(functions: Sequence[LogitsProcessor]) -> Processor:
    """The functions one after the other; those that take three arguments get the prompt first.

    What it gives is checked: raises `TypeError` for what is no tensor and `ValueError` for one of another shape.
    """
    calls = [(function, _num_arguments(function) >= 3) for function in functions]

    def process(prompt_ids: list[int], token_ids: list[int], logits: Tensor) -> Tensor:
        shape = logits.shape
        for function, wants_prompt in calls:
            arguments = (prompt_ids, token_ids, logits) if wants_prompt else (token_ids, logits)
            logits = function(*arguments)
            if not isinstance(logits, Tensor):
                raise TypeError(f"{function!r} gave {type(logits).__name__}, not a tensor")
            if logits.shape != shape:
                raise ValueError(f"{function!r} gave logits of shape {tuple(logits.shape)}, not {tuple(shape)}")
        return logits

    return process


def load_processors(paths: Mapping[str, str]) -> dict[str, LogitsProcessor]:
    """The functions of `EngineArgs.logits_processors`. Raises ValueError naming what cannot be imported."""
    found: dict[str, LogitsProcessor] = {}
    for name, path in paths.items():
        module, _, attribute = path.partition(":")
        try:
            found[name] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as cause:
            raise ValueError(f"logits_processors[{name!r}] must be module:function, got {path!r}: {cause}") from cause
        if not callable(found[name]):
            raise ValueError(f"logits_processors[{name!r}] must be a function, got {found[name]!r}")
    return found


def _num_arguments(function: LogitsProcessor) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Some that are written in C do not say.
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional for parameter in parameters)


def process_rows(logits: Tensor, rows: Sequence[ProcessedRow], vocab_size: int) -> tuple[Tensor, dict[str, Exception]]:
    """`logits` [R, >= V] with some rows changed, [R, V] float32 on the same device, and what was raised, by request.

    A row whose processor raises stays as it was. Waits for the device: each row passes through the host.
    """
    values = logits[:, :vocab_size].to(torch.float32, copy=True)
    failures: dict[str, Exception] = {}
    for row, request_id, processor, prompt_ids, token_ids in rows:
        try:
            logits_of_row = processor(prompt_ids, token_ids, values[row].cpu())
            # No infinity but that of what is never drawn: later transforms add and multiply.
            values[row] = logits_of_row.float().nan_to_num(nan=_NEVER, posinf=_GREATEST, neginf=_NEVER).to(values)
        except Exception as error:
            failures[request_id] = error
    return values, failures
