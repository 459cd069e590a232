"""What a request asks of the sampler, and when it stops."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, Self, TypeAlias

from pyvllm import _core
from pyvllm._core import ParameterError
from pyvllm.parameter_error import parameter_error
from pyvllm.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "ParameterError",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "parameter_error",
]

LogitsProcessor: TypeAlias = Callable[..., Any]
"""See `SamplingParams.logits_processors`."""

MAX_N: Final = 16_384
"""Most sequences one request may have."""


def check_unicode(parameter: str, text: str) -> None:
    """Raise `ParameterError` for a lone surrogate, which neither tokenizers nor the core take."""
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        error = ParameterError(f"{parameter} has a lone surrogate at index {cause.start}: it is not Unicode")
        error.parameter, error.value = parameter, text
        raise error from None


def id_list(parameter: str, ids: object) -> list[int]:
    """Token ids from any iterable, array or tensor of integers, as a list.

    Raises `ParameterError` for what is not an integer, bools included, and for text and bytes, which iterate too.
    """
    expected = "a list of integers"
    if hasattr(ids, "tolist") and not isinstance(ids, memoryview):  # an array or a tensor
        ids = ids.tolist()
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | bytearray | memoryview | Mapping):
        raise parameter_error(parameter, expected, ids)
    found: list[Any] = list(ids)
    if set(map(type, found)) <= {int}:  # a prompt as a rule, which may be long
        return found
    for place, token_id in enumerate(found):
        # A tensor of one element has an index even if it is a list.
        is_list = getattr(token_id, "ndim", 0) != 0
        if is_list or isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise parameter_error(parameter, expected, token_id)
        found[place] = operator.index(token_id)
    return found


class RequestOutputKind(IntEnum):
    """What a request's outputs hold, and when they come."""

    CUMULATIVE = 0
    """Everything so far, after each step."""
    DELTA = 1
    """What is new, after each step."""
    FINAL_ONLY = 2
    """Everything, once, at the end."""


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names and meaning.

    Checked on construction and again when a request is added. Raises `ParameterError` (a `ValueError` with
    `.parameter` and `.value`) that names the field, its value and the allowed range.
    """

    n: int = 1
    """Sequences to return, 1 to 16384. The prompt is computed once for all of them."""

    best_of: int | None = None
    """Sequences to run, at least `n`; the `n` of highest cumulative log-probability are returned. None: `n`. With
    `use_beam_search` it is the beam width."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated; -2 to 2."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated; -2 to 2."""

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; above 0, 1 is off."""

    temperature: float = 1.0
    """Divides the logits, at least 0. Below 1e-5 sampling is greedy and `top_p`, `top_k`, `min_p` have no effect."""

    top_p: float = 1.0
    """Keep the fewest most probable tokens whose probabilities reach this sum; 0 to 1, 0 keeps only the best."""

    top_k: int = 0
    """Keep this many most probable tokens (and those tied with the last); 0 or -1 is off."""

    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable one; 0 to 1."""

    seed: int | None = None
    """Makes draws repeatable in any batch; sequence i of `n` uses seed + i. None or -1: no seed."""

    stop: str | list[str] | None = None
    """Strings that end the text, also across tokens; the text is cut before the first match."""

    stop_token_ids: list[int] | None = None
    """Token ids that end a sequence."""

    stop_regex: str | list[str] | None = None
    """Regular expressions (Rust's syntax, without look-ahead) whose first match ends the text, up to 1024 bytes long;
    the text is cut before it. Of several matches the one that ends first counts."""

    bad_words: list[str] | None = None
    """Words that are not generated, neither as they are nor with a space before them: the last of a word's tokens is
    banned after the others. A word of several tokens makes its sequence wait for the host after each token."""

    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the stop token, at the end of the text."""

    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""

    truncate_prompt_tokens: int | None = None
    """Use only so many tokens of the prompt, its last ones. -1: as many as leave room for max_tokens in the
    model's length (for one token or min_tokens if it is None or more than that); None: all, and what is too long is
    refused."""

    max_tokens: int | None = 16
    """Most tokens to generate for a sequence, at least 1. None: up to the model's length."""

    min_tokens: int = 0
    """Tokens to generate before end of sequence, stop tokens or stop strings count."""

    logprobs: int | None = None
    """Most probable tokens whose log-probabilities come with each generated token, whose own is always there. 0: only
    its own; -1: the whole vocabulary; None: none. `EngineArgs.logprobs_mode` says what they are taken from."""

    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""

    detokenize: bool = True
    """Make text. Without it outputs have only token ids."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    spaces_between_special_tokens: bool = True
    """Kept for programs written for vLLM: text is joined as `tokenizer.json` says, which has no such spaces."""

    logit_bias: dict[int, float] | None = None
    """Token id -> number from -100 to 100 added to its logit."""

    allowed_token_ids: list[int] | None = None
    """The only ids that may be generated. None: all."""

    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have, such as JSON that fits a schema. The request waits until its grammar is
    compiled, and its sequences for the host after each token. A sequence ends where its form is complete."""

    guided_decoding: StructuredOutputsParams | None = None
    """vLLM's older name of `structured_outputs`."""

    logits_processors: list[LogitsProcessor | str] | None = None
    """Functions that change the logits [vocabulary] float32 of each token, one after the other, before anything else
    does: `f(token_ids, logits) -> logits` with the ids generated so far, or `f(prompt_token_ids, token_ids, logits)`.
    They run on the host: the request waits for each token, and its logits leave the device. An engine in a process of
    its own takes only names of its `EngineArgs.logits_processors`."""

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What outputs hold, for `LLM.stream` and `LLMEngine`; `LLM.generate` returns only the end."""

    use_beam_search: bool = False
    """Beam search of width `best_of`; needs temperature 0."""

    length_penalty: float = 1.0
    """A beam's score is its cumulative log-probability divided by its length to this power."""

    early_stopping: bool | Literal["never"] = False
    """When a beam search ends. True: as soon as there are `best_of` finished beams; False: when a better one is
    unlikely; "never": when no better one is possible."""

    def __post_init__(self) -> None:
        """Bring `stop` and the lists to one shape, then validate."""
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        # What can be iterated only once would be empty when the request is added.
        self.stop_token_ids = [] if self.stop_token_ids is None else id_list("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = id_list("allowed_token_ids", self.allowed_token_ids)
        for name in ("stop_regex", "bad_words"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                setattr(self, name, [] if value is None else [value])
        for name in ("structured_outputs", "guided_decoding"):
            form: object = getattr(self, name)
            if not isinstance(form, StructuredOutputsParams | None):
                raise parameter_error(name, "None or a StructuredOutputsParams", form)
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise parameter_error("guided_decoding", "None beside structured_outputs", self.guided_decoding)
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        self._check_processors()
        _core.validate_params(self)

    def _check_processors(self) -> None:
        functions = self.logits_processors
        if functions is None:
            return
        valid = isinstance(functions, list | tuple)
        if not valid or not all(callable(function) or isinstance(function, str) for function in functions):
            raise parameter_error("logits_processors", "None or a list of functions and names", functions)

    def clone(self) -> Self:
        """A copy that shares nothing mutable with this one but the functions of `logits_processors`."""
        functions = self.logits_processors or []
        return copy.deepcopy(self, {id(function): function for function in functions})


@dataclass(kw_only=True)
class BeamSearchParams:
    """What `LLM.beam_search` asks. Scores as in transformers: the length counts a final end-of-sequence token.

    Raises `ParameterError` on construction, as `SamplingParams` does.
    """

    beam_width: int
    """Beams kept after each token, at least 1."""

    max_tokens: int
    """Most tokens to generate."""

    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""

    temperature: float = 0.0
    """0, the only value a beam search that does not draw can have."""

    length_penalty: float = 1.0
    """A beam's score is its cumulative log-probability divided by its length to this power."""

    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the stop token, at the end of the text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    allowed_token_ids: list[int] | None = None
    """The only ids that may be generated. None: all."""

    early_stopping: bool | Literal["never"] = False
    """When the search ends, see `SamplingParams.early_stopping`."""

    stop: str | list[str] | None = None
    """Strings that end a beam."""

    stop_regex: str | list[str] | None = None
    """Regular expressions that end a beam, see `SamplingParams.stop_regex`."""

    stop_token_ids: list[int] | None = None
    """Token ids that end a beam."""

    num_return_sequences: int | None = None
    """Sequences to return, best first, at most `beam_width`. None: `beam_width`. Where fewer tokens are
    allowed than there are beams, there may be fewer."""

    logprobs: int | None = None
    """As `SamplingParams.logprobs`, for each token of the returned beams."""

    structured_outputs: StructuredOutputsParams | None = None
    """The form that every beam must have, see `SamplingParams.structured_outputs`."""

    def __post_init__(self) -> None:
        """Validate what has another name, or another range, in `SamplingParams`; that checks the rest."""
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_N:
            raise parameter_error("beam_width", f"an integer from 1 to {MAX_N}", self.beam_width)
        count = self.num_return_sequences
        if count is not None and (type(count) is not int or not 1 <= count <= self.beam_width):
            expected = f"None or an integer from 1 to beam_width ({self.beam_width})"
            raise parameter_error("num_return_sequences", expected, count)
        if self.temperature != 0:
            raise parameter_error("temperature", "0 in a beam search", self.temperature)
        self.stop_token_ids = [] if self.stop_token_ids is None else id_list("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = id_list("allowed_token_ids", self.allowed_token_ids)
        self.to_sampling_params()

    def to_sampling_params(self) -> SamplingParams:
        """The same search as the engine takes it. A width of 1 is a greedy sequence."""
        beams = self.beam_width > 1
        return SamplingParams(
            n=self.num_return_sequences or self.beam_width,
            best_of=self.beam_width,
            use_beam_search=beams,
            temperature=self.temperature,
            length_penalty=self.length_penalty if beams else 1.0,
            early_stopping=self.early_stopping if beams else False,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
            stop_regex=self.stop_regex,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            allowed_token_ids=self.allowed_token_ids,
            logprobs=self.logprobs if beams or self.logprobs is not None else 0,
            structured_outputs=self.structured_outputs,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
