"""The table of kernels: which implementation serves a device and dtype.

Each is tested against `reference`, which is plain torch and runs anywhere. A hand-written implementation (CUDA, Triton,
native CPU code) is one more line of `_TABLE` above those it is preferred to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from pyvllm.kernels.cpu import CpuKernels
from pyvllm.kernels.interface import AnyKernels, Attention, Kernels, LinearFunction
from pyvllm.kernels.plain import ACTIVATIONS, Heads, Norm, RopeTables
from pyvllm.kernels.reference import ReferenceKernels

__all__ = [
    "ACTIVATIONS",
    "AnyKernels",
    "Attention",
    "Heads",
    "Kernels",
    "LinearFunction",
    "Norm",
    "RopeTables",
    "select",
]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    make: Callable[[], AnyKernels]
    devices: tuple[str, ...] | None
    """Device types it runs on; None: all."""
    dtypes: tuple[torch.dtype, ...]


_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
# In order of preference.
_TABLE: Final = {
    "cpu": _Entry(make=CpuKernels, devices=("cpu",), dtypes=_FLOATS),
    "reference": _Entry(make=ReferenceKernels, devices=None, dtypes=_FLOATS),
}


def select(device: torch.device, dtype: torch.dtype) -> AnyKernels:
    """The best kernels for a device and dtype, or those that the environment variable PYVLLM_KERNELS names.

    Raises `ValueError` if there are none, or if the named ones are unknown or do not fit.
    """
    fitting = [
        name
        for name, entry in _TABLE.items()
        if (entry.devices is None or device.type in entry.devices) and dtype in entry.dtypes
    ]
    wanted = os.environ.get("PYVLLM_KERNELS") or next(iter(fitting), None)
    if wanted not in fitting:
        what = f"PYVLLM_KERNELS is {wanted!r}" if wanted else "there are no kernels"
        raise ValueError(f"{what}; for {device.type} and {dtype} there are: {', '.join(fitting) or 'none'}")
    return _TABLE[wanted].make()
