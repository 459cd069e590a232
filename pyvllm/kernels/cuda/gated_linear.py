"""Gated linear layers for many rows, the activation inside: `gated_linear.cu`.

Symbols as in `linear.py`: M rows of x, K columns of x and of the weight, N columns of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from pyvllm.kernels.cuda.compile import MAX_SHARED_BYTES, Argument, Variant, load
from pyvllm.kernels.cuda.tensor_map import tensor_map
from pyvllm.kernels.triton.attention_config import num_processors

# As in gated_linear.cu.
_GROUP_ROWS: Final = 64
_STEP: Final = 64
_ALIGNMENT: Final = 1024
_BARRIER_BYTES: Final = 16

# Measured on an H200 with N, K of LLaMA 3 8B, Qwen 2.5 7B and Qwen 3 0.6B. Tiles of the same number of products take
# the same time, but for small ones: 64 rows of x take as long as 80, 96 rows of the weight as long as 120.
_TILES_N: Final = (96, 128, 160, 192, 224)
_LEAST_M: Final = 80
_LEAST_N: Final = 120
# Where few rows of x are best served by narrower tiles than that.
_TILE_N_OF_MANY: Final = 192
# Three groups are worth while with this width only: 129 to 192 rows of x then read the weight once, in 67 to 71 µs
# instead of 84.
_TILE_N_OF_THREE: Final = 224
# Of all multiprocessors, in µs: products, where tiles stick out of the result too; cuBLAS's products; bytes.
_PRODUCTS: Final = 385e6
_PRODUCTS_OF_CUBLAS: Final = 350e6
_BYTES: Final = 3.9e6
# Of the kernel for the activation, which follows cuBLAS's, beside the bytes that it reads and writes.
_LAUNCH_US: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a product is cut: macros of gated_linear.cu."""

    groups: int
    """1 to 3, of four warps: a tile has 64 rows of x for each."""
    tile_n: int
    """Rows of the weight of a tile: a multiple of 32 to 256."""

    @property
    def tile_m(self) -> int:
        """Rows of x of a tile."""
        return _GROUP_ROWS * self.groups

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.groups + 1)

    @property
    def x_box(self) -> tuple[int, int]:
        """Rows and columns that one copy brings."""
        return self.tile_m, _STEP

    @property
    def weight_box(self) -> tuple[int, int]:
        """Rows and columns that one copy brings."""
        return self.tile_n // 2, _STEP

    @property
    def stages(self) -> int:
        """Of the ring: as many as fit."""
        return (MAX_SHARED_BYTES - _ALIGNMENT) // (self._stage_bytes + _BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Of a block, with room to align it."""
        return self.stages * (self._stage_bytes + _BARRIER_BYTES) + _ALIGNMENT

    @property
    def _stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * _STEP * 2

    def variant(self, dtype: torch.dtype) -> Variant:
        """What is to be compiled."""
        defines = {
            "FLOAT16": int(dtype == torch.float16),
            "GROUPS": self.groups,
            "TILE_N": self.tile_n,
            "STAGES": self.stages,
        }
        return Variant(source="gated_linear.cu", defines=tuple(defines.items()))

    def tiles(self, m: int, n: int) -> int:
        """Of a result."""
        return -(-m // self.tile_m) * -(-2 * n // self.tile_n)

    def time(self, m: int, n: int, multiprocessors: int) -> int:
        """That the slowest multiprocessor takes: its products for one column of x."""
        waves = -(-self.tiles(m, n) // multiprocessors)
        return waves * max(self.tile_m, _LEAST_M) * max(self.tile_n, _LEAST_N)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether `gated_linear` takes `x` and `weight`.

    bfloat16 or float16, N and K multiples of 8, rows that begin at multiples of 16 bytes and whose elements lie
    together.
    """
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and len(x) > 0
        and x.shape[1] == weight.shape[1]
        and weight.shape[0] % 16 == 0
        and x.shape[1] % 8 == 0
        and _is_aligned(x)
        and _is_aligned(weight)
    )


@lru_cache(maxsize=4096)
def pays(m: int, n: int, k: int, *, multiprocessors: int) -> bool:
    """Whether `gated_linear` takes less time than cuBLAS and a kernel for the activation.

    It does unless much of the tiles sticks out of the result and products, not reading the weight, take the time: of
    LLaMA 3 8B not at M = 200, 264 and 392, for instance.
    """
    ours = plan(m, n, multiprocessors=multiprocessors).time(m, n, multiprocessors) * multiprocessors * k / _PRODUCTS
    cublas = max(2 * m * n * k / _PRODUCTS_OF_CUBLAS, 4 * n * k / _BYTES)
    return ours < cublas + _LAUNCH_US + 6 * m * n / _BYTES


def gated_linear(x: Tensor, weight: Tensor, *, tiling: Tiling | None = None) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, `[M, N]`, for x `[M, K]`; sums in float32, rounded once.

    `weight` `[2 * N, K]`: the rows of gate, then those of up. `tiling`: other than `plan`'s. Deterministic. All kernels
    for a weight are compiled at its first call: run once before capturing a CUDA graph. Raises `ValueError` if `serves`
    does not hold.
    """
    if not serves(x, weight):
        raise ValueError(
            f"x {list(x.shape)} {x.dtype} with strides {x.stride()}, weight {list(weight.shape)} {weight.dtype} with "
            f"strides {weight.stride()}: they must have the same K, N and K be multiples of 8, dtypes of 16 bits, "
            "rows begin at 16 bytes and their elements lie together"
        )
    (m, k), n, index = x.shape, weight.shape[0] // 2, x.device.index
    multiprocessors = num_processors(x.device)
    prepare(n, x.dtype, multiprocessors=multiprocessors, device_index=index)
    if tiling is None:
        tiling = plan(m, n, multiprocessors=multiprocessors)
    out = x.new_empty(m, n)
    args: tuple[Argument, ...] = (
        tensor_map(x, tiling.x_box),
        tensor_map(weight, tiling.weight_box),
        *(out, m, n, k),
    )
    load(tiling.variant(x.dtype), index).launch(
        args,
        grid=(min(tiling.tiles(m, n), multiprocessors), 1, 1),
        threads=tiling.threads,
        shared_bytes=tiling.shared_bytes,
    )
    return out


@lru_cache(maxsize=4096)
def plan(m: int, n: int, *, multiprocessors: int) -> Tiling:
    """The tiling that takes least time."""
    return min(tilings(n, multiprocessors=multiprocessors), key=lambda tiling: tiling.time(m, n, multiprocessors))


@lru_cache(maxsize=256)
def tilings(n: int, *, multiprocessors: int) -> tuple[Tiling, ...]:
    """Those that `plan` chooses from, of equals the first: two or three."""

    def time(tile_n: int) -> int:
        return Tiling(groups=1, tile_n=tile_n).time(1, n, multiprocessors)

    few = min(reversed(_TILES_N), key=time)
    shapes = [(3, few)] if few == _TILE_N_OF_THREE else []
    shapes += [(2, _TILE_N_OF_MANY)] if few < _LEAST_N else []
    shapes += [(2, few), (1, few)]
    return tuple(Tiling(groups=groups, tile_n=tile_n) for groups, tile_n in shapes)


def prepare(n: int, dtype: torch.dtype, *, multiprocessors: int, device_index: int) -> None:
    """Compile and load all kernels for a weight. Not cached as a whole: in `compile_ahead` nothing is loaded."""
    for variant in _variants(n, dtype, multiprocessors=multiprocessors):
        load(variant, device_index)


@lru_cache(maxsize=256)
def _variants(n: int, dtype: torch.dtype, *, multiprocessors: int) -> tuple[Variant, ...]:
    return tuple(tiling.variant(dtype) for tiling in tilings(n, multiprocessors=multiprocessors))


def _is_aligned(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0
