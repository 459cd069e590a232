"""Normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyvllm.kernels import Norm


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Which norm a model has. The fields mean what they mean in `Norm`."""

    eps: float
    centred: bool = False
    bias: bool = False
    weight_in_float32: bool = False
    affine: bool = True
    """False: there is no weight, which is then 1."""
    float32_parameters: bool = False
    """The weight is kept in float32 whatever the model's dtype: the checkpoint's weight plus 1 would be rounded."""


def empty_norm(spec: NormSpec, size: int, *, dtype: torch.dtype, device: torch.device) -> Norm:
    """A norm over `size` with unset parameters."""
    dtype = torch.float32 if spec.float32_parameters else dtype
    weight = torch.ones(size, dtype=dtype, device=device)
    return Norm(
        weight=weight.new_empty(size) if spec.affine else weight,
        bias=weight.new_empty(size) if spec.affine and spec.bias else None,
        eps=spec.eps,
        centred=spec.centred,
        weight_in_float32=spec.weight_in_float32,
    )


def norm_slots(spec: NormSpec, **norms: Norm | None) -> dict[str, Tensor]:
    """Parameters by neutral name: of each norm that there is its weight and, with `.bias` added, its bias."""
    slots = {}
    for name, norm in norms.items():
        if norm is not None and spec.affine:
            slots[name] = norm.weight
            if norm.bias is not None:
                slots[f"{name}.bias"] = norm.bias
    return slots
