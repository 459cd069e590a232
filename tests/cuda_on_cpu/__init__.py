"""The CUDA kernels' own sources, compiled for the CPU by a C++ compiler and run one fiber a CUDA thread."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from pyvllm.kernels.cuda.compile import Argument, Variant
from pyvllm.kernels.cuda.tensor_map import TensorMap
from tests.cuda_on_cpu.guarded import guarded

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[2] / "pyvllm" / "kernels" / "cuda"
COMPILER = shutil.which("g++") or shutil.which("clang++")


@cache
def _library(variant: Variant) -> ctypes.CDLL:
    assert COMPILER is not None
    name = hashlib.sha256(repr(variant).encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.so"
        macros = [f"-D{key}={value}" for key, value in variant.defines]
        macros += [f"-DSOURCE=<{variant.source}>", f"-DKERNEL={Path(variant.source).stem}"]
        flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-w", f"-I{HERE}", f"-I{SOURCES}"]
        command = [COMPILER, *flags, *macros, str(HERE / "run.cpp"), "-o", str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return ctypes.CDLL(str(path))


def tensor_map(tensor: Tensor, box: Sequence[int]) -> TensorMap:
    """What `pyvllm.kernels.cuda.tensor_map` makes, for the copy engine of `hopper.cuh` beside this."""
    rest = [0] * (5 - tensor.dim())
    words = [
        tensor.data_ptr(),
        *reversed(tensor.shape),
        *rest,
        *(2 * step for step in reversed(tensor.stride())),
        *rest,
        *(low | high << 32 for low, high in zip(*[iter([*reversed(box), *rest, 0])] * 2, strict=True)),
    ]
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    encoded = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 64)
    encoded.words[: len(words)] = words
    return encoded


def launch(
    variant: Variant,
    args: Sequence[Argument],
    *,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    late: bool,
) -> None:
    """As `Kernel.launch`, with tensors of the CPU. `late`: asynchronous copies happen when they are waited for.

    A kernel that touches what lies behind a tensor, if `late` what lies before it, ends the process.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    with guarded(tensors, before=late) as starts:
        rest = iter(starts)
        values: list[ctypes._SimpleCData | TensorMap] = []
        for arg in args:
            if isinstance(arg, Tensor):
                values.append(ctypes.c_void_p(next(rest)))
            elif isinstance(arg, float):
                values.append(ctypes.c_float(arg))
            elif isinstance(arg, TensorMap):
                values.append(arg)
            else:
                values.append(ctypes.c_void_p(0) if arg is None else ctypes.c_int(arg))
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        _library(variant).launch(*grid, threads, shared_bytes, addresses, late)
