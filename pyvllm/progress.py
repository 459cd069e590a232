"""The progress bar of offline calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from pyvllm.engine import Engine

REFRESH_S = 0.5


class Progress:
    """Finished prompts, and tokens a second of the whole engine meanwhile."""

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int, engine: Engine) -> None:
        """`use_tqdm`: whether to show a bar, or what to call in place of `tqdm.auto.tqdm`. `total`: prompts."""
        self._bar: Any = None
        self._engine = engine
        self._start = self._last = time.monotonic()
        if use_tqdm and total:
            before = engine.stats()
            self._before = before.prompt_tokens, before.generation_tokens
            make_bar: Callable[..., Any] = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make_bar(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed(0, 0, 1)
            )

    def tick(self) -> None:
        """Refresh the speed if it is time to."""
        if self._bar is not None and time.monotonic() - self._last >= REFRESH_S:
            self._show_speed()

    def finish_one(self) -> None:
        """Count a finished prompt."""
        if self._bar is not None:
            self._bar.update(1)

    def _show_speed(self) -> None:
        self._last = time.monotonic()
        stats = self._engine.stats()
        prompt, generated = stats.prompt_tokens - self._before[0], stats.generation_tokens - self._before[1]
        self._bar.set_postfix_str(self._speed(prompt, generated, self._last - self._start))

    @staticmethod
    def _speed(prompt_tokens: int, generated_tokens: int, seconds: float) -> str:
        prompt, generated = (max(0, count) / seconds for count in (prompt_tokens, generated_tokens))
        return f"est. speed input: {prompt:.2f} toks/s, output: {generated:.2f} toks/s"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._show_speed()
            self._bar.close()
