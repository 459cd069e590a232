"""`Engine`: the loop. Schedule a step, launch it, commit the one before."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from pyvllm import _core
from pyvllm.inputs import ParsedPrompt, bad_word_ids, encode_prompts, parse_priority, require_tokenizer, start_token
from pyvllm.logging import StatsLog
from pyvllm.logprobs import TokenText
from pyvllm.sampling_params import LogitsProcessor, SamplingParams

if TYPE_CHECKING:
    from pyvllm.logits_processors import ProcessedRow, Processor
    from pyvllm.step import StepResult
    from pyvllm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_COMPILING_S: Final = 0.001
"""Seconds between two looks whether a grammar is ready, if there is nothing else to do."""


class Launched(Protocol):
    """A step that runs, or has run."""

    @property
    def step(self) -> int:
        """Its number, as in the plan."""

    @property
    def failures(self) -> dict[str, Exception]:
        """What the `logits_processors` of requests raised, by request id."""

    def wait(self) -> StepResult:
        """What it sampled, once it has run: the arguments of `Scheduler.commit` after the step's number."""


class StepRunner(Protocol):
    """Executes plans in the order they come."""

    def launch(self, buffer: NDArray[np.int32], processed_rows: Sequence[ProcessedRow] = ()) -> Launched:
        """Start a step; does not wait for it where device and host run side by side, unless rows are processed."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What users of an engine may ask about it."""

    model: str
    """The name or path it was made from."""
    max_model_len: int
    """Most tokens of prompt and output of a request."""
    vocab_size: int
    """Ids from 0 to below it are valid."""
    chat_template: str | None
    """Chat template in place of the model's own."""
    default_sampling_params: SamplingParams
    """What a request has that says nothing."""
    block_size: int
    """Tokens of a block of the KV pool."""
    block_bytes: int
    """Bytes of its keys and values in all layers."""


class Engine:
    """Requests in, outputs out, one step at a time. One thread may step while others add and abort."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        runner: StepRunner,
        new_scheduler: Callable[[], _core.Scheduler],
        tokenizer: Tokenizer | None,
        run_ahead: bool,
        processors: Mapping[str, LogitsProcessor] | None = None,
        stats_log: StatsLog | None = None,
    ) -> None:
        """`new_scheduler` is called now and after each failure. `run_ahead`: launch a step before the one before it is
        committed, so that host and device overlap. `processors`: what requests may name.
        """
        self.info = info
        self.tokenizer = tokenizer
        self.token_text: TokenText | None = tokenizer.token_text if tokenizer else None
        """Text of a token alone, None without a tokenizer."""
        self._runner = runner
        self._new_scheduler = new_scheduler
        self._scheduler = new_scheduler()
        self._run_ahead = run_ahead
        self._processors = processors or {}
        self._pending: Launched | None = None
        self._pid = os.getpid()
        self._stats_log = stats_log

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ValueError` if the engine runs without one."""
        return require_tokenizer(self.tokenizer)

    def encode(self, prompts: Sequence[ParsedPrompt]) -> list[list[int]]:
        """Token ids of prompts. Raises `ParameterError` for text if there is no tokenizer."""
        return encode_prompts(self.tokenizer, prompts)

    def add_request(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a request. `token_ids`: what `encode` made of `prompt`; none start from the tokenizer's BOS token.

        Raises `ParameterError` if it can never run; nothing of it stays behind then.
        """
        self._scheduler.add_request(
            request_id,
            token_ids or [start_token(self.tokenizer, prompt)],
            params,
            prompt=prompt.text,
            priority=parse_priority(priority),
            cache_salt=prompt.cache_salt,
            bad_word_ids=bad_word_ids(self.tokenizer, params.bad_words or ()),
            processor=self._processor(params),
        )

    def _processor(self, params: SamplingParams) -> Processor | None:
        """A request's functions as one. None if it has none, or names one that the core will refuse."""
        given = params.logits_processors or ()
        functions = [self._processors.get(one) if isinstance(one, str) else one for one in given]
        known = [function for function in functions if function is not None]
        if not functions or len(known) < len(functions):
            return None
        from pyvllm.logits_processors import as_processor  # needs torch, which a front end does without

        return as_processor(known)

    def add_message(self, message: bytes) -> int:
        """Queue a request that a front end in another process has checked; its id is its number, which is returned."""
        return self._scheduler.add_message(message)

    def abort(self, request_id: str) -> bool:
        """Drop a request at once, wherever it is; False if there is none of this id."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[_core.Output]:
        """Run one step and return what the step before it (without run-ahead: it itself) has to tell.

        If anything raises, an interrupt included, all requests are dropped and cached prefixes forgotten, so that the
        engine can go on with new ones, and the exception goes on.
        """
        if os.getpid() != self._pid:
            # Threads do not survive a fork: whatever waits for one waits for ever.
            raise RuntimeError("this engine was made before a fork: make it in the process that uses it")
        try:
            outputs = self._step()
        except BaseException as error:
            if isinstance(error, Exception):
                logger.error("a step failed, all requests in the engine are dropped: %r", error)
            self._reset()
            raise
        if self._stats_log is not None:
            self._stats_log.tick(self._scheduler)
        return outputs

    def _step(self) -> list[_core.Output]:
        plan = self._scheduler.schedule()
        if plan is None and self._pending is None and self._scheduler.is_compiling():
            time.sleep(_COMPILING_S)
        launched = self._launch(plan) if plan is not None else None
        done = launched
        if self._run_ahead:
            done, self._pending = self._pending, launched
        outputs = [] if done is None else self._commit(done)
        return outputs + self._scheduler.take_failed()

    def _launch(self, plan: _core.StepPlan) -> Launched:
        rows = plan.processed_rows
        return self._runner.launch(plan.buffer, rows) if rows else self._runner.launch(plan.buffer)

    def _commit(self, done: Launched) -> list[_core.Output]:
        arrays = done.wait()
        for request_id, error in done.failures.items():
            self._scheduler.fail(request_id, "logits_processors", f"logits_processors: one of them raised {error!r}")
        return self._scheduler.commit(done.step, *arrays)

    def _reset(self) -> None:
        """A step that failed half-way leaves KV memory unknown: start anew with empty queues and an empty cache."""
        self._pending = None
        self._scheduler = self._new_scheduler()

    def warm_up(self) -> None:
        """Generate a token while there are no requests, so that all that first use compiles or allocates is there.

        Forgets all cached prefixes and counts. Raises what a step raises.
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        self._scheduler.add_request("warm-up", [0], params)
        while self.has_unfinished():
            self.step()
        self._reset()

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return self._pending is not None or self._scheduler.has_unfinished()

    def num_unfinished(self) -> int:
        """Requests that were added and have neither finished nor been dropped."""
        return self._scheduler.num_unfinished()

    def stats(self) -> _core.Stats:
        """A snapshot of queues, memory and counters (which a failed step sets back to 0)."""
        return self._scheduler.stats()

    def limits(self) -> bytes:
        """What a request may ask for, for the front end of another process."""
        return self._scheduler.limits()

    def block_map(self) -> _core.BlockMap:
        """Who holds which block of the KV pool."""
        return self._scheduler.block_map()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while a request is alive."""
        return self._scheduler.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Raise `RuntimeError` if memory accounting is wrong."""
        self._scheduler.check_invariants()
