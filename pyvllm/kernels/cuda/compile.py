"""From a `.cu` file of this folder to a kernel that can be launched.

NVRTC and the driver are reached through cuda-bindings, on which torch's CUDA wheels depend: nothing is to be installed.
The sources include no headers but those beside them, so the toolkit's are not needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from pyvllm.hub import cache_root
from pyvllm.kernels.cuda.tensor_map import TensorMap
from pyvllm.logging import logger

try:
    from cuda.bindings import driver, nvrtc  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:  # torch without CUDA
    driver = nvrtc = None

ARCHITECTURE: Final = "sm_90a"
"""Hopper."""
MAX_SHARED_BYTES: Final = 227 * 1024
"""Shared memory that one block may have there; a multiprocessor has 228 KiB, 1 KiB of which each block takes."""

Argument: TypeAlias = Tensor | TensorMap | int | float | None
"""Of a kernel: a tensor's address (None: null), its map by value, `int` for C's int, `float` for C's float."""

_MOST_THREADS: Final = 16
_FOLDER: Final = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compilation of one source: all that its cubin depends on, but for the compiler."""

    source: str
    """Name of a `.cu` file in this folder; its one kernel has the name without `.cu`."""
    defines: tuple[tuple[str, int], ...]
    """Macros with their values."""


class CompileError(RuntimeError):
    """NVRTC refused a source. The message is its log."""


def missing() -> str | None:
    """What keeps kernels from being compiled in this environment, for a log line; None: nothing does."""
    if nvrtc is None:
        return "the package cuda-bindings is not installed"
    try:
        _checked(nvrtc.nvrtcVersion())
    except RuntimeError as error:  # its loader's own error is one
        return f"NVRTC cannot be loaded: {error}"
    return None


def compile_cubin(variant: Variant) -> bytes:
    """The variant as machine code, from the cache if it is there. Needs no GPU.

    Raises `CompileError`.
    """
    files = [_FOLDER / variant.source, *sorted(_FOLDER.glob("*.cuh"))]
    texts = {path.name: path.read_text() for path in files}
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in variant.defines]
    version = _checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((texts, options, version)).encode()).hexdigest()
    path = cache_root() / "cubins" / f"{Path(variant.source).stem}-{key[:32]}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = _compile(variant.source, texts, options)
        _write(path, cubin)
    return cubin


def _compile(name: str, texts: Mapping[str, str], options: Sequence[str]) -> bytes:
    headers = [header for header in texts if header != name]
    (program,) = _checked(
        nvrtc.nvrtcCreateProgram(
            texts[name].encode(),
            name.encode(),
            len(headers),
            [texts[header].encode() for header in headers],
            [header.encode() for header in headers],
        )
    )
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
            log = bytearray(size)
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise CompileError(f"{name} with {' '.join(options)}: {log.decode(errors='replace').rstrip(chr(0))}")
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytearray(size)
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


# --- the cache: a file is the SHA-256 of a cubin, then the cubin ------------------------------------------------------


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:32], data[32:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    """Atomically; several processes may write the same file. A cache that cannot be written is done without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        Path(file.name).replace(path)
    except OSError as error:
        logger.debug("no cache for compiled kernels: %s", error)


# --- launching --------------------------------------------------------------------------------------------------------


class Kernel:
    """A kernel on one device."""

    def __init__(self, variant: Variant, device_index: int) -> None:
        """Compile and load it. Raises `CompileError`, or `RuntimeError` with the driver's word on what failed."""
        cubin = compile_cubin(variant)
        _checked(driver.cuInit(0))
        # A library belongs to no context: the stream of a launch decides where it runs.
        (self._library,) = _checked(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        name = Path(variant.source).stem.encode()
        (kernel,) = _checked(driver.cuLibraryGetKernel(self._library, name))
        (device,) = _checked(driver.cuDeviceGet(device_index))
        attribute = driver.CUfunction_attribute
        limits = {
            attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: MAX_SHARED_BYTES,
            # Kernels that follow each other wait if the split between cache and shared memory has to change.
            attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: 100,
        }
        for limit, value in limits.items():
            _checked(driver.cuKernelSetAttribute(limit, value, kernel, device))
        self._function = driver.CUfunction(int(kernel))
        self._device_index = device_index

    def launch(
        self,
        args: Sequence[Argument],
        *,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int = 0,
        overlap: bool = True,
    ) -> None:
        """Start it on torch's current stream of the device; a CUDA graph that is being captured takes it in.

        `threads`: of a block. `overlap`: it may begin before the kernel that precedes it has ended (programmatic
        dependent launch), so it must wait, by `wait_for_previous_kernel`, before it touches anything that kernel may
        read or write.
        """
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(self._device_index).cuda_stream
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = zip(*(_packed(arg) for arg in args), strict=True)
        _checked(driver.cuLaunchKernelEx(config, self._function, (values, types), 0))


def load(variant: Variant, device_index: int) -> Kernel:
    """The kernel. Must have been called before a graph that launches it is captured.

    Inside `compile_ahead` it is only noted, and launching it does nothing.
    """
    noted = _noted.get()
    if noted is None:
        return _loaded(variant, device_index)
    noted(variant)
    return _NotLaunched()


@cache
def _loaded(variant: Variant, device_index: int) -> Kernel:
    return Kernel(variant, device_index)


class _NotLaunched(Kernel):
    def __init__(self) -> None:
        """Neither compiled nor loaded."""

    def launch(
        self,
        args: Sequence[Argument],
        *,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int = 0,
        overlap: bool = True,
    ) -> None:
        """Does nothing."""


_noted: ContextVar[Callable[[Variant], object] | None] = ContextVar("_noted", default=None)


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Kernels that are loaded inside do not run: they are compiled, side by side, and in the cache at the end."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        started: dict[Variant, Future[bytes]] = {}

        def start(variant: Variant) -> None:
            if variant not in started:
                started[variant] = pool.submit(compile_cubin, variant)

        token = _noted.set(start)
        try:
            yield
        finally:
            _noted.reset(token)
        for compilation in started.values():
            compilation.result()


def _packed(arg: Argument) -> tuple[Any, Any]:
    if isinstance(arg, Tensor):
        return arg.data_ptr(), ctypes.c_void_p
    if isinstance(arg, float):
        return arg, ctypes.c_float
    if isinstance(arg, TensorMap):
        return arg, None  # all of it
    return (0, ctypes.c_void_p) if arg is None else (arg, ctypes.c_int)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of cuda-bindings returned, without its status. Raises `RuntimeError` if that is none of success."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{status.name} ({int(status)})")
    return tuple(values)
