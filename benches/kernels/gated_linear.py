"""The gated linear layer for many rows beside cuBLAS and a kernel for the activation.

Timed as in `gemv.py`. `python -m benches.kernels.gated_linear [--sweep] [--rows 64 256]`
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from benches.kernels.timing import Row, print_rows, time_chain
from pyvllm.kernels.cuda.gated_linear import gated_linear, pays, plan, tilings
from pyvllm.kernels.cuda.kernels import CudaKernels
from pyvllm.kernels.triton.attention_config import num_processors

PEAK_TFLOPS: Final = 790
"""Of one H200, measured by cuBLAS with large matrices."""
SHAPES: Final = {"8b gate_up": (14336, 4096), "7b gate_up": (18944, 3584), "0.6b gate_up": (3072, 1024)}
"""N, K."""
ROWS: Final = (17, 64, 128, 192, 200, 256, 320, 512, 1000, 2048, 8192)
# Several times the 60 MB of a level 2 cache.
_BYTES: Final = 400 * 2**20


def cases(rows: tuple[int, ...] = ROWS) -> list[Row]:
    """One line for each shape and number of rows: µs and share of the peak of ours, µs of the others, `pays`."""
    return [_case(name, m, n, k) for name, (n, k) in SHAPES.items() for m in rows]


def _case(name: str, m: int, n: int, k: int) -> Row:
    weights, x = _weights(n, k), _random(m, k)
    kernels = CudaKernels()

    def separate(weight: Tensor) -> Tensor:
        return kernels.gated(functional.linear(x, weight), "silu")

    ours = time_chain([partial(gated_linear, x, weight) for weight in weights])
    product = time_chain([partial(functional.linear, x, weight) for weight in weights])
    both = time_chain([partial(separate, weight) for weight in weights])
    percent = 4 * m * n * k / ours * 1e-6 / PEAK_TFLOPS * 100
    return {
        "case": name, "shape": f"{m}x{n}x{k}", "us": round(ours, 1), "percent": round(percent, 1),
        "cublas_us": round(product, 1), "with_gated_us": round(both, 1), "with_gated_over_ours": round(both / ours, 3),
        "chosen": int(pays(m, n, k, multiprocessors=num_processors(x.device))),
    }  # fmt: skip


def sweep(rows: tuple[int, ...] = ROWS) -> list[Row]:
    """All tilings; the one that `plan` chooses is marked."""
    lines: list[Row] = []
    for name, (n, k) in SHAPES.items():
        weights = _weights(n, k)
        for m in rows:
            x = _random(m, k)
            for tiling in tilings(n, multiprocessors=num_processors(x.device)):
                us = time_chain([partial(gated_linear, x, w, tiling=tiling) for w in weights])
                chosen = tiling == plan(m, n, multiprocessors=num_processors(x.device))
                lines.append({"case": name, "m": m, "us": round(us, 1), "tiling": str(tiling), "chosen": int(chosen)})
    return lines


def _weights(n: int, k: int) -> list[Tensor]:
    return [_random(2 * n, k) * k**-0.5 for _ in range(max(2, _BYTES // (4 * n * k)))]


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="all tilings of ours")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows of x")
    args = parser.parse_args()
    print_rows(sweep(tuple(args.rows)) if args.sweep else cases(tuple(args.rows)))
