"""Programmatic dependent launch: a kernel begins while the one before it still runs, so that its launch, and what it
does first, takes no time. NVIDIA GPUs have it from Hopper on; elsewhere, and in the interpreter, nothing here acts.

A program of a kernel that is launched with `launch_options` calls `wait_for_previous` before it touches what any kernel
of the step writes, or writes what any reads. In every launch some program does, so that the end of a kernel implies the
end of all before it. Before it waits a program may read weights, and what was there at the last launch without these
options, which begins when all before it has ended. A step's embedding is such a launch: behind it, plans may be read
without waiting.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.constexpr_function
def is_available() -> bool:
    """Whether the GPU that kernels are compiled for has it, if they are compiled."""
    return not triton.knobs.runtime.interpret and cuda_capability_geq(9)


@cache
def launch_options() -> dict[str, Any]:
    """Of a launch, beside its constants."""
    return {"launch_pdl": True} if is_available() else {}


@triton.jit
def allow_next() -> None:
    """The next kernel may begin once all programs have called this, or ended."""
    if is_available():
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous() -> None:
    """Wait until all kernels before this one have ended and what they wrote can be seen."""
    if is_available():
        tl.extra.cuda.gdc_wait()
