"""The feed-forward part of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels import AnyKernels
from pyvllm.layers.linear import Linear

_tanh_gelu = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": functional.relu,
}
"""By their names in `config.json`."""


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, size: int, hidden_size: int, *, activation: str, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._gate_up = Linear.empty(size, hidden_size, hidden_size, bias=bias, dtype=dtype, device=device)
        self._down = Linear.empty(hidden_size, size, bias=bias, dtype=dtype, device=device)
        self._activation = ACTIVATIONS[activation]
        self._hidden_size = hidden_size

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name, without the layer's prefix."""
        return self._gate_up.slots("gate", "up") | self._down.slots("down")

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`."""
        self._gate_up.pack(kernels)
        self._down.pack(kernels)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, size]` -> `[T, size]`."""
        gate_up = self._gate_up(x)
        hidden = self._activation(gate_up[:, : self._hidden_size]).mul_(gate_up[:, self._hidden_size :])
        return self._down(hidden)
