"""The feed-forward part of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels
from pyvllm.layers.linear import Linear, Normed


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, size: int, hidden_size: int, *, activation: str, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._gate_up = Linear.empty(size, hidden_size, hidden_size, bias=bias, dtype=dtype, device=device)
        self._down = Linear.empty(hidden_size, size, bias=bias, dtype=dtype, device=device)
        self._activation = activation

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name, without the layer's prefix."""
        return self._gate_up.slots("gate", "up") | self._down.slots("down")

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`."""
        self._gate_up.pack(kernels)
        self._down.pack(kernels)

    def __call__(self, x: Tensor | Normed, kernels: AnyKernels) -> Tensor:
        """`[T, size]` -> `[T, size]`."""
        return self._down(self._gate_up.gated(x, self._activation, kernels))

    def add_to(self, hidden: Tensor, x: Tensor | Normed, kernels: AnyKernels) -> Tensor | None:
        """See `Linear.add_to`."""
        return self._down.add_to(hidden, self._gate_up.gated(x, self._activation, kernels), kernels)


class PlainMLP:
    """down(activation(up(x)))."""

    def __init__(
        self, size: int, hidden_size: int, *, activation: str, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._up = Linear.empty(size, hidden_size, bias=bias, dtype=dtype, device=device)
        self._down = Linear.empty(hidden_size, size, bias=bias, dtype=dtype, device=device)
        self._activation = activation

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name, without the layer's prefix."""
        return self._up.slots("up") | self._down.slots("down")

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`."""
        self._up.pack(kernels)
        self._down.pack(kernels)

    def __call__(self, x: Tensor | Normed, kernels: AnyKernels) -> Tensor:
        """`[T, size]` -> `[T, size]`."""
        return self._down(kernels.activate(self._up.of(x, kernels), self._activation))

    def add_to(self, hidden: Tensor, x: Tensor | Normed, kernels: AnyKernels) -> Tensor | None:
        """See `Linear.add_to`."""
        return self._down.add_to(hidden, kernels.activate(self._up.of(x, kernels), self._activation), kernels)
