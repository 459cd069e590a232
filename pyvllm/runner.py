"""`Runner`: executes plans. It keeps weights, KV memory and the tokens of the last step, and knows no request."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyvllm import _core
from pyvllm.config import LogprobsMode
from pyvllm.cuda_graph import Graphs
from pyvllm.kernels import AnyKernels
from pyvllm.kv_cache import KVCache
from pyvllm.logits_processors import ProcessedRow, process_rows
from pyvllm.models import Decoder
from pyvllm.sampler import LogprobRows, Sampled, changes_logits, prompt_logprobs, sample
from pyvllm.staging import make_staging
from pyvllm.step import HEADER_LEN, Flags, StepResult, StepView

# Rows of logits that prompt log-probabilities are computed from at once: bounds memory whatever the prompt's length.
_PROMPT_ROWS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A step on its way."""

    step: int
    """Its number, as in the plan."""
    token_ids: Tensor
    """[R, k] int32; this and what follows on the host, once the step has run."""
    logprobs: Tensor
    """[R, k] float32."""
    table: LogprobRows | None
    """Of the sampled tokens, if a row wants log-probabilities."""
    prompt: LogprobRows | None
    """Of the prompt tokens that the step asks for."""
    candidates: LogprobRows | None
    """Of the candidates of beams, if they are ranked by something else; see `Sampled`."""
    failures: dict[str, Exception]
    """What the `logits_processors` of requests raised, by request id."""
    finished: torch.Event | None
    """None: the step has run."""

    def wait(self) -> StepResult:
        """What the step sampled, once it has run: the arguments of `Scheduler.commit` after the step's number."""
        if self.finished is not None:
            self.finished.synchronize()
        tables = (_table(self.table), _table(self.prompt), _table(self.candidates))
        return self.token_ids.numpy(), self.logprobs.numpy(), *tables


