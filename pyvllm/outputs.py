"""What a request gives back: plain data, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyvllm import _core
from pyvllm.logprobs import LogprobDict, TokenText, logprob_dicts


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    """Place among the request's sequences; with `best_of` or beams, 0 is the best."""
    text: str
    """Generated text; for `DELTA` requests what is new."""
    token_ids: list[int]
    """Generated ids; for `DELTA` requests the new ones."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of all generated tokens; None unless asked for or needed."""
    logprobs: list[LogprobDict] | None = None
    """For each of `token_ids`: id -> `Logprob` of that token first, then of the most probable ones."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while running."""
    stop_reason: int | str | None = None
    """The stop string, regular expression or token id that ended it; None for end of sequence."""

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class RequestMetrics:
    """When things happened to a request. `*_ts` are seconds on one monotonic clock, 0 until they happen."""

    arrival_time: float
    """Seconds since the epoch."""
    queued_ts: float
    """The engine took the request in."""
    scheduled_ts: float
    """It first ran."""
    first_token_ts: float
    """Its first token was there."""
    last_token_ts: float
    """Its latest token was there."""
    num_preemptions: int
    """Times it lost its place in memory to others."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token, 0 until there is one."""
        return max(0.0, self.first_token_ts - self.queued_ts)


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """The state of one request."""

    request_id: str
    """The request's name."""
    prompt: str | None
    """Text of the prompt, if it was given as text."""
    prompt_token_ids: list[int]
    """Ids of the prompt."""
    prompt_logprobs: list[LogprobDict | None] | None = None
    """For each prompt token, id -> `Logprob` as in `CompletionOutput.logprobs`; the first entry is None."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    """Generated sequences by index; with `best_of` or beams, best first."""
    finished: bool = False
    """Whether the request has ended."""
    metrics: RequestMetrics | None = None
    """When things happened."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved."""
    error: _core.ParameterError | None = None
    """Why the request failed, if it did. `LLM` raises it."""


@dataclass(kw_only=True, slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """Ids of the prompt and the generated tokens."""
    cum_logprob: float
    """Sum of the log-probabilities of the generated tokens."""
    text: str
    """Text of the prompt and the generated tokens."""
    logprobs: list[LogprobDict] | None = None
    """As `CompletionOutput.logprobs`, if asked for."""
    finish_reason: str | None = None
    """`stop` or `length`."""
    stop_reason: int | str | None = None
    """As `CompletionOutput.stop_reason`."""


@dataclass(kw_only=True, slots=True)
class BeamSearchOutput:
    """What `LLM.beam_search` found for one prompt."""

    sequences: list[BeamSearchSequence]
    """Best first."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Metric:
    """One number about the engine."""

    name: str
    """As Prometheus sees it."""
    value: float
    """Its value now."""


def completion_output(completion: _core.Completion, token_text: TokenText | None) -> CompletionOutput:
    """One sequence of an output of the core."""
    table = completion.logprobs
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=None if table is None else logprob_dicts(table, token_text),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def request_output(output: _core.Output, token_text: TokenText | None) -> RequestOutput:
    """An output of the core as users see it. `token_text`: how log-probabilities get their texts."""
    table = output.prompt_logprobs
    return RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=None if table is None else [None, *logprob_dicts(table, token_text)],
        outputs=[completion_output(completion, token_text) for completion in output.completions],
        finished=output.finished,
        metrics=RequestMetrics(
            arrival_time=output.arrival_time,
            queued_ts=output.queued_ts,
            scheduled_ts=output.scheduled_ts,
            first_token_ts=output.first_token_ts,
            last_token_ts=output.last_token_ts,
            num_preemptions=output.num_preemptions,
        ),
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
    )


def beam_search_output(output: RequestOutput, prompt_text: str) -> BeamSearchOutput:
    """The beams of a finished request. `prompt_text`: put before each text."""
    return BeamSearchOutput(
        sequences=[
            BeamSearchSequence(
                tokens=output.prompt_token_ids + completion.token_ids,
                cum_logprob=completion.cumulative_logprob or 0.0,
                text=prompt_text + completion.text,
                logprobs=completion.logprobs,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
            for completion in output.outputs
        ]
    )
