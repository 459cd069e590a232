"""A picture of a load: how its metrics are distributed, and what happened when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyvllm.bench.client import Answer
from pyvllm.bench.serve import Load, metric_values

_TITLES: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between pieces",
    "e2el": "time to last token",
}
_BINS: Final = 60


def draw(load: Load, metrics: Sequence[str], path: Path) -> None:
    """Write the picture, of the kind that the file's name says."""
    good = [answer for answer in load.answers if answer.error is None]
    figure = Figure(figsize=(4 * (len(metrics) + 1), 3.5), layout="constrained")
    areas = [figure.add_subplot(1, len(metrics) + 1, place + 1) for place in range(len(metrics) + 1)]
    for name, area in zip(metrics, areas, strict=False):
        _draw_distribution(area, name, sorted(metric_values(good, name)))
    _draw_course(areas[-1], good, load.seconds)
    figure.savefig(path)


def _draw_distribution(area: Axes, name: str, seconds: Sequence[float]) -> None:
    shares = [(i + 1) / len(seconds) for i in range(len(seconds))]
    area.step([1e3 * value for value in seconds], shares, where="post")
    area.set(title=_TITLES[name], xlabel="ms", ylabel="share at most", ylim=(0, 1))
    area.grid(alpha=0.3)


def _draw_course(area: Axes, answers: Sequence[Answer], seconds: float) -> None:
    edges = np.linspace(0, seconds, _BINS + 1)
    pieces = np.array([at for answer in answers for at in answer.pieces])
    weights = np.array([answer.output_tokens / len(answer.pieces) for answer in answers for _ in answer.pieces])
    rates = np.histogram(pieces, edges, weights=weights)[0] / (seconds / _BINS)
    area.stairs(rates, edges, color="tab:blue")
    area.set(title="course", xlabel="s", xlim=(0, seconds), ylim=(0, None))
    area.set_ylabel("output tokens/s", color="tab:blue")
    running = [sum(answer.sent <= at < answer.pieces[-1] for answer in answers) for at in edges]
    other = area.twinx()
    other.step(edges, running, color="tab:orange", where="post")
    other.set_ylim(0, None)
    other.set_ylabel("open requests", color="tab:orange")
