"""Normalisation."""

from __future__ import annotations

import torch

from pyvllm.kernels import Norm


def empty_norm(size: int, *, eps: float, weight_in_float32: bool, dtype: torch.dtype, device: torch.device) -> Norm:
    """An RMSNorm over `size` with unset weights."""
    weight = torch.empty(size, dtype=dtype, device=device)
    return Norm(weight=weight, eps=eps, weight_in_float32=weight_in_float32)