class Runner:
    """Runs the steps of one model on one device, in the order they come.

    Symbols: T tokens of a step, R rows of logits, k candidates a row.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        kernels: AnyKernels,
        *,
        max_num_seqs: int,
        staging_words: int = 0,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        """`decoder`: with its weights loaded. `max_num_seqs`: most rows of a step.

        `staging_words`: of the longest plan that takes the fast way to a device with memory of its own, see
        `staging.py`.
        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._kernels = kernels
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._device = kv_cache.pool.device
        self._previous = torch.zeros(max_num_seqs, dtype=torch.int32, device=self._device)
        """[rows of the step before, and more] int32: what negative ids stand for."""
        self._staging = make_staging(staging_words, self._device)

    @torch.inference_mode()
    def launch(self, buffer: NDArray[np.int32], processed_rows: Sequence[ProcessedRow] = ()) -> Launched:
        """Start the step that a plan's buffer describes. The buffer must not change before the step has run.

        `processed_rows`: rows whose logits the host changes first, for which this waits.
        """
        step = StepView(self._staging.put(buffer), buffer[:HEADER_LEN].tolist())
        self._kv_cache.apply(step, self._kernels)
        sampled, prompt = None, None
        failures: dict[str, Exception] = {}
        if not processed_rows and step.graph_size and self._staging.fits(buffer):
            sampled = self._run_graph(step)
        elif step.num_tokens:
            hidden = self._forward(step, torch.cat([step.row_token, step.prompt_rows[:, 0]]))
            num_rows = len(step.row_token)
            if num_rows:
                sampled, failures = self._sample(hidden[:num_rows], step, processed_rows)
            if step.has("prompt_rows"):
                prompt = self._prompt_logprobs(hidden[num_rows:], step, buffer)
        return self._launched(step, sampled, prompt, failures)

    @functools.cached_property
    def _graphs(self) -> Graphs[Tensor]:
        return Graphs(self._device)

    def _forward(self, step: StepView, rows: Tensor | None = None) -> Tensor:
        return self._decoder.forward(step, self._previous, self._kv_cache.layers, self._kernels, rows)

    def _sample(
        self, hidden: Tensor, step: StepView, processed_rows: Sequence[ProcessedRow] = ()
    ) -> tuple[Sampled, dict[str, Exception]]:
        """Tokens of the rows `hidden` [R, d], which the next step's negative ids stand for; failures of processors."""
        logits = self._decoder.logits(hidden, self._kernels)
        vocab_size = self._decoder.spec.vocab_size
        replaced, failures = process_rows(logits, processed_rows, vocab_size) if processed_rows else (None, {})
        sampled = sample(
            logits,
            step,
            self._previous,
            kernels=self._kernels,
            vocab_size=vocab_size,
            replaced=replaced,
            logprobs_mode=self._logprobs_mode,
        )
        self._previous[: len(hidden)].copy_(sampled.token_ids[:, 0])
        return sampled, failures

    def _run_graph(self, step: StepView) -> Sampled:
        """A padded step: row i is that of token i. Sampling is part of the graph unless it needs special sections."""
        work = self._kernels.graph_kind(step)
        if step.max_logprobs >= 0 or Flags.BEAM in step.flags or changes_logits(step):
            hidden = self._graphs.run((step.graph_size, None, work), lambda: self._forward(step))
            return self._sample(hidden, step)[0]
        kind = (step.graph_size, int(step.flags), work)
        token_ids = self._graphs.run(kind, lambda: self._sample(self._forward(step), step)[0].token_ids)
        zeros = torch.zeros(token_ids.shape)  # nobody wants any
        return Sampled(token_ids=token_ids, logprobs=zeros, table=None, candidates=None)

    def _prompt_logprobs(self, hidden: Tensor, step: StepView, buffer: NDArray[np.int32]) -> LogprobRows:
        """Of the prompt tokens that the step asks for, in order; `hidden` [their number, d]."""
        offset, length = step.span("prompt_rows")
        max_top = int(buffer[offset : offset + length].reshape(-1, 3)[:, 2].max())
        chunks = []
        targets = step.prompt_rows[:, 1].contiguous()
        for some, its_targets in zip(
            torch.split(hidden, _PROMPT_ROWS), torch.split(targets, _PROMPT_ROWS), strict=True
        ):
            logits = self._decoder.logits(some, self._kernels)
            vocab_size = self._decoder.spec.vocab_size
            table = prompt_logprobs(
                logits,
                its_targets,
                max_top,
                kernels=self._kernels,
                vocab_size=vocab_size,
                logprobs_mode=self._logprobs_mode,
            )
            chunks.append(table)
        return LogprobRows(
            token_ids=torch.cat([chunk.token_ids for chunk in chunks]),
            logprobs=torch.cat([chunk.logprobs for chunk in chunks]),
            ranks=torch.cat([chunk.ranks for chunk in chunks]),
        )

    def _launched(
        self, step: StepView, sampled: Sampled | None, prompt: LogprobRows | None, failures: dict[str, Exception]
    ) -> Launched:
        """Start copying the results to the host."""
        if sampled is None:
            nothing = torch.empty(0, step.num_candidates)
            sampled = Sampled(token_ids=nothing.int(), logprobs=nothing, table=None, candidates=None)
        candidates = sampled.candidates
        return Launched(
            step=step.step,
            token_ids=self._staging.fetch(sampled.token_ids[: step.num_rows]),
            logprobs=self._staging.fetch(sampled.logprobs[: step.num_rows]),
            table=sampled.table and self._fetch_rows(sampled.table, step.num_rows),
            prompt=prompt and self._fetch_rows(prompt, len(prompt.ranks)),
            candidates=candidates and self._fetch_rows(candidates, step.num_rows * step.num_candidates),
            failures=failures,
            finished=self._staging.mark(),  # after the copies above
        )

    def _fetch_rows(self, rows: LogprobRows, count: int) -> LogprobRows:
        return LogprobRows(
            token_ids=self._staging.fetch(rows.token_ids[:count]),
            logprobs=self._staging.fetch(rows.logprobs[:count]),
            ranks=self._staging.fetch(rows.ranks[:count]),
        )


def _table(rows: LogprobRows | None) -> _core.LogprobTable | None:
    if rows is None:
        return None
    return _core.LogprobTable(rows.token_ids.numpy(), rows.logprobs.numpy(), rows.ranks.numpy())
