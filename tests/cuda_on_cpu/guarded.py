"""Memory next to pages that may not be touched: a kernel that reads or writes beside a tensor ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 16
_NO_ACCESS: Final = 0


@contextmanager
def guarded(tensors: Sequence[Tensor], *, before: bool) -> Iterator[list[int]]:
    """Addresses of copies of `tensors`, which get what the copies hold at the end.

    Forbidden is the page behind each copy, from the next multiple of 16 bytes on; `before`: the page before it. Tensors
    that begin at the same place share a copy.
    """
    copies: dict[int, tuple[Tensor, mmap.mmap, int]] = {}
    for tensor in tensors:
        if tensor.data_ptr() not in copies:
            copies[tensor.data_ptr()] = (_span(tensor), *_memory(_span(tensor).nbytes, before))
    for span, _, address in copies.values():
        ctypes.memmove(address, span.data_ptr(), span.nbytes)
    yield [copies[tensor.data_ptr()][2] for tensor in tensors]
    for span, _, address in copies.values():
        ctypes.memmove(span.data_ptr(), address, span.nbytes)


def _span(tensor: Tensor) -> Tensor:
    """All between the first and the last element, which may lie apart."""
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    length = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (length,), (1,))


def _memory(num_bytes: int, before: bool) -> tuple[mmap.mmap, int]:
    page = mmap.PAGESIZE
    rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    pages = -(-rounded // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    forbidden = start if before else start + pages * page
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(page), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    return memory, start + page if before else start + pages * page - rounded
