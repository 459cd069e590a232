"""What kernels compute besides attention, as plain torch on any device: the specification of all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

_tanh_gelu = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": functional.relu,
}
"""By their names in `config.json`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Norm:
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight over the last dimension, or LayerNorm; computed in float32."""

    weight: Tensor
    """`[size]`; in float32 where the model's dtype would not hold it (with `weight_in_float32`)."""
    bias: Tensor | None = None
    """`[size]`."""
    eps: float
    centred: bool = False
    """LayerNorm: the mean is subtracted first."""
    weight_in_float32: bool = False
    """Half precision is rounded only once, after the product with the weight. False (LLaMA and most RMSNorms): the
    quotient is rounded first."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RopeTables:
    """What each position's heads are turned by.

    Dimension i < r of a head becomes `x[i] * cos[i] + x[partner(i)] * sin[i]`; the others stay.
    """

    cos: Tensor
    """`[P, r]` for positions 0 to P, in the model's dtype."""
    sin: Tensor
    """`[P, r]`, with the sign that dimension i needs."""
    interleaved: bool
    """Partners are (2i, 2i + 1) instead of (i, i + r / 2)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heads:
    """What happens to query and key heads between projection and attention, in the order of the fields.

    Symbols: H query heads, K KV heads, D head size.
    """

    num_heads: int
    """H."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """D."""
    query_norm: Norm | None = None
    """Of each query head."""
    key_norm: Norm | None = None
    """Of each key head."""
    rope: RopeTables | None = None


def norm(x: Tensor, of: Norm) -> Tensor:
    """`[..., size]` -> the same shape, a new tensor."""
    size = of.weight.shape
    if of.centred:
        return functional.layer_norm(x, size, of.weight, of.bias, of.eps)
    if of.weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), size, of.weight, of.eps).to(x.dtype)
    if of.weight_in_float32 or x.dtype == torch.float32:
        return functional.rms_norm(x, size, of.weight, of.eps)
    return functional.rms_norm(x, size, None, of.eps).mul_(of.weight)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Turn `heads` [T, any, D] in place. `cos`, `sin`: rows of `RopeTables` for the T tokens, [T, 1, r]."""
    dim = cos.shape[-1]
    rotated = heads if heads.shape[-1] == dim else heads[..., :dim]
    if interleaved:
        partner = rotated.view(*rotated.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partner = torch.roll(rotated, dim // 2, -1)
    rotated.mul_(cos).addcmul_(partner, sin)


def resolve(token_ids: Tensor, previous: Tensor) -> Tensor:
    """`token_ids` [T], a negative id -1 - i standing for `previous[i]`."""
    rows = token_ids.bitwise_not().clamp_min_(0)  # ~id is -1 - id
    return torch.where(token_ids < 0, previous.index_select(0, rows), token_ids)
