"""Histograms that cost little to add to, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final


def _one_two_five(low: float, high: float) -> tuple[float, ...]:
    """1, 2, 5, 10, ... from `low` to `high`."""
    found, step = [], low
    while step <= high:
        found += [step * factor for factor in (1, 2, 5) if step * factor <= high]
        step *= 10
    return tuple(found)


FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
TOKENS: Final = _one_two_five(1, 1_000_000)
COUNTS: Final = (0, 1, 2, 5, 10, 20)
SEQUENCES: Final = (1, 2, 5, 10, 20)


def bound_text(bound: float) -> str:
    """The greatest value of a bucket, as Prometheus writes it."""
    return "+Inf" if bound == float("inf") else str(float(bound))


class Histogram:
    """Counts of values by bucket. Written by one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: greatest value of each bucket but the last, which has none."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_many(self, value: float, times: int) -> None:
        """Count one value several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Bound -> values up to it, as Prometheus wants them."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append((bound_text(bound), float(total)))
        return found

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum
