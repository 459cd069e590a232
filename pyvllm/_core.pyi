"""The boundary to the Rust core: what crosses it, and nothing else does.

Arrays are numpy; a plan's layout is described in `rust_core/src/plan.rs` and `pyvllm/step.py`.
"""

from collections.abc import Sequence
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BlockMap",
    "Completion",
    "Detokenizer",
    "FrontEnd",
    "LogprobTable",
    "Output",
    "ParameterError",
    "QueueFullError",
    "RequestState",
    "Scheduler",
    "Stats",
    "StepPlan",
    "Vocabulary",
    "__version__",
    "encode_step",
    "validate_params",
]

__version__: str

class ParameterError(ValueError):
    """A field of a request is out of its range. Always names the field."""

    parameter: str
    value: object

class QueueFullError(RuntimeError):
    """More waits than the queue may hold: try again later."""

def validate_params(params: Any) -> None:
    """Check what needs no model. Raises `ParameterError` naming the first bad field, value and range."""

@final
class Vocabulary:
    """Bytes of every token id, and how they join to text. Immutable; shared by all requests."""

    def __new__(
        cls,
        token_bytes: Sequence[bytes],
        *,
        special_token_ids: Sequence[int] = ...,
        byte_token_ids: Sequence[int] = ...,
        strip_leading_space: bool = False,
    ) -> Self:
        """`token_bytes[i]`: what id i adds to the text. `byte_token_ids`: SentencePiece's <0x00>..<0xFF>, whose
        bytes form characters only with one another. `strip_leading_space`: one space at the start of the text is
        not text.
        """
    def __len__(self) -> int: ...

@final
class Detokenizer:
    """Text of one sequence, piece by piece: characters are held back until they are whole."""

    def __new__(
        cls, vocabulary: Vocabulary, prompt_token_ids: Sequence[int] = ..., *, skip_special_tokens: bool = True
    ) -> Self: ...
    def push(self, token_ids: Sequence[int]) -> str:
        """Text completed by these tokens."""
    def finish(self) -> str:
        """What was held back, incomplete characters as U+FFFD."""

@final
class LogprobTable:
    """Log-probabilities of some positions: column 0 is the token in question, then the best ones in order.

    `token_ids` int32 [N, 1 + L], `logprobs` float32 [N, 1 + L], `ranks` int32 [N]: rank of column 0, from 1.
    """

    def __new__(cls, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], ranks: NDArray[np.int32]) -> Self: ...
    @property
    def token_ids(self) -> NDArray[np.int32]: ...
    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def ranks(self) -> NDArray[np.int32]: ...

@final
class StepPlan:
    """What one forward pass computes."""

    @property
    def step(self) -> int: ...
    @property
    def buffer(self) -> NDArray[np.int32]:
        """The plan's words. May be taken once; the array owns its memory."""
    @property
    def processed_rows(self) -> list[tuple[int, str, Any, list[int], list[int]]]:
        """Rows whose logits processors change: row, request id, processor, prompt ids, generated ids."""

@final
class Completion:
    """One sequence of an output."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str:
        """All text, or what is new for `DELTA` requests."""
    @property
    def token_ids(self) -> list[int]:
        """All generated ids, or the new ones for `DELTA` requests."""
    @property
    def cumulative_logprob(self) -> float | None: ...
    @property
    def logprobs(self) -> LogprobTable | None:
        """One row for each of `token_ids`."""
    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `abort`, `error`, or None while running."""
    @property
    def stop_reason(self) -> int | str | None: ...

@final
class Output:
    """What a commit has to tell of one request."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt(self) -> str | None: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def prompt_logprobs(self) -> LogprobTable | None:
        """One row for each prompt token but the first."""
    @property
    def completions(self) -> list[Completion]:
        """By index; beams and `best_of` best first."""
    @property
    def error(self) -> ParameterError | None:
        """Why the request failed, if it did."""
    @property
    def finished(self) -> bool: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def arrival_time(self) -> float:
        """Seconds since the epoch."""
    @property
    def queued_ts(self) -> float:
        """Seconds on the core's monotonic clock, as the three below."""
    @property
    def scheduled_ts(self) -> float: ...
    @property
    def first_token_ts(self) -> float:
        """0.0 until there is a token."""
    @property
    def last_token_ts(self) -> float: ...

