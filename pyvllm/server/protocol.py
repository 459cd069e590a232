"""Bodies of requests, as clients send them.

Null means that a field is not given. Sampling parameters are those of `SamplingParams`, whose names, types and
descriptions are taken over; what may be in them is checked there, once. The rest is checked here.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema, create_model

from pyvllm.arguments import field_docs
from pyvllm.sampling_params import SamplingParams

_INTERNAL: Final = ("detokenize", "output_kind", "guided_decoding")
"""Fields of `SamplingParams` that are no client's business."""

SAMPLING_FIELDS: Final = tuple(item.name for item in dataclasses.fields(SamplingParams) if item.name not in _INTERNAL)
"""Fields of `SamplingParams` that requests may have."""

NOT_YET: Final = {
    "vllm_xargs": "argument of logits processors",
    "tools": "tool calls",
    "functions": "tool calls",
    "function_call": "tool calls",
    "audio": "audio output",
    "prediction": "predicted outputs",
    "web_search_options": "web search",
    "stream_interval": "an interval of stream chunks",
}
"""Known fields whose feature does not exist -> what that is."""

Json: TypeAlias = dict[str, Any]
_PROMPT_SCHEMA: Final = TypeAdapter(str | list[str] | list[int] | list[list[int]]).json_schema()


class Body(BaseModel):
    """A JSON object of known fields and exact types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class StreamOptions(Body):
    """What a stream holds beside the text."""

    include_usage: bool = False
    """End with a chunk that has the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Have the usage so far in every chunk."""
    include_obfuscation: bool = False
    """Accepted; chunks are never padded."""


class ResponseFormat(Body):
    """What form the text is to have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """text is any; structural_tag is free text with tags whose content has a form."""
    json_schema: Json | None = None
    """For json_schema: an object whose field schema is one."""
    structures: list[Json] | None = Field(default=None, fail_fast=True)
    """For structural_tag: the tags, objects of begin, schema and end."""
    triggers: list[str] | None = Field(default=None, fail_fast=True)
    """For structural_tag: the texts after which a tag has to go on."""


