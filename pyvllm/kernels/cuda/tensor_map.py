"""What the copy engine must know of a tensor to copy boxes of it: `copy_box` of hopper.cuh.

Not by cuda-bindings, whose CUtensorMap lies at multiples of 16 bytes, while the driver asks for 64.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any, Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 64
# Values of the driver's enumerations.
_DATA_TYPES: Final = {torch.float16: 6, torch.bfloat16: 9}
_NO_INTERLEAVE: Final = 0
_SWIZZLE_128_BYTES: Final = 3
_PROMOTE_TO_256_BYTES: Final = 3
_ZEROS_OUTSIDE: Final = 0


class TensorMap(ctypes.Structure):
    """The driver's CUtensorMap."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> TensorMap:
    """For boxes of the shape `box`, whose last dimension is 64, into swizzled rows of 128 bytes.

    `tensor`: bfloat16 or float16 on a GPU, of 2 to 5 dimensions, of which the last is contiguous and the others begin
    at multiples of 16 bytes, as the tensor does. The map holds its address, and does not keep it alive. Raises
    `ValueError` if the driver refuses it.
    """
    return _encode(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, box)


@lru_cache(maxsize=4096)
def _encode(
    address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]
) -> TensorMap:
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _ALIGNMENT)
    encoded = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)
    rank = len(shape)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(encoded),
        ctypes.c_int(_DATA_TYPES[dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*(2 * step for step in reversed(stride[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLE_128_BYTES),
        ctypes.c_int(_PROMOTE_TO_256_BYTES),
        ctypes.c_int(_ZEROS_OUTSIDE),
    )
    if status:
        raise ValueError(
            f"error {status} for a tensor of shape {shape}, stride {stride} and {dtype}, in boxes of {box}"
        )
    return encoded


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
