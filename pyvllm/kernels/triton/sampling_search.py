"""What sampling kernels share: order-preserving keys, noise, and the search for a cut in a row without sorting it.

Keys are int32 with the order of the float32 values they stand for; -0.0 has the key of 0.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-2139095041)
"""Key of -inf."""
MAX_KEY = tl.constexpr(2**31 - 1)
MIN_KEY = tl.constexpr(-(2**31))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How the kernels divide a row. What they compute does not depend on it, but for rounding."""

    tile: int = 4096
    """Logits that are reduced together."""
    group: int = 16
    """Neighbouring logits that stand or fall together when the best are gathered; divides `tile`."""
    width: int = 512
    """Groups that are gathered at most: their logits are searched first, the whole row only if they do not suffice."""
    least_width: int = 32
    """The same where no more than the best few are wanted, unless that takes more."""
    block: int = 2048
    """Logits that a search looks at together."""
    programs: int = 2112
    """Programs that keep all multiprocessors busy; beyond them each takes several tiles."""


DEFAULT = SamplingConfig()


def tiles_each(num_tiles: int, num_rows: int, config: SamplingConfig) -> int:
    """How many tiles of a row a program takes, the last one not many fewer."""
    most = min(max(num_tiles * num_rows // config.programs, 1), num_tiles)
    return -(-num_tiles // -(-num_tiles // most))


@triton.jit
def key_of(value: tl.tensor) -> tl.tensor:
    """float32 -> key."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """Key -> float32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def chance(scaled: tl.tensor, key0: tl.tensor, key1: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """exp(scaled) / E, which is greatest where `scaled - log(E)` is, with E as `pyvllm/noise.py` specifies it.

    `scaled`: at most 0; where it is so low that the result is 0, no E could win. Keys and ids are uint32.
    """
    x = ids * 0x9E3779B1 + key0
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= key1
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    v = tl.minimum(x.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    u = 1.0 - tl.maximum(v, 2.384185791015625e-07)
    return tl.exp(scaled) * (u - 1.0) / (v * tl.log(u))


@triton.jit
def lanes(values: tl.tensor, start: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """`values[start : start + BLOCK]` as float32, -inf from `size` on."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(values + at, mask=at < size, other=float("-inf")).to(tl.float32)


@triton.jit
def middle_of(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Half-way between two int32 that may be far apart."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def search(
    values: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    target: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The greatest key in [low, high) of a value from which on `values[:size]` weigh `target` or more.

    A value weighs exp((value - best) * rate): 1 if `rate` is 0. Those from `high` on weigh less than `target`. If
    those from `low` on do too: a key that is not above any of theirs.
    """
    while low + 1 < high:
        # Quarters by value are quick where values are spread evenly, the middle of the keys ends it where they are not.
        least, most = value_of(low), value_of(high - 1)
        key0 = tl.minimum(tl.maximum(key_of(least * 0.75 + most * 0.25), low + 1), high - 1)
        key1 = tl.minimum(tl.maximum(key_of(least * 0.5 + most * 0.5), low + 1), high - 1)
        key2 = tl.minimum(tl.maximum(key_of(least * 0.25 + most * 0.75), low + 1), high - 1)
        key3 = middle_of(low, high)
        pivot0, pivot1, pivot2, pivot3 = value_of(key0), value_of(key1), value_of(key2), value_of(key3)
        end = value_of(high)
        weight0 = tl.zeros([BLOCK], tl.float32)
        weight1 = tl.zeros([BLOCK], tl.float32)
        weight2 = tl.zeros([BLOCK], tl.float32)
        weight3 = tl.zeros([BLOCK], tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        highest = tl.full([BLOCK], NEVER, tl.float32)
        for start in tl.range(0, size, BLOCK, num_stages=3):
            value = lanes(values, start, size, BLOCK)
            weight = tl.exp((value - best) * rate)
            weight0 += tl.where(value >= pivot0, weight, 0.0)
            weight1 += tl.where(value >= pivot1, weight, 0.0)
            weight2 += tl.where(value >= pivot2, weight, 0.0)
            weight3 += tl.where(value >= pivot3, weight, 0.0)
            inside = (value >= least) & (value < end)
            lowest = tl.minimum(lowest, tl.where(inside, value, float("inf")))
            highest = tl.maximum(highest, tl.where(inside, value, NEVER))
        first, last = key_of(tl.min(lowest, axis=0)), key_of(tl.max(highest, axis=0))
        if first >= last:  # one key is left, or none
            low = tl.minimum(tl.maximum(low, first), high - 1)
            high = low + 1
        else:
            low = tl.maximum(low, first)
            high = tl.minimum(high, last + 1)
            low, high = narrowed(low, high, key0, tl.sum(weight0, axis=0) >= target)
            low, high = narrowed(low, high, key1, tl.sum(weight1, axis=0) >= target)
            low, high = narrowed(low, high, key2, tl.sum(weight2, axis=0) >= target)
            low, high = narrowed(low, high, key3, tl.sum(weight3, axis=0) >= target)
    return low


@triton.jit
def narrowed(low: tl.tensor, high: tl.tensor, key: tl.tensor, reached: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The bounds after learning whether the values from `key` on reach the target."""
    return tl.where(reached, tl.maximum(low, key), low), tl.where(reached, high, tl.minimum(high, key))


@triton.jit
def gather_best(
    values: tl.tensor,
    vocab_size: tl.tensor,
    group_best: tl.tensor,
    num_groups: tl.tensor,
    best: tl.tensor,
    groups: tl.tensor,
    gathered: tl.tensor,
    gathered_ids: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Gather all of a row's values above a bound that leaves fewer than `WIDTH` groups; how many, and the bound.

    `group_best` [num_groups]: each group's greatest value; `best`: the row's. `gathered` and `gathered_ids`
    [WIDTH * GROUP]: the values and their tokens, in order of these. `groups` [WIDTH]: scratch. The bound is -inf if all
    groups fit.
    """
    bound = tl.full([], NEVER, tl.float32)
    if num_groups > WIDTH:
        lowest = tl.full([], LOWEST + 1, tl.int32)
        bound = value_of(search(group_best, num_groups, lowest, key_of(best) + 1, WIDTH, best, 0.0, BLOCK))
    found = 0
    for start in range(0, num_groups, BLOCK):
        takes = (lanes(group_best, start, num_groups, BLOCK) > bound).to(tl.int32)
        place = found + tl.cumsum(takes, axis=0) - 1
        tl.store(groups + place, start + tl.arange(0, BLOCK), mask=takes != 0)
        found += tl.sum(takes, axis=0)
    tl.debug_barrier()
    size = 0
    for start in range(0, found * GROUP, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        token = tl.load(groups + slot // GROUP, mask=slot < found * GROUP, other=0) * GROUP + slot % GROUP
        inside = (slot < found * GROUP) & (token < vocab_size)
        value = tl.load(values + token, mask=inside, other=NEVER).to(tl.float32)
        keeps = (value > bound).to(tl.int32)
        place = size + tl.cumsum(keeps, axis=0) - 1
        tl.store(gathered + place, value, mask=keeps != 0)
        tl.store(gathered_ids + place, token, mask=keeps != 0)
        size += tl.sum(keeps, axis=0)
    tl.debug_barrier()
    return size, bound


@triton.jit
def tally(
    values: tl.tensor, size: tl.tensor, value: tl.tensor, best: tl.tensor, rate: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Of `values[:size]`: how many are equal to `value`, and the mass of those above it.

    The mass of a value is exp((value - best) * rate). The number is float32, exact up to 2^24.
    """
    equal = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=3):
        other = lanes(values, start, size, BLOCK)
        equal += tl.where(other == value, 1.0, 0.0)
        mass += tl.where(other > value, tl.exp((other - best) * rate), 0.0)
    return tl.sum(equal, axis=0), tl.sum(mass, axis=0)