class GenerationBody(Body):
    """Fields that completions and chats share, beside the sampling parameters."""

    model: str | None = None
    """One of the served names; without it, the first."""
    stream: bool = False
    """Answer with server-sent events, as the text is made."""
    stream_options: StreamOptions | None = None
    """Only with stream."""
    response_format: ResponseFormat | None = None
    """The form of the text, as OpenAI has it; structured_outputs has more of them."""
    guided_json: str | Json | None = None
    """The text is JSON of this schema: an older name of structured_outputs.json."""
    guided_regex: str | None = None
    """The text matches this expression: an older name of structured_outputs.regex."""
    guided_choice: list[str] | None = Field(default=None, fail_fast=True)
    """The text is one of these: an older name of structured_outputs.choice."""
    guided_grammar: str | None = None
    """The text is one of this grammar: an older name of structured_outputs.grammar."""
    guided_whitespace_pattern: str | None = None
    """Whitespace of guided_json: an older name of structured_outputs.whitespace_pattern."""
    guided_decoding_backend: str | None = None
    """Ignored: there is one implementation."""
    priority: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    """Lower runs first, if the engine's policy is priority."""
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,128}$")
    """Part of the answer's id, before X-Request-Id."""
    cache_salt: str | None = Field(default=None, pattern=r"^[\x21-\x2e\x30-\x7e]{1,256}$")
    """Cached prefixes are shared only among requests of one salt; 1 to 256 visible ASCII characters, no slash."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """Keep only this many of the prompt's last tokens; -1: as many as the model takes."""
    return_token_ids: bool = False
    """Have the ids of prompt and output in the answer."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in log-probabilities as token_id:N."""
    user: str | None = None
    """Ignored, like the fields below: what they are for is not the server's business."""
    metadata: Json | None = None
    """Ignored."""
    service_tier: str | None = None
    """Ignored."""


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = None
    """A text, token ids, or a list of either. Nothing: the model's BOS token."""
    echo: bool = False
    """Put the prompt before the text."""
    suffix: str | None = None
    """Text that is to follow, for models trained to fill in."""
    add_special_tokens: bool = True
    """Begin a prompt's tokens as the tokenizer does by default (BOS)."""


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Json] = Field(min_length=1, fail_fast=True)
    """The conversation; contents are strings or lists of text parts."""
    logprobs: bool = False
    """Have the log-probability of each token in the answer."""
    top_logprobs: int | None = None
    """So many most probable tokens at each position too; only with logprobs."""
    max_completion_tokens: int | None = None
    """Most tokens to generate. Without it max_tokens, then what the context has room for."""
    echo: bool = False
    """Put the last message before the answer, if it has the same role."""
    add_special_tokens: bool = False
    """Begin the prompt as the tokenizer does by default, besides what the template writes."""
    add_generation_prompt: bool | None = None
    """Begin the answer. Without it: unless continue_final_message is set."""
    continue_final_message: bool = False
    """Go on with the last message."""
    chat_template: str | None = None
    """A template's text in place of the model's; only if the server trusts its clients with that."""
    chat_template_kwargs: Json | None = None
    """Variables for the template."""
    documents: list[Json] | None = Field(default=None, fail_fast=True)
    """Documents for the template."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A variable for the template."""
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    """Only none: there are no tool calls."""
    parallel_tool_calls: bool | None = None
    """Without meaning while there are no tool calls."""
    modalities: list[Literal["text"]] | None = None
    """Only text."""
    store: bool | None = None
    """Ignored: nothing is stored."""
    safety_identifier: str | None = None
    """Ignored."""
    prompt_cache_key: str | None = None
    """Ignored: prefixes are cached whatever it is."""
    prompt_cache_retention: str | None = None
    """Ignored."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Ignored."""


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    """One of the served names."""
    prompt: str | None = None
    """A text."""
    messages: list[Json] | None = Field(default=None, min_length=1, fail_fast=True)
    """A conversation, in place of prompt."""
    add_special_tokens: bool | None = None
    """With BOS and so on. Without it: for a prompt yes, for messages no."""
    add_generation_prompt: bool | None = None
    """As for chats."""
    continue_final_message: bool = False
    """As for chats."""
    chat_template: str | None = None
    """As for chats."""
    chat_template_kwargs: Json | None = None
    """As for chats."""
    return_token_strs: bool = False
    """Have the text of each token in the answer."""


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    """One of the served names."""
    tokens: list[int] = Field(fail_fast=True)
    """Ids; those that the tokenizer does not know have no text."""


class DemoBody(Body):
    """POST /generate of the demo server."""

    prompt: str
    """A text."""
    stream: bool = False
    """Answer with all so far, after each step."""


def _sampling_definitions() -> dict[str, Any]:
    docs, hints = field_docs(SamplingParams), get_type_hints(SamplingParams)
    # The keys of a JSON object are strings, and functions do not travel.
    hints["logit_bias"] = dict[str, float]
    hints["logits_processors"] = list[str] | None
    docs["logits_processors"] = (
        "Functions that change the logits of each token, one after the other, before anything else does: names of "
        "those that the server was started with (--logits-processors)."
    )
    made: dict[str, Any] = {}
    for name in SAMPLING_FIELDS:
        schema = TypeAdapter(hints[name]).json_schema()
        made[name] = (Annotated[Any, Field(description=docs[name]), WithJsonSchema(schema)], None)
    return made


def _planned_definitions() -> dict[str, Any]:
    return {
        name: (Annotated[Any, Field(description=f"Not supported yet ({feature}): 501.")], None)
        for name, feature in NOT_YET.items()
    }


_B = TypeVar("_B", bound=Body)


def _with_sampling(name: str, own: type[_B]) -> type[_B]:
    """A body with the fields of `own`, the sampling parameters, and what does not exist yet."""
    fields = {
        field: definition
        for field, definition in (_sampling_definitions() | _planned_definitions()).items()
        if field not in own.model_fields
    }
    return create_model(name, __base__=own, __doc__=own.__doc__, **fields)


CompletionRequest: Final = _with_sampling("CompletionRequest", CompletionBody)
ChatCompletionRequest: Final = _with_sampling("ChatCompletionRequest", ChatBody)
GenerateRequest: Final = _with_sampling("GenerateRequest", DemoBody)
