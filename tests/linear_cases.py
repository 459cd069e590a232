"""Inputs of the skinny matrix product with the result that float32 arithmetic gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels.plain import Norm


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """See `skinny_linear`."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    norm: int = 0
    """0: none; 1: the quotient is rounded before it is multiplied; 2: only the product is."""
    gated: bool = False
    bias: bool = False
    residual: bool = False


@dataclass(frozen=True, kw_only=True)
class LinearInputs:
    """Random tensors of a case; rows of x are apart by more than their elements."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    norm: Norm | None
    residual: Tensor | None
    expected: Tensor
    """`[M, N]` float32."""


def make(case: LinearCase, device: torch.device) -> LinearInputs:
    """The tensors on `device`."""
    generator = torch.Generator().manual_seed(case.m * 1000003 + case.n * 1009 + case.k)

    def random(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * factor).to(case.dtype).to(device)

    rows = case.n * (2 if case.gated else 1)
    x = random(case.m, case.k + 8)[:, : case.k]
    weight = random(rows, case.k, factor=case.k**-0.5)
    bias = random(rows) if case.bias else None
    residual = random(case.m, case.n) if case.residual else None
    norm = None
    if case.norm:
        norm = Norm(weight=random(case.k), eps=1e-5, weight_in_float32=case.norm == 2)
    return LinearInputs(
        x=x,
        weight=weight,
        bias=bias,
        norm=norm,
        residual=residual,
        expected=_expected(x, weight, bias, norm, residual, case),
    )


def _expected(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, residual: Tensor | None, case: LinearCase
) -> Tensor:
    value = x.float()
    if norm is not None:
        value = functional.rms_norm(value, (case.k,), eps=norm.eps)
        if not norm.weight_in_float32:
            value = value.to(case.dtype).float()
        value = (value * norm.weight.float()).to(case.dtype).float()
    value = (value.double() @ weight.double().T).float()
    if bias is not None:
        value += bias.float()
    if case.gated:
        value = functional.silu(value[:, : case.n]) * value[:, case.n :]
    return value if residual is None else value + residual.float()


def relative_error(result: Tensor, expected: Tensor) -> float:
    """|result - expected| / |expected|; NaN if any element is."""
    return float((result.float() - expected).norm() / expected.norm())
