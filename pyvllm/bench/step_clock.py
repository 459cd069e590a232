"""Where the host's time goes in a step: how long its parts take, measured around them in a running engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

import numpy as np
from numpy.typing import NDArray

from pyvllm import _core
from pyvllm.engine import Engine, Launched, StepRunner

if TYPE_CHECKING:
    from pyvllm.logits_processors import ProcessedRow
    from pyvllm.step import StepResult

PARTS: Final = ("schedule", "launch", "wait", "commit")
"""In the order in which a step does them; `wait`: until what a step sampled is there."""

_Times = dict[str, list[int]]


class _TimedScheduler:
    """A scheduler whose two calls of a step are timed; all others go through."""

    def __init__(self, scheduler: _core.Scheduler, times: _Times) -> None:
        self.scheduler, self._times = scheduler, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def schedule(self) -> _core.StepPlan | None:
        begin = time.perf_counter_ns()
        plan = self.scheduler.schedule()
        self._times["schedule"].append(time.perf_counter_ns() - begin)
        return plan

    def commit(self, step: int, *sampled: Any) -> list[_core.Output]:
        begin = time.perf_counter_ns()
        outputs = self.scheduler.commit(step, *sampled)
        self._times["commit"].append(time.perf_counter_ns() - begin)
        return outputs


class _TimedLaunched:
    """A launched step whose wait is timed."""

    def __init__(self, launched: Launched, times: _Times) -> None:
        self.launched, self._times = launched, times

    @property
    def step(self) -> int:
        return self.launched.step

    @property
    def failures(self) -> dict[str, Exception]:
        return self.launched.failures

    def wait(self) -> StepResult:
        begin = time.perf_counter_ns()
        sampled = self.launched.wait()
        self._times["wait"].append(time.perf_counter_ns() - begin)
        return sampled


class _TimedRunner:
    """A runner whose launches are timed."""

    def __init__(self, runner: StepRunner, times: _Times) -> None:
        self.runner, self._times = runner, times

    def launch(self, buffer: NDArray[np.int32], processed_rows: Sequence[ProcessedRow] = ()) -> Launched:
        begin = time.perf_counter_ns()
        launched = self.runner.launch(buffer, processed_rows)
        self._times["launch"].append(time.perf_counter_ns() - begin)
        return _TimedLaunched(launched, self._times)


class StepClock:
    """Times the parts of an engine's steps within a `with` block. It adds about a microsecond to a step."""

    def __init__(self, engine: Engine) -> None:
        """`engine`: stepped by this thread only. A failed step ends the timing."""
        self._engine = engine
        self._times: _Times = {part: [] for part in PARTS}

    def seconds(self) -> dict[str, list[float]]:
        """Part -> seconds, one entry for each time it was done."""
        return {part: [value / 1e9 for value in values] for part, values in self._times.items()}

    def __enter__(self) -> Self:
        engine = self._engine
        self._scheduler, self._runner = engine._scheduler, engine._runner
        engine._scheduler = cast(_core.Scheduler, _TimedScheduler(engine._scheduler, self._times))
        engine._runner = _TimedRunner(engine._runner, self._times)
        # One step ahead, the first step waits for what was launched before; what the last launches is waited for later.
        if engine._pending is not None:
            engine._pending = _TimedLaunched(engine._pending, self._times)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine._runner = self._runner
        if isinstance(self._engine._pending, _TimedLaunched):
            self._engine._pending = self._engine._pending.launched
        if isinstance(self._engine._scheduler, _TimedScheduler):  # type: ignore[unreachable]
            self._engine._scheduler = self._scheduler  # type: ignore[unreachable]
