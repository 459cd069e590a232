"""Matrices."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels import AnyKernels, LinearFunction


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
