"""Activations, element by element, alone or times a second half."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyvllm.kernels.triton.pdl import allow_next, launch_options, wait_for_previous

KINDS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Name in `ACTIVATIONS` -> formula."""

# One load of 16 bytes of half precision for each thread of four warps.
BLOCK: Final = 1024
NUM_WARPS: Final = 4


def activate(x: Tensor, activation: str) -> Tensor:
    """See `Kernels.activate`; `x` is overwritten if it is contiguous."""
    x = x.contiguous()
    return _launch(x, x, activation, gated=False)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """See `Kernels.gated`."""
    num_tokens, size = gate_up.shape
    output = torch.empty(num_tokens, size // 2, dtype=gate_up.dtype, device=gate_up.device)
    return _launch(gate_up.contiguous(), output, activation, gated=True)


def _launch(x: Tensor, output: Tensor, activation: str, *, gated: bool) -> Tensor:
    size = output.shape[-1]
    activation_kernel[(output.numel() // size, triton.cdiv(size, BLOCK))](
        x,
        output,
        SIZE=size,
        KIND=KINDS[activation],
        GATED=gated,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **launch_options(),
    )
    return output


@triton.jit
def activation_kernel(
    x: tl.tensor,
    output: tl.tensor,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows, blocks of a row). `output` [rows, SIZE]; `x` the same, or twice as wide if `GATED`."""
    allow_next()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    source = x + row * (2 * SIZE if GATED else SIZE) + column
    wait_for_previous()
    loaded = tl.load(source, mask=inside, other=0)
    if GATED:
        up = tl.load(source + SIZE, mask=inside, other=0)
    value = activated(loaded.to(tl.float32), KIND).to(loaded.dtype)
    if GATED:
        value = (value.to(tl.float32) * up.to(tl.float32)).to(loaded.dtype)
    tl.store(output + row * SIZE + column, value, mask=inside)


@triton.jit
def activated(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """A value of `KINDS` of `x` float32."""
    if KIND == "silu":
        x = x / (1 + tl.exp(-x))
    elif KIND == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 * x * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3), is x / (1 + exp(-2 u)).
        x = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = tl.where(x < 0, 0.0, x)  # not a maximum, which would hide NaN
    return x
