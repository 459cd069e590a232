"""RMSNorm and LayerNorm, alone or after an addition. One program a row, which stays in registers."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyvllm.kernels.plain import Norm
from pyvllm.kernels.triton.pdl import allow_next, launch_options, wait_for_previous

NormRule = tuple[float, bool, bool]
"""Compile-time part of a `Norm`: eps, centred, weight_in_float32."""

# Two loads of 16 bytes of half precision: enough in flight with few registers, and few warps to wait for.
_ELEMENTS_PER_THREAD: Final = 16
_MAX_WARPS: Final = 32


def norm(x: Tensor, of: Norm) -> Tensor:
    """See `Kernels.norm`."""
    # Copies only what is no matrix of rows: heads cut out of a projection, which `rotate_and_store` sees to elsewhere.
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, output, of)
    return output


def add_norm(hidden: Tensor, delta: Tensor, of: Norm) -> Tensor:
    """See `Kernels.add_norm`; rows of `hidden` are contiguous."""
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _launch(hidden, delta.contiguous(), output, of)
    return output


def rule(of: Norm) -> NormRule:
    """What `of` is to `normalise`."""
    return of.eps, of.centred, of.weight_in_float32


def _launch(rows: Tensor, delta: Tensor | None, output: Tensor, of: Norm) -> None:
    num_rows, size = rows.shape
    width = triton.next_power_of_2(size)
    norm_kernel[(num_rows,)](
        rows,
        delta,
        output,
        of.weight,
        of.bias if of.centred else None,
        rows.stride(0),
        SIZE=size,
        WIDTH=width,
        RULE=rule(of),
        num_warps=num_warps(width),
        **launch_options(),
    )


def num_warps(width: int) -> int:
    """Warps for a row of `width`, a power of two."""
    return min(max(width // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS)


@triton.jit
def norm_kernel(
    rows: tl.tensor,
    delta: tl.tensor,
    output: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    RULE: tl.constexpr,
) -> None:
    """Grid: (rows,). `delta`, contiguous like `output`, is added to `rows` first if it is not None.

    `WIDTH`: `SIZE` rounded up to a power of two.
    """
    allow_next()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    source = rows + row * row_stride + column
    factors = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if bias is None:
        terms = None
    else:
        terms = tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    wait_for_previous()
    loaded = tl.load(source, mask=inside, other=0)
    if delta is not None:
        addend = tl.load(delta + row * SIZE + column, mask=inside, other=0)
        loaded = (loaded.to(tl.float32) + addend.to(tl.float32)).to(loaded.dtype)
        tl.store(source, loaded, mask=inside)
    x = loaded.to(tl.float32)
    mean, scale = statistics(x, inside, SIZE, RULE)
    x = normalise(x, mean, scale, factors, terms, loaded.dtype, RULE)
    tl.store(output + row * SIZE + column, x.to(loaded.dtype), mask=inside)


@triton.jit
def statistics(x: tl.tensor, inside: tl.tensor, SIZE: tl.constexpr, RULE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Mean (0 unless centred) and 1 / deviation over the last dimension, kept with length 1, of `x` float32.

    `inside` tells the `SIZE` elements that count; `x` is 0 elsewhere.
    """
    if RULE[1]:
        mean = tl.sum(x, axis=-1, keep_dims=True) / SIZE
        deviation = tl.where(inside, x - mean, 0.0)
        variance = tl.sum(deviation * deviation, axis=-1, keep_dims=True) / SIZE
    else:
        variance = tl.sum(x * x, axis=-1, keep_dims=True) / SIZE
        mean = tl.zeros_like(variance)
    return mean, tl.rsqrt(variance + RULE[0])


@triton.jit
def normalise(
    x: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    DTYPE: tl.constexpr,
    RULE: tl.constexpr,
) -> tl.tensor:
    """The norm of `x`, all float32, from its `statistics`; only the last rounding to `DTYPE` is left to the caller."""
    if RULE[1]:
        x = (x - mean) * scale * weight
        if bias is not None:
            x += bias
    elif RULE[2]:
        x = x * scale * weight
    else:
        x = (x * scale).to(DTYPE).to(tl.float32) * weight
    return x
