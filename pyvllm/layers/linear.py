"""Matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels import AnyKernels, LinearFunction, Norm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Normed:
    """The norm of `hidden` `[M, size]`, not computed yet: kernels may do that inside of what reads it."""

    hidden: Tensor
    norm: Norm

    def compute(self, kernels: AnyKernels) -> Tensor:
        """`[M, size]`."""
        return kernels.norm(self.hidden, self.norm)


class Linear:
    """x `[M, in]` -> x @ weight.T + bias `[M, out]`. Several matrices with the same input are one, row by row."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, out_sizes: tuple[int, ...] = ()) -> None:
        """`weight` `[out, in]`, `bias` `[out]`; `out_sizes`: rows of each of the matrices, if there are several."""
        self._weight: Tensor | None = weight
        self._bias = bias
        self._out_sizes = list(out_sizes or weight.shape[:1])
        self._apply: LinearFunction = partial(functional.linear, weight=weight, bias=bias)

    @classmethod
    def empty(cls, in_size: int, *out_sizes: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Self:
        """With unset parameters."""
        weight = torch.empty(sum(out_sizes), in_size, dtype=dtype, device=device)
        return cls(weight, weight.new_empty(sum(out_sizes)) if bias else None, out_sizes=out_sizes)

    def slots(self, *names: str) -> dict[str, Tensor]:
        """Views of the parameters, one name for each of `out_sizes`; biases under the name with `.bias` added.

        Raises `RuntimeError` once the weights are packed.
        """
        if self._weight is None:
            raise RuntimeError(f"the weights of {', '.join(names)} are packed and can no longer be read or written")
        slots = dict(zip(names, torch.split(self._weight, self._out_sizes), strict=True))
        if self._bias is not None:
            biases = torch.split(self._bias, self._out_sizes)
            slots |= {f"{name}.bias": bias for name, bias in zip(names, biases, strict=True)}
        return slots

    def pack(self, kernels: AnyKernels) -> None:
        """Hand the weights, now filled, to the kernels, which may keep them in another layout."""
        if self._weight is not None:
            self._apply = kernels.pack_linear(self._weight, self._bias)
            self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """`[M, in]` -> `[M, out]`."""
        return self._apply(x)

    def of(self, x: Tensor | Normed, kernels: AnyKernels) -> Tensor:
        """`[M, in]` -> `[M, out]`."""
        if isinstance(x, Normed):
            return kernels.norm_linear(x.hidden, x.norm, self._apply)
        return self._apply(x)

    def gated(self, x: Tensor | Normed, activation: str, kernels: AnyKernels) -> Tensor:
        """activation(gate) * up, of two matrices: `[M, in]` -> `[M, out / 2]`."""
        if isinstance(x, Normed):
            return kernels.norm_gated(x.hidden, x.norm, self._apply, activation)
        return kernels.gated(self._apply(x), activation)

    def add_to(self, hidden: Tensor, x: Tensor, kernels: AnyKernels) -> Tensor | None:
        """Add the result for `x` to `hidden` `[M, out]` in place, or return it, to be added by what comes next."""
        return kernels.linear_add(hidden, x, self._apply)
