"""`LLM`: text from a model, in this process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, cast

from pyvllm import _core
from pyvllm.calls import Call, Calls, naming_prompt
from pyvllm.config import EngineArgs
from pyvllm.inputs import Prompt, TokensPrompt, check_lora_request, is_single_prompt, parse_prompt, priority_list
from pyvllm.outputs import BeamSearchOutput, Metric, RequestOutput, beam_search_output, request_output
from pyvllm.progress import Progress
from pyvllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pyvllm.tokenizer import Tokenizer

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Message: TypeAlias = Mapping[str, Any]
"""One turn of a conversation: `role`, `content` and what else the chat template reads."""


class LLM:
    """A model and its engine, for use from one program.

    Methods may be called from several threads; their requests run side by side. `close()`, or leaving a `with` block,
    frees the model.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """`options`: any other field of `EngineArgs`.

        Raises `TypeError` for an unknown one, with the nearest name; `ValueError` naming a field that is out of its
        range; `FileNotFoundError` saying what was tried for a model that cannot be found.
        """
        self._start(EngineArgs.from_options(model, options))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """From a configuration object."""
        llm = cls.__new__(cls)
        llm._start(args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        from pyvllm.loading import build_engine
        from pyvllm.logging import configure_logging

        configure_logging()
        self._calls: Calls | None = Calls(build_engine(args))
        self._enqueued: list[Call] = []

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Prompt | Sequence[Prompt] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; output i belongs to prompt i.

        `prompts`: text, token ids, a `TextPrompt` or `TokensPrompt`, or a list of these. `sampling_params`: for all,
        or a list of one for each; None: the model's defaults. `prompt_token_ids`: an old way to give token ids.
        `use_tqdm`: show progress, or what to show it with. `priority`: a number for each prompt, lower ones first.
        `lora_request` is accepted for programs written for vLLM and must be None.

        Raises `ValueError` saying which prompt is wrong and how; then none of them runs.
        """
        check_lora_request(lora_request)
        prompts = _one_of(prompts, prompt_token_ids)
        with self._submit(prompts, sampling_params, priority, final_only=True) as call:
            return self._finish([call], use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, giving each request's outputs as they come: all so far, or with `DELTA` what is new.

        Outputs of several prompts come interleaved; their `request_id`s count up in the order of the prompts. Leaving
        the loop drops what has not finished. The call itself checks and queues the prompts.
        """
        outputs = self._stream(self._submit(prompts, sampling_params, priority, final_only=False))
        next(outputs)  # A generator that has not begun would not clean up.
        return cast(Iterator[RequestOutput], outputs)

    def _stream(self, call: Call) -> Iterator[RequestOutput | None]:
        with call:
            yield None  # Taken by `stream`.
            for output in call.outputs():
                yield self._request_output(output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them; the options are those of `render_chat`."""
        prompts = self.render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: object = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """The most probable continuations of each prompt, best first."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
        tokenizer = self._live().engine.tokenizer
        found = []
        for output in self.generate(prompts, params.to_sampling_params(), use_tqdm=use_tqdm, lora_request=lora_request):
            text = output.prompt
            if text is None:
                text = tokenizer.decode(output.prompt_token_ids) if tokenizer else ""
            found.append(beam_search_output(output, text))
        return found

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue prompts and return their request ids at once; `wait_for_completion` runs them."""
        call = self._submit(prompts, sampling_params, priority, final_only=True)
        self._enqueued.append(call)
        return list(call.ids)

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """Outputs of all that was enqueued, in that order."""
        calls, self._enqueued = self._enqueued, []
        with contextlib.ExitStack() as stack:
            for call in calls:
                stack.enter_context(call)
            return self._finish(calls, use_tqdm)

    def render_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[TokensPrompt]:
        """The prompts that a conversation, or each of a list of them, makes.

        `chat_template`: text or path, in place of the model's. `add_generation_prompt`: begin the answer.
        `continue_final_message`: go on with the last message instead. `tools` and `chat_template_kwargs` are handed to
        the template.

        Raises `ValueError` if there is no template, or with its own words if the template refuses the messages.
        """
        tokenizer = self.get_tokenizer()
        given = chat_template or self._live().engine.info.chat_template
        single = not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)
        prompts = []
        for conversation in [messages] if single else messages:
            text = tokenizer.render_chat(
                cast(Sequence[Message], conversation),
                chat_template=given,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            # The template has written what special tokens there are to be.
            prompts.append(TokensPrompt(prompt=text, prompt_token_ids=tokenizer.encode(text, add_special_tokens=False)))
        return prompts

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ValueError` if the engine runs without one."""
        return self._live().engine.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests get that bring no parameters: the values of the model's generation_config.json, if any."""
        return self._live().engine.info.default_sampling_params.clone()

    def get_metrics(self) -> list[Metric]:
        """Gauges and counters of the engine under their Prometheus names."""
        stats = self._live().engine.stats()
        values = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "num_requests_swapped": stats.num_swapped,
            "kv_cache_usage_perc": 1 - stats.num_free_gpu_blocks / stats.num_gpu_blocks,
            "num_preemptions_total": stats.num_recomputations + stats.num_swap_outs,
            "prompt_tokens_total": stats.prompt_tokens,
            "generation_tokens_total": stats.generation_tokens,
            "prefix_cache_queries_total": stats.prefix_queries,
            "prefix_cache_hits_total": stats.prefix_hits,
        }
        return [Metric(name=f"pyvllm:{name}", value=value) for name, value in values.items()]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while a request is in the engine."""
        return self._live().engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model; requests that are left are dropped. Any other use of this object raises from then on."""
        self._calls = None
        self._enqueued = []

    def __reduce__(self) -> NoReturn:
        """A model has memory of its own, which nothing copies."""
        raise TypeError("an LLM cannot be copied or pickled: make it in the process that uses it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _live(self) -> Calls:
        if self._calls is None:
            raise RuntimeError("this LLM is closed")
        return self._calls

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params,
        priority: Sequence[int] | None,
        *,
        final_only: bool,
    ) -> Call:
        """Queue prompts in any of their forms."""
        calls = self._live()
        single = is_single_prompt(prompts)
        parsed = []
        for index, prompt in enumerate([prompts] if single else prompts):
            with naming_prompt(None if single else index):
                parsed.append(parse_prompt(cast(Prompt, prompt)))
        params = _params_list(sampling_params, len(parsed), calls.engine.info.default_sampling_params)
        if final_only:
            params = _final_only(params)
        return calls.submit(parsed, params, priority_list(priority, len(parsed)), name_index=not single)

    def _finish(self, calls: Sequence[Call], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Run calls to their end: their outputs in the order of their prompts."""
        total = sum(len(call.ids) for call in calls)
        outputs = {}
        with Progress(use_tqdm, total, self._live().engine) as progress:
            for call in calls:
                for output in call.outputs(progress.tick):
                    outputs[output.request_id] = self._request_output(output)
                    progress.finish_one()
        return [outputs[request_id] for call in calls for request_id in call.ids]

    def _request_output(self, output: _core.Output) -> RequestOutput:
        if output.error is not None:
            raise output.error
        return request_output(output, self._live().engine.token_text)


def _one_of(
    prompts: Prompt | Sequence[Prompt] | None, prompt_token_ids: Prompt | Sequence[Prompt] | None
) -> Prompt | Sequence[Prompt]:
    """The prompts, by whichever name they came. Texts may come along with their ids."""
    if prompt_token_ids is None:
        if prompts is None:
            raise ValueError("prompts must be given")
        return prompts
    if prompts is None:
        return prompt_token_ids
    texts = [prompts] if isinstance(prompts, str) else prompts
    ids = [prompt_token_ids] if is_single_prompt(prompt_token_ids) else prompt_token_ids
    if not isinstance(texts, Sequence) or not all(isinstance(text, str | None) for text in texts):
        raise ValueError("prompts must be text if there are prompt_token_ids too")
    if len(texts) != len(ids):
        raise ValueError(f"prompts has {len(texts)} entries, but prompt_token_ids has {len(ids)}")
    return [
        TokensPrompt(prompt=cast(str, text), prompt_token_ids=cast(Sequence[int], one))
        for text, one in zip(texts, ids, strict=True)
    ]


def _params_list(params: Params, count: int, default: SamplingParams) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries, but there are {count} prompts")
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params[{index}] must be SamplingParams, got {type(one).__name__}")
    return list(params)


def _final_only(params: list[SamplingParams]) -> list[SamplingParams]:
    """The same parameters, with outputs only at the end; one copy of each object."""
    copies: dict[int, SamplingParams] = {}
    for one in params:
        if id(one) not in copies:
            copies[id(one)] = copy.copy(one)
            copies[id(one)].output_kind = RequestOutputKind.FINAL_ONLY
    return [copies[id(one)] for one in params]
