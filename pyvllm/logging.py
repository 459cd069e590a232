"""Log lines on stderr, unless the program has set up logging itself."""

from __future__ import annotations

import json
import logging
import logging.config
import time
from pathlib import Path
from typing import Protocol

from pyvllm import _core
from pyvllm.config import env

logger = logging.getLogger("pyvllm")


def configure_logging(default_level: str = "INFO") -> None:
    """Give the package's log lines a place: stderr, from PYVLLM_LOGGING_LEVEL (else `default_level`) up.

    Does nothing if they have one, or if PYVLLM_CONFIGURE_LOGGING is 0. PYVLLM_LOGGING_CONFIG_PATH: a JSON file for
    `logging.config.dictConfig` instead.
    """
    if env("CONFIGURE_LOGGING") == "0" or logger.hasHandlers():
        return
    path = env("LOGGING_CONFIG_PATH")
    if path:
        try:
            logging.config.dictConfig(json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError, AttributeError) as error:  # dictConfig's own are these
            raise ValueError(f"PYVLLM_LOGGING_CONFIG_PATH={path}: no configuration of logging: {error}") from error
        return
    level = (env("LOGGING_LEVEL") or default_level).upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"PYVLLM_LOGGING_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s pyvllm: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class HasStats(Protocol):
    """An engine or a scheduler."""

    def stats(self) -> _core.Stats:
        """A snapshot."""


class StatsLog:
    """Logs throughput and memory use now and then."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s`: least seconds between two lines."""
        self._interval_s = interval_s
        self._last_time = time.monotonic()
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def tick(self, source: HasStats) -> None:
        """Log a line if it is time to. Called after each step, so it must cost next to nothing when it is not."""
        seconds = time.monotonic() - self._last_time
        if seconds >= self._interval_s:
            self._log(source.stats(), max(seconds, 1e-9))

    def _log(self, stats: _core.Stats, seconds: float) -> None:
        prompt = max(0, stats.prompt_tokens - self._prompt_tokens)
        generation = max(0, stats.generation_tokens - self._generation_tokens)
        self._last_time = time.monotonic()
        self._prompt_tokens, self._generation_tokens = stats.prompt_tokens, stats.generation_tokens
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, swapped %d, KV pool %.1f%%, "
            "prefix cache hits %.1f%%",
            prompt / seconds,
            generation / seconds,
            stats.num_running,
            stats.num_waiting,
            stats.num_swapped,
            100 * (1 - stats.num_free_gpu_blocks / stats.num_gpu_blocks),
            100 * stats.prefix_hits / max(1, stats.prefix_queries),
        )
