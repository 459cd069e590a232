"""Linear layers for few rows, with what stands around them in a decoder: `gemv.cu`.

Symbols: M rows of x, K columns of x and of the weight, N columns of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from pyvllm.kernels.cuda.compile import MAX_SHARED_BYTES, Argument, Variant, load
from pyvllm.kernels.plain import Norm
from pyvllm.kernels.triton.attention_config import num_processors

MAX_ROWS: Final = 16
"""Of x."""

_WARPS: Final = 8
_THREADS: Final = 32 * _WARPS
# Columns that a warp takes at a time.
_STEP: Final = 64
# Bytes of weights on their way to a multiprocessor, best first: 96 KiB are what memory delivers to each in 3 µs.
_RING_BYTES: Final = tuple(kib * 1024 for kib in (96, 80, 64))
# What a block may take if the next kernel's are to begin beside it, each with 1 KiB for the system.
_SHARED_BYTES_OF_TWO: Final = 113 * 1024
# As in gemv.cu, elements.
_X_PADDING: Final = 32
_SUM_PADDING: Final = 4


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to launch `gemv.cu` for a shape."""

    variant: Variant
    blocks: int
    threads: int
    shared_bytes: int


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether `skinny_linear` serves a shape: 1 to 16 rows, K a multiple of 64, and room for x in shared memory.

    That is M <= 16 up to K = 4,096, M <= 10 at 6,144, M <= 8 at 8,192, M <= 4 at 14,336. Any N.
    """
    return (
        1 <= m <= MAX_ROWS
        and n >= 1
        and k >= _STEP
        and k % _STEP == 0
        and dtype in (torch.bfloat16, torch.float16)
        and _shared_bytes(m, k, _RING_BYTES[-1], normed=True) <= MAX_SHARED_BYTES
    )


def supports_norm(norm: Norm, dtype: torch.dtype) -> bool:
    """Whether `skinny_linear` has it: RMSNorm with a weight of x's dtype."""
    return not norm.centred and norm.bias is None and norm.weight.dtype == dtype


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether `supports` holds and the rows of `x` and `weight` lie as `skinny_linear` needs them."""
    return (
        supports(len(x), len(weight), x.shape[1], x.dtype)
        and _rows_are_aligned(x)
        and weight.is_contiguous()
        and weight.dtype == x.dtype
        and weight.data_ptr() % 16 == 0
    )


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """`norm(x) @ weight.T + bias`, in one kernel; sums in float32. `norm`: RMSNorm with a weight of x's dtype.

    | argument | shape | |
    | --- | --- | --- |
    | `x` | `[M, K]` | rows may be apart, the elements of one lie together |
    | `weight` | `[N, K]`; gated `[2 * N, K]` | gated: the rows of gate, then those of up |
    | `bias` | `[N]`; gated `[2 * N]` | |
    | `residual` | `[M, N]` | the result is added to it in place, and it is what is returned; apart from `x` |
    | result | `[M, N]` | gated: `silu(gate) * up` |

    All of one dtype, on one device and, but for `x`, contiguous; `supports` must hold. Deterministic. Kernels are
    compiled at the first call for a shape: run once before capturing a CUDA graph. Raises `ValueError` for other
    shapes or dtypes.
    """
    (m, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    _check(x, weight, bias, norm, residual, n)
    out = x.new_empty(m, n) if residual is None else residual
    mode = 0 if norm is None else 2 if norm.weight_in_float32 else 1
    launch = plan_launch(m, n, k, x.dtype, norm=mode, gated=gated, multiprocessors=num_processors(x.device))
    args: tuple[Argument, ...] = (
        *(x, weight, bias, None if norm is None else norm.weight, residual, out),
        *(x.stride(0), m, n, 0.0 if norm is None else float(norm.eps)),
    )
    load(launch.variant, x.device.index).launch(
        args, grid=(launch.blocks, 1, 1), threads=launch.threads, shared_bytes=launch.shared_bytes
    )
    return out


@lru_cache(maxsize=4096)
def plan_launch(m: int, n: int, k: int, dtype: torch.dtype, *, norm: int, gated: bool, multiprocessors: int) -> Launch:
    """`norm`: 0 for none, else the macro NORM of gemv.cu."""
    tile_rows = 8 if gated else _tile_rows(n, multiprocessors)
    loaded_rows = 16 if gated else tile_rows
    blocks = min(multiprocessors, -(-n // tile_rows))
    # All blocks read as much. Where that is more than a ring, two on one multiprocessor, put there because blocks of
    # other kernels were on others, would be the last by far.
    alone = -(-n // (tile_rows * blocks)) * loaded_rows * k * dtype.itemsize > _RING_BYTES[0]
    ring_bytes = next(
        size
        for limit in ((MAX_SHARED_BYTES,) if alone else (_SHARED_BYTES_OF_TWO, MAX_SHARED_BYTES))
        for size in _RING_BYTES
        if _shared_bytes(m, k, size, normed=norm != 0) <= limit
    )
    shared_bytes = _shared_bytes(m, k, ring_bytes, normed=norm != 0)
    defines = {
        "FLOAT16": int(dtype == torch.float16),
        "K": k,
        "WARPS": _WARPS,
        "STAGES": ring_bytes // (loaded_rows * _STEP * 2 * _WARPS),
        "ROWS": loaded_rows,
        "BLOCKS_OF_8": 1 if m <= 8 else 2,
        "NORM": norm,
        "GATED": int(gated),
    }
    return Launch(
        variant=Variant(source="gemv.cu", defines=tuple(defines.items())),
        blocks=blocks,
        threads=_THREADS,
        shared_bytes=max(shared_bytes, _SHARED_BYTES_OF_TWO + 1024) if alone else shared_bytes,
    )


def _tile_rows(n: int, multiprocessors: int) -> int:
    """16 rows of the weight at a time, or 8 where that spreads them much more evenly."""

    def evenness(rows: int) -> float:
        tiles = -(-n // rows)
        return tiles / (-(-tiles // multiprocessors) * multiprocessors)

    return 8 if evenness(8) > evenness(16) + 0.05 else 16


def _shared_bytes(m: int, k: int, ring_bytes: int, *, normed: bool) -> int:
    """As gemv.cu carves it up: ring, partial sums and sums of squares in float32, weight of the norm, x.

    Room for sums is for tiles of 16 rows.
    """
    columns = 8 if m <= 8 else 16
    sums = 4 * _WARPS * columns * (2 * (16 + _SUM_PADDING) + 1)
    return ring_bytes + sums + (2 * k if normed else 0) + 2 * m * (k + _X_PADDING)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, residual: Tensor | None, n: int) -> None:
    m, k = x.shape
    if not supports(m, n, k, x.dtype):
        raise ValueError(
            f"x {list(x.shape)} {x.dtype}: skinny_linear takes bfloat16 or float16, 1 to {MAX_ROWS} rows of a multiple "
            f"of {_STEP} elements that fit {MAX_SHARED_BYTES} bytes of shared memory"
        )
    if not _rows_are_aligned(x):
        raise ValueError(f"x has strides {x.stride()}: elements must lie together and rows begin at 16 bytes")
    if norm is not None and not supports_norm(norm, x.dtype):
        raise ValueError(f"norm is a LayerNorm or of {norm.weight.dtype}; skinny_linear has RMSNorm of {x.dtype} only")
    norm_weight = None if norm is None else norm.weight
    wanted = {
        "weight": (weight, (weight.shape[0], k)),
        "bias": (bias, weight.shape[:1]),
        "norm.weight": (norm_weight, (k,)),
        "residual": (residual, (m, n)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and (
            tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; it must be contiguous, "
                f"{list(shape)}, {x.dtype} on {x.device}"
            )
    if residual is not None and _overlap(x, residual):
        raise ValueError("residual shares memory with x, which blocks that start late would read changed")
    for name, tensor in {"weight": weight, "norm.weight": norm_weight}.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes")


def _rows_are_aligned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _overlap(x: Tensor, residual: Tensor) -> bool:
    x_end = x.data_ptr() + 2 * ((x.shape[0] - 1) * x.stride(0) + x.shape[1])
    return x.data_ptr() < residual.data_ptr() + 2 * residual.numel() and residual.data_ptr() < x_end
