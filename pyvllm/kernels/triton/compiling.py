"""Compiling many kernels at once, before any of them is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton.runtime.jit
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel

_MOST_THREADS = 16


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Launches inside do not run: what they need is compiled, side by side, and ready at the end.

    Only for one thread at a time, and not in the interpreter. Most of a compilation lets other threads run.
    """
    interface = triton.runtime.jit.KernelInterface
    launch = interface.__getitem__
    kernels: set[Any] = set()

    def compile_only(kernel: Any, grid: object) -> Callable[..., object]:
        def run(*args: object, **options: object) -> None:
            kernels.add(kernel.run(*args, grid=grid, warmup=True, **options))

        return run

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        with AsyncCompileMode(pool):
            interface.__getitem__ = compile_only
            try:
                yield
            finally:
                interface.__getitem__ = launch
        # Each kernel has a launcher in C, which a compiler builds when the kernel is first looked at: seconds in all.
        list(pool.map(_load, kernels - {None}))


def _load(kernel: Any) -> None:
    _ = (kernel.result() if isinstance(kernel, FutureKernel) else kernel).run