@final
class Stats:
    """A snapshot of the scheduler, counts since the start unless said otherwise."""

    @property
    def num_running(self) -> int:
        """Sequences now running."""
    @property
    def num_waiting(self) -> int:
        """Requests now waiting."""
    @property
    def num_compiling(self) -> int:
        """Of those, the ones whose grammar is being compiled."""
    @property
    def num_queued_sequences(self) -> int:
        """Sequences that those will have."""
    @property
    def num_queued_tokens(self) -> int:
        """Tokens of their prompts."""
    @property
    def num_swapped(self) -> int:
        """Sequences now on the host."""
    @property
    def num_gpu_blocks(self) -> int: ...
    @property
    def num_free_gpu_blocks(self) -> int:
        """Blocks no live sequence holds, cached ones included."""
    @property
    def num_cached_gpu_blocks(self) -> int:
        """Of the free blocks, those the prefix cache can still serve."""
    @property
    def num_cpu_blocks(self) -> int: ...
    @property
    def num_free_cpu_blocks(self) -> int: ...
    @property
    def num_recomputations(self) -> int: ...
    @property
    def num_swap_outs(self) -> int: ...
    @property
    def num_copies(self) -> int:
        """Blocks copied on write."""
    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache, and below: found. Recomputations do not count."""
    @property
    def prefix_hits(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def step_tokens(self) -> int:
        """Tokens of prompts and outputs that steps computed."""
    @property
    def step_token_buckets(self) -> list[tuple[float, int]]:
        """Number of tokens, and the steps that computed at most so many; infinity comes last."""

@final
class Scheduler:
    """Queues, budgets, KV blocks, stops and text of all requests."""

    def __new__(
        cls,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = ...,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        policy: str = "fcfs",
        preemption_mode: str = "auto",
        max_logprobs: int = 20,
        graph_sizes: Sequence[int] = ...,
        cascade_tokens: int = 0,
        vocabulary: Vocabulary | None = None,
        seed: int = 0,
        processors: Sequence[tuple[str, Any]] = ...,
    ) -> Self:
        """`eos_token_ids`: the tokenizer's own first (its stop reason is None), then others that end a text.
        `graph_sizes`: decode-only plans are padded to the least of them that holds the step. `cascade_tokens`: fewest
        keys that cascades of a step must save reading; 0: plans have no cascades. `processors`: what
        `params.logits_processors` may name.
        """
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        params: Any,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter_id: int = 0,
        bad_word_ids: Sequence[Sequence[int]] = ...,
        processor: Any = None,
    ) -> None:
        """Queue a request. Raises `ParameterError` if it can never run, with the numbers in the message.

        `bad_word_ids`: what the tokenizer makes of `params.bad_words`. `processor`: comes back with each step that has
        a row of the request.
        """
    def add_message(self, message: bytes) -> int:
        """Queue a request that `FrontEnd.add` made a message of; its id is its number, which is returned."""
    def limits(self) -> bytes:
        """What a request may ask for, for a `FrontEnd`."""
    def block_map(self) -> BlockMap:
        """Who holds which device block."""
    def abort(self, request_id: str) -> bool:
        """Drop a request at once, wherever it is; False if there is none of exactly this id."""
    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing can run before the next commit. At most two steps are outstanding."""
    def commit(
        self,
        step: int,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        sample_table: LogprobTable | None = None,
        prompt_table: LogprobTable | None = None,
        candidate_table: LogprobTable | None = None,
    ) -> list[Output]:
        """Take in what the oldest outstanding step sampled.

        `token_ids` and `logprobs` [num_rows, num_candidates]; a beam row's candidates best first. `sample_table`: one
        row for each logits row, needed when `max_logprobs >= 0`; `prompt_table`: one row for each of `prompt_rows`.
        `candidate_table` [num_rows * num_candidates, 1]: what is told of candidates, if it is not what ranks them.
        Outputs: requests that finished, and those with `DELTA` or `CUMULATIVE` output that advanced.
        """
    def fail(self, request_id: str, parameter: str, message: str) -> bool:
        """End a request that cannot go on; `take_failed` tells of it. False if there is none of exactly this id."""
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar to be compiled."""
    def take_failed(self) -> list[Output]:
        """The last outputs of requests that failed since the last time, each with its `error`."""
    def has_unfinished(self) -> bool:
        """Whether a request is alive, or has failed and has not been taken."""
    def num_unfinished(self) -> int:
        """Requests waiting, running or swapped."""
    def stats(self) -> Stats: ...
    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. False, and nothing done, while a request is alive."""
    def check_invariants(self) -> None:
        """Raise `RuntimeError` if memory accounting is wrong."""

