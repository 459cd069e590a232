"""The error for a field of a request, as the core words it."""

from __future__ import annotations

from pyvllm._core import ParameterError


def parameter_error(parameter: str, expected: str, value: object) -> ParameterError:
    """The error for a field that is not what it must be, worded as the core words them."""
    shown = repr(value)
    error = ParameterError(f"{parameter} must be {expected}, got {shown if len(shown) <= 200 else shown[:200] + '…'}")
    error.parameter, error.value = parameter, value
    return error
