"""The skinny matrix product beside cuBLAS on one GPU, in one run.

A CUDA graph of many launches, one for each of enough copies of the weights that no cache can serve them, is replayed;
a launch's time is the graph's by their number, so gaps between kernels count. With overlap, as in a model, a kernel
begins before the one before it has ended. `python -m benches.kernels.gemv [--sweep]`
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from benches.kernels.timing import Row, memory_row, print_rows, time_chain
from pyvllm.kernels.cuda.compile import MAX_SHARED_BYTES, Variant, load
from pyvllm.kernels.cuda.linear import Launch, plan_launch, skinny_linear, supports
from pyvllm.kernels.plain import Norm

SHAPES: Final = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head": (128256, 4096),
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
}
"""N, K."""
# Several times the 60 MB of a level 2 cache.
_BYTES: Final = 400 * 2**20
_MAX_COPIES: Final = 100


def cases(rows: tuple[int, ...] = (1, 2, 4, 8)) -> list[Row]:
    """One line for each shape and number of rows: µs and share of the peak, of ours, fused and not, and of cuBLAS."""
    return [_case(name, m, n, k) for name, (n, k) in SHAPES.items() for m in rows if _served(m, n, k)]


def _served(m: int, n: int, k: int) -> bool:
    return supports(m, n, k, torch.bfloat16)


def _case(name: str, m: int, n: int, k: int) -> Row:
    weights, x = _weights(n, k), torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
    norm = Norm(weight=torch.ones(k, device="cuda", dtype=torch.bfloat16), eps=1e-6, weight_in_float32=False)
    ours = time_chain([partial(skinny_linear, x, w) for w in weights])
    row = _measured(name, m, n, k, ours)
    row["norm_us"] = round(time_chain([partial(skinny_linear, x, w, norm=norm) for w in weights]), 2)
    row["residual_us"] = round(time_chain([partial(skinny_linear, x, w, residual=out) for w in weights]), 2)
    if "gate_up" in name:
        fused = [partial(skinny_linear, x, w, norm=norm, gated=True) for w in weights]
        row["norm_gated_us"] = round(time_chain(fused), 2)
    cublas = time_chain([partial(functional.linear, x, w) for w in weights])
    return row | {"cublas_us": round(cublas, 2), "cublas_over_ours": round(cublas / ours, 3)}


def sweep(rows: tuple[int, ...] = (1,)) -> list[Row]:
    """Other sizes of the ring, numbers of warps and tiles than `plan_launch` chooses; and without overlap."""
    lines = []
    for name, (n, k) in SHAPES.items():
        weights = _weights(n, k)
        for m in rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            for tile_rows in (8, 16):
                for warps, ring_kib in ((8, 64), (8, 96), (8, 128), (4, 96), (16, 96), (16, 128)):
                    launch = _launch(m, n, k, tile_rows, warps, ring_kib * 1024)
                    if launch.shared_bytes > MAX_SHARED_BYTES:
                        continue
                    for overlap in (True, False):
                        us = time_chain([_start(launch, x, w, out, overlap) for w in weights])
                        line = _measured(name, m, n, k, us)
                        lines.append(line | {"rows": tile_rows, "warps": warps, "ring": ring_kib, "pdl": int(overlap)})
    return lines


def _launch(m: int, n: int, k: int, tile_rows: int, warps: int, ring_bytes: int) -> Launch:
    plan = plan_launch(m, n, k, torch.bfloat16, norm=0, gated=False, multiprocessors=_multiprocessors())
    stages = ring_bytes // (tile_rows * 128 * warps)
    changed = {"ROWS": tile_rows, "WARPS": warps, "STAGES": stages}
    defines = tuple((dict(plan.variant.defines) | changed).items())
    sums = 4 * warps * (8 if m <= 8 else 16) * 41
    return dataclasses.replace(
        plan,
        variant=Variant(source=plan.variant.source, defines=defines),
        blocks=min(_multiprocessors(), -(-n // tile_rows)),
        threads=32 * warps,
        shared_bytes=ring_bytes + sums + 2 * m * (k + 32),
    )


def _start(launch: Launch, x: Tensor, weight: Tensor, out: Tensor, overlap: bool) -> Callable[[], None]:
    m, n = len(x), len(weight)
    kernel = load(launch.variant, 0)
    args = (x, weight, None, None, None, out, x.stride(0), m, n, 0.0)
    grid = (launch.blocks, 1, 1)

    def start() -> None:
        kernel.launch(args, grid=grid, threads=launch.threads, shared_bytes=launch.shared_bytes, overlap=overlap)

    return start


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _weights(n: int, k: int) -> list[Tensor]:
    copies = max(2, min(_MAX_COPIES, -(-_BYTES // (2 * n * k))))
    return [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]


def _measured(name: str, m: int, n: int, k: int, us: float) -> Row:
    return memory_row(name, f"{m}x{n}x{k}", 2 * n * k, us)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other launches of ours instead of cuBLAS")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="rows of x")
    args = parser.parse_args()
    print_rows(sweep(tuple(args.rows)) if args.sweep else cases(tuple(args.rows)))
