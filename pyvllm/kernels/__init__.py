"""The table of kernels: which implementation serves a device and dtype.

Each is tested against `reference`, which is plain torch and runs anywhere. A hand-written implementation (CUDA, Triton,
native CPU code) is one more line of `_TABLE` above those it is preferred to.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from pyvllm.kernels.cpu import CpuKernels
from pyvllm.kernels.interface import AnyKernels, Attention, Kernels, LinearFunction
from pyvllm.kernels.plain import ACTIVATIONS, Heads, Norm, RopeTables
from pyvllm.kernels.plain_sampling import LogprobRows
from pyvllm.kernels.reference import ReferenceKernels

__all__ = [
    "ACTIVATIONS",
    "AnyKernels",
    "Attention",
    "Heads",
    "Kernels",
    "LinearFunction",
    "LogprobRows",
    "Norm",
    "RopeTables",
    "select",
]


logger = logging.getLogger("pyvllm")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    make: Callable[[], AnyKernels]
    devices: tuple[str, ...] | None
    """Device types it runs on; None: all."""
    dtypes: tuple[torch.dtype, ...]
    reason_against: Callable[[torch.device], str | None] = lambda device: None
    """What is missing on a device of a fitting type; None: nothing is."""


_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def _cuda() -> AnyKernels:
    from pyvllm.kernels.cuda.kernels import CudaKernels

    return CudaKernels()


def _against_cuda(device: torch.device) -> str | None:
    from pyvllm.kernels.cuda.kernels import reason_against

    return reason_against(device)


def _triton() -> AnyKernels:
    from pyvllm.kernels.triton.kernels import TritonKernels  # Imports triton, which torch for CPUs comes without.

    return TritonKernels()


def _against_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere (compute capability 8.0)"
    return None


# In order of preference.
_TABLE: Final = {
    "cuda": _Entry(make=_cuda, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16), reason_against=_against_cuda),
    "triton": _Entry(make=_triton, devices=("cuda",), dtypes=_FLOATS, reason_against=_against_triton),
    "cpu": _Entry(make=CpuKernels, devices=("cpu",), dtypes=_FLOATS),
    "reference": _Entry(make=ReferenceKernels, devices=None, dtypes=_FLOATS),
}


def select(device: torch.device, dtype: torch.dtype) -> AnyKernels:
    """The best kernels for a device and dtype, or those that the environment variable PYVLLM_KERNELS names.

    Raises `ValueError` if there are none, or if the named ones are unknown or do not fit.
    """
    fitting = []
    for name, entry in _TABLE.items():
        if (entry.devices is not None and device.type not in entry.devices) or dtype not in entry.dtypes:
            continue
        if reason := entry.reason_against(device):
            logger.info("kernels %s are not used on %s: %s", name, device, reason)
            continue
        fitting.append(name)
    wanted = os.environ.get("PYVLLM_KERNELS") or next(iter(fitting), None)
    if wanted not in fitting:
        what = f"PYVLLM_KERNELS is {wanted!r}" if wanted else "there are no kernels"
        raise ValueError(f"{what}; for {device.type} and {dtype} there are: {', '.join(fitting) or 'none'}")
    return _TABLE[wanted].make()
