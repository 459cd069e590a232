"""Rotary position embedding.

Symbols: r rotated dimensions of a head (the first ones), P positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pyvllm.kernels import RopeTables

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Which angles positions are turned by. Fields after `interleaved` count for some types only."""

    rope_type: str = "default"
    """One of `ROPE_TYPES`."""
    theta: float
    """Dimension pair i of r / 2 turns by position * theta^(-2i / r), scaled as the type says."""
    dim: int
    """r; even."""
    interleaved: bool = False
    """Pairs are (2i, 2i + 1) instead of (i, i + r / 2)."""
    factor: float = 1.0
    """How much longer texts get than those of training."""
    trained_len: int = 0
    """Positions of training: where stretching begins."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """llama3: wavelengths above trained_len / low are stretched, those below trained_len / high are not."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn: dimensions with more turns than `beta_fast` in `trained_len` are kept, those with fewer than `beta_slow`
    stretched."""
    truncate: bool = True
    """yarn: round the bounds between those to whole dimensions."""
    attention_factor: float = 1.0
    """yarn, longrope: multiplies sine and cosine."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope: how much slower each pair turns, where texts are at most `trained_len` long and where they are not."""


def inverse_frequencies(rope: RopeSpec, num_positions: int = 1) -> Tensor:
    """Radians per position of each pair, for positions 0 to P: [P, r / 2] float32, or [1, r / 2] if all are alike.

    Computed in float32 as transformers does, so that angles are the same even where they are large.
    """
    if rope.rope_type == "dynamic":
        return _dynamic(rope, num_positions)
    plain = _plain(torch.tensor([[rope.theta]]), rope.dim)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, plain)
    if rope.rope_type == "longrope":
        # One choice for all: keys are kept from step to step, and must fit queries of later ones.
        return plain / torch.tensor(rope.short_factors if num_positions <= rope.trained_len else rope.long_factors)
    return plain


def _plain(theta: Tensor, dim: int) -> Tensor:
    inverse: Tensor = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    return inverse


def _dynamic(rope: RopeSpec, num_positions: int) -> Tensor:
    """A token that makes the text longer than in training is turned for that length, all before it as in training.

    This is what transformers does when it generates token by token. A token's angles then depend on its position alone:
    neither on how a prompt is cut into steps, nor on which request computed a cached prefix.
    """
    length = torch.arange(1, num_positions + 1).double().clamp_min(rope.trained_len)
    stretch = rope.factor * length / rope.trained_len - (rope.factor - 1)
    theta = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
    return _plain(theta.float()[:, None], rope.dim)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.trained_len / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength < rope.trained_len / high, plain, between)
    return torch.where(wavelength > rope.trained_len / low, plain / rope.factor, scaled)


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    def dimension(turns: float) -> float:
        return rope.dim * math.log(rope.trained_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(rope.dim // 2).float() - low) / (high - low)).clamp_(0, 1)
    return plain / rope.factor * (1 - kept) + plain * kept


def rope_tables(rope: RopeSpec, *, num_positions: int, dtype: torch.dtype, device: torch.device) -> RopeTables:
    """Tables of the angles of every position below `num_positions`."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(rope, num_positions)
    cos = _per_dimension(angles.cos() * rope.attention_factor, rope)
    sin = _per_dimension(angles.sin() * rope.attention_factor, rope, first_sign=-1)
    return RopeTables(
        cos=cos.to(device=device, dtype=dtype),
        sin=sin.to(device=device, dtype=dtype),
        interleaved=rope.interleaved,
    )


def _per_dimension(values: Tensor, rope: RopeSpec, first_sign: int = 1) -> Tensor:
    """Values of pairs [P, r / 2] -> of dimensions [P, r]; `first_sign` is that of the first one of each pair."""
    return torch.stack([first_sign * values, values], -1 if rope.interleaved else -2).flatten(-2)
