"""The random numbers of sampling: a function of a key and a token id, with no state.

A row's draw is the token with the greatest `logit / temperature - log(E)`, where the E of its tokens are independent
and exponentially distributed with mean 1 (the Gumbel-max trick: softmax probabilities, without a sum). E depends on
the row's key, which the Rust core derives from (seed, output position), and on the token id alone. So a request's
tokens do not depend on its batch, on the order of the tokens in memory, or on the kernel that draws.
"""

from __future__ import annotations

import torch
from torch import Tensor


def noise_bits(key0: Tensor, key1: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits for each (row, token): [N, K] int32, to be read as unsigned.

    `key0`, `key1` [N] int32: the rows' keys. `token_ids` int32 [K], the same for all rows, or [N, K].

    This is the specification for every kernel that samples. In unsigned 32-bit arithmetic that wraps around:

        x = token * 0x9E3779B1 + key0
        x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= key1
        x ^= x >> 13;  x *= 0xC2B2AE35
        x ^= x >> 16
    """
    # torch multiplies int32 modulo 2^32; its right shift is arithmetic, so the sign bits are masked off.
    bits = token_ids * _signed(0x9E3779B1) + key0[:, None]
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= _signed(0x85EBCA6B)
    bits ^= key1[:, None]
    bits ^= (bits >> 13).bitwise_and_(0x7FFFF)
    bits *= _signed(0xC2B2AE35)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def log_exponential(key0: Tensor, key1: Tensor, token_ids: Tensor) -> Tensor:
    """log(E) for each (row, token): [N, K] float32, always finite. Arguments as for `noise_bits`.

    Specification, in float32, with x of `noise_bits`:

        v = min((x + 0.5) * 2^-32, 1 - 2^-24)
        E = -log1p(-v)

    Small E win draws, so v is exact to float32's relative precision near 0 and coarse near 1. The upper limit keeps E
    finite where the conversion to float32 rounds v to 1: even then a token that may be drawn scores above one that
    may not. Kernels may differ by rounding, not in v; some compare exp(score) = exp(logit / temperature) / E.
    """
    bits = noise_bits(key0, key1, token_ids)
    v = bits.view(torch.uint32).float().mul_(2.0**-32).add_(2.0**-33).clamp_max_(1 - 2.0**-24)
    # -log1p(-v) = v * r, r = log(u) / (u - 1), u = 1 - v: within 2e-7 of the true value (u - 1 is exactly what the
    # rounding of u left) and 10 times faster than log1p on a CPU. Below 2^-22, r is 1 to float32's precision.
    u = v.clamp_min(2.0**-22).neg_().add_(1)
    ratio = u.log().div_(u.sub_(1))
    return v.mul_(ratio).log_()


def _signed(word: int) -> int:
    """The int32 of the same bits as an unsigned 32-bit word."""
    return word - (word >> 31 << 32)
