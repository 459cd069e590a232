"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    Families differ in where half precision is rounded: the quotient before it is multiplied (`weight_in_float32` false:
    LLaMA and most others) or only the product.
    """

    def __init__(
        self, size: int, *, eps: float, weight_in_float32: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._size = (size,)
        self._eps = eps
        self._at_once = weight_in_float32 or dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., size]` -> the same shape, a new tensor."""
        if self._at_once:
            return functional.rms_norm(x, self._size, self.weight, self._eps)
        return functional.rms_norm(x, self._size, None, self._eps).mul_(self.weight)
