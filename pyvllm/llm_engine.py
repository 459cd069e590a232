"""`LLMEngine`: the engine for programs that step it themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Self

from pyvllm.config import EngineArgs
from pyvllm.engine import Engine
from pyvllm.inputs import Prompt, check_lora_request, parse_prompt, parse_request_id
from pyvllm.logging import StatsLog, configure_logging
from pyvllm.outputs import RequestOutput, request_output
from pyvllm.sampling_params import SamplingParams, id_list

if TYPE_CHECKING:
    from pyvllm.tokenizer import Tokenizer


class LLMEngine:
    """Requests in, outputs out. Use it from one thread."""

    def __init__(self, engine: Engine) -> None:
        """`engine`: used by nobody else. See `from_engine_args`."""
        self._engine = engine
        self._stats_log = StatsLog(interval_s=0.0)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> Self:
        """Load the model. `usage_context` is accepted for programs written for vLLM."""
        from pyvllm.loading import build_engine

        configure_logging()
        return cls(build_engine(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | None,
        params: SamplingParams | None = None,
        arrival_time: float | Sequence[int] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        lora_request: object = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id.

        `params` None: the model's defaults. `arrival_time` is accepted for programs written for vLLM; early ones give
        `prompt_token_ids` in its place. `lora_request` must be None.

        Raises `TypeError` for an id that is no string, `ValueError` for one that is in use and for whatever can never
        run; nothing of the request stays behind then.
        """
        parse_request_id(request_id)
        check_lora_request(lora_request)
        if not isinstance(params, SamplingParams | None):
            raise TypeError(f"params must be SamplingParams or None, got {type(params).__name__}")
        if arrival_time is not None and not isinstance(arrival_time, int | float | Real):
            prompt_token_ids = arrival_time
        if prompt_token_ids is not None:
            ids = id_list("prompt_token_ids", prompt_token_ids)
            prompt = {"prompt_token_ids": ids, "prompt": prompt} if isinstance(prompt, str) else ids
        if prompt is None:
            raise ValueError("prompt must be given")
        parsed = parse_prompt(prompt)
        (ids,) = self._engine.encode([parsed])
        params = params or self._engine.info.default_sampling_params
        self._engine.add_request(request_id, parsed, ids, params, priority=priority)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step: the outputs of requests that advanced, as their `output_kind` says.

        If it raises, all requests are dropped; the engine takes new ones.
        """
        return [request_output(output, self._engine.token_text) for output in self._engine.step()]

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Drop requests at once. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._engine.abort(one)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self._engine.has_unfinished()

    def get_num_unfinished_requests(self) -> int:
        """Requests that were added and have neither finished nor been dropped."""
        return self._engine.num_unfinished()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ValueError` if the engine runs without one."""
        return self._engine.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests get that bring no parameters."""
        return self._engine.info.default_sampling_params.clone()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while a request is in the engine."""
        return self._engine.reset_prefix_cache()

    def do_log_stats(self) -> None:
        """Log a line about throughput since the last one, and memory use."""
        self._stats_log.tick(self._engine)
