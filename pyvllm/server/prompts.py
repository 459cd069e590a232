"""What a request says to begin from, as the engine takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pyvllm.chat import render_chat
from pyvllm.inputs import ParsedPrompt
from pyvllm.sampling_params import check_unicode
from pyvllm.server.errors import bad_request, chat_error
from pyvllm.tokenizer import Tokenizer

_FIM_TOKENS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
"""Prefix, suffix and middle tokens of models trained to fill in."""


@dataclass(frozen=True, kw_only=True)
class ReadyPrompt:
    """A prompt and its token ids."""

    parsed: ParsedPrompt
    token_ids: list[int]


def parse_prompts(value: object, cache_salt: str | None, most: int) -> list[ParsedPrompt]:
    """A completion's `prompt` in any of its forms. Nothing is the empty text.

    `most`: prompts in a list. Raises `ApiError` naming the part that is wrong.
    """
    if value is None or isinstance(value, str):
        return [_text(value or "", "prompt", cache_salt)]
    if not isinstance(value, list) or not value:
        raise bad_request("prompt", f"prompt must be a text, token ids, or a list of either, got {_shown(value)}")
    if isinstance(value[0], int | float):
        return [_ids(value, "prompt", cache_salt)]
    if len(value) > most:
        raise bad_request("prompt", f"prompt must be a list of at most {most} prompts, got {len(value)}")
    if isinstance(value[0], str):
        return [_text(text, f"prompt[{i}]", cache_salt) for i, text in enumerate(value)]
    return [_ids(ids, f"prompt[{i}]", cache_salt) for i, ids in enumerate(value)]


def _text(value: object, where: str, cache_salt: str | None) -> ParsedPrompt:
    if not isinstance(value, str):
        raise bad_request("prompt", f"{where} must be a text like the first, got {_shown(value)}")
    check_unicode("prompt", value)
    return ParsedPrompt(text=value, cache_salt=cache_salt)


def _ids(value: object, where: str, cache_salt: str | None) -> ParsedPrompt:
    if not isinstance(value, list) or not value:
        raise bad_request("prompt", f"{where} must be a list of token ids that is not empty, got {_shown(value)}")
    for i, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < 1 << 31:
            raise bad_request("prompt", f"{where}[{i}] must be a token id, got {_shown(token_id)}")
    return ParsedPrompt(token_ids=value, cache_salt=cache_salt)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else shown[:100] + "..."


def encode_without_additions(tokenizer: Tokenizer, prompts: Sequence[ParsedPrompt]) -> list[ParsedPrompt]:
    """Prompts of text as token ids without what the tokenizer adds by default. Runs off the event loop."""
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    ids = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    return [prompt if prompt.text is None else replace(prompt, token_ids=next(ids)) for prompt in prompts]


def encode_with_gap(
    tokenizer: Tokenizer, prompts: Sequence[ParsedPrompt], suffix: str, *, add_special_tokens: bool
) -> list[ParsedPrompt]:
    """Prompts to which the model is to find what lies between them and `suffix`. Runs off the event loop.

    Raises `ApiError` if it was not trained for that.
    """
    before, between, after = fim_token_ids(tokenizer)
    check_unicode("suffix", suffix)
    suffix_ids = tokenizer.encode(suffix, add_special_tokens=False)
    start = tokenizer.encode("") if add_special_tokens else []
    made = []
    for prompt in prompts:
        if prompt.text is None:
            raise bad_request("suffix", "suffix needs a prompt that is text")
        prefix_ids = tokenizer.encode(prompt.text, add_special_tokens=False)
        made.append(replace(prompt, token_ids=[*start, before, *prefix_ids, between, *suffix_ids, after]))
    return made


def fim_token_ids(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """The tokens before the prefix, the suffix and the middle. Raises `ApiError` if the model has none."""
    for names in _FIM_TOKENS:
        before, between, after = (tokenizer.token_id(name) for name in names)
        if before is not None and between is not None and after is not None:
            return before, between, after
    raise bad_request("suffix", "suffix is not supported by this model: its tokenizer has no fill-in-the-middle tokens")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat's prompt is made of."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    template: str
    """Text of the template."""
    template_kwargs: dict[str, Any]
    documents: list[dict[str, Any]] | None
    add_special_tokens: bool


def encode_chat(tokenizer: Tokenizer, chat: Conversation, cache_salt: str | None) -> ReadyPrompt:
    """The prompt of a conversation. Runs off the event loop. Raises `ApiError` naming what is wrong."""
    try:
        text = render_chat(
            chat.template,
            chat.messages,
            special_tokens=tokenizer.special_tokens,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            documents=chat.documents,
            template_kwargs=chat.template_kwargs,
        )
        ids = tokenizer.encode(text, add_special_tokens=chat.add_special_tokens)
    except ValueError as error:
        raise chat_error(error) from None
    return ReadyPrompt(parsed=ParsedPrompt(text=text, token_ids=ids, cache_salt=cache_salt), token_ids=ids)


def truncated(prompt: ReadyPrompt, most: int | None) -> ReadyPrompt:
    """The prompt's last `most` tokens; None: all."""
    if most is None or len(prompt.token_ids) <= most:
        return prompt
    ids = prompt.token_ids[-most:]
    return ReadyPrompt(parsed=replace(prompt.parsed, text=None, token_ids=ids), token_ids=ids)
