"""Compiling many kernels at once, before any of them is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton.runtime.jit
from triton.runtime._async_compile import AsyncCompileMode

_MOST_THREADS = 16


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Launches inside do not run: what they need is compiled, side by side, and ready at the end.

    Only for one thread at a time, and not in the interpreter. Most of a compilation lets other threads run.
    """
    interface = triton.runtime.jit.KernelInterface
    launch = interface.__getitem__

    def compile_only(kernel: Any, grid: object) -> Callable[..., object]:
        return partial(kernel.run, grid=grid, warmup=True)

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool, AsyncCompileMode(pool):
        interface.__getitem__ = compile_only
        try:
            yield
        finally:
            interface.__getitem__ = launch