@final
class RequestState:
    """One request in the engine."""

    @property
    def request_id(self) -> str: ...
    @property
    def state(self) -> str:
        """`waiting`, `running` or `swapped`."""
    @property
    def num_sequences(self) -> int:
        """Those that have not ended."""
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int:
        """Of all its sequences."""

@final
class BlockMap:
    """All device blocks, by number, and the requests that hold them."""

    @staticmethod
    def from_bytes(message: bytes) -> BlockMap: ...
    def to_bytes(self) -> bytes: ...
    @property
    def ref_counts(self) -> NDArray[np.uint32]:
        """Block tables that hold a block; 0: it is free."""
    @property
    def owners(self) -> NDArray[np.int32]:
        """Index into `requests` of one that holds it; -1: none does."""
    @property
    def cached(self) -> NDArray[np.bool_]:
        """Whether the prefix cache finds it."""
    @property
    def requests(self) -> list[RequestState]: ...

def encode_step(outputs: Sequence[Output], stats: Stats, last_number: int) -> bytes:
    """One message of all that a step tells, for `FrontEnd.receive`. `last_number`: of the last request taken in."""

@final
class FrontEnd:
    """The requests of an engine that runs in another process: checks them, and puts together what comes back.

    News of a request is merged into what has not been taken, so that a slow reader costs one output at most.
    """

    def __new__(
        cls, limits: bytes, *, max_num_queued_reqs: int | None = None, max_num_queued_tokens: int | None = None
    ) -> Self:
        """`limits`: from `Scheduler.limits`. The others: most sequences, and most tokens of prompts, that may wait."""
    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        params: Any,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter_id: int = 0,
        bad_word_ids: Sequence[Sequence[int]] = ...,
    ) -> tuple[int, bytes]:
        """Number a request, and make the message for `Scheduler.add_message`.

        Raises `ParameterError` just as `Scheduler.add_request`, and `QueueFullError`; nothing stays behind then.
        """
    def prompt_limit(self, params: Any) -> int | None:
        """Most tokens, the last ones, that a request uses of a prompt; None: all."""
    def receive(self, message: bytes) -> list[int]:
        """Take in what `encode_step` made; the numbers of the requests that have news."""
    def take(self, number: int) -> Output | None:
        """What has come for a request since the last time. It is forgotten with its last output."""
    def abort(self, number: int) -> bool:
        """End a request with what it has so far, `finish_reason` abort. False if it has ended."""
    def drop_request(self, number: int) -> bool:
        """Forget a request. False if the engine does not have it either, since it has ended."""
    def drop_through(self, last_number: int) -> list[int]:
        """Forget the unfinished requests up to a number, which the engine has lost; their numbers."""
    def number(self, request_id: str) -> int | None:
        """Of an unfinished request."""
    def names(self) -> dict[int, str]:
        """Number -> name of each unfinished request."""
    def stats(self) -> Stats:
        """The newest that has come."""
    def num_unfinished(self) -> int: ...
