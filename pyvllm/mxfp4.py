"""Weights in MXFP4, expanded when they are read: 4-bit numbers, each 32 of them with an exponent of their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pyvllm.checkpoint import StoredTensor, WeightError

_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of a sign bit and three bits for the value."""
_EXPONENT_BIAS: Final = 127


def expand_mxfp4(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Each pair `X_blocks` `[…, R, G, 16]` and `X_scales` `[…, R, G]` as one tensor `X` `[…, 32 * G, R]`, in bfloat16.

    Others stay. Raises WeightError naming one of a pair whose other is missing or does not fit.
    """
    expanded = {}
    for name, tensor in tensors.items():
        if name.endswith("_scales") and tensor.dtype == "U8":
            if name.removesuffix("_scales") + "_blocks" not in tensors:
                raise WeightError(f"{tensor.file}: {name!r} are scales without blocks")
        elif name.endswith("_blocks") and tensor.dtype == "U8":
            stem = name.removesuffix("_blocks")
            scales = tensors.get(f"{stem}_scales")
            if scales is None or tensor.shape != (*scales.shape, 16):
                found = None if scales is None else list(scales.shape)
                raise WeightError(f"{tensor.file}: {name!r} is {list(tensor.shape)}, but its scales are {found}")
            *outer, rows, groups, _ = tensor.shape
            expanded[stem] = StoredTensor(
                shape=(*outer, 32 * groups, rows),
                dtype="bfloat16",
                file=tensor.file,
                read=partial(_read, tensor, scales),
            )
        else:
            expanded[name] = tensor
    return expanded


def _read(blocks: StoredTensor, scales: StoredTensor) -> Tensor:
    """Every byte holds two numbers, the first in its lower half. bfloat16 holds every value exactly."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # [256, 2]
    numbers = pairs[blocks.read().int()].flatten(-2)  # […, R, G, 32]
    exponents = scales.read().int()[..., None] - _EXPONENT_BIAS
    return torch.ldexp(numbers.float(), exponents).to(torch.bfloat16).flatten(-2).transpose(-1, -2)
