"""Prompts as users give them, and as the engine takes them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from pyvllm.sampling_params import check_unicode, id_list, parameter_error

if TYPE_CHECKING:
    from pyvllm.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    """The text, not empty unless the tokenizer has a BOS token."""
    cache_salt: NotRequired[str]
    """Cached prefixes are shared only among prompts of one salt."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    """The ids, not empty."""
    prompt: NotRequired[str]
    """Its text, only repeated in the output."""
    cache_salt: NotRequired[str]
    """As in `TextPrompt`."""


TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Prompt: TypeAlias = str | TokenIds | TextPrompt | TokensPrompt
"""One prompt."""


@dataclass(frozen=True, kw_only=True)
class ParsedPrompt:
    """A prompt in one shape: `token_ids`, or else `text` that has yet to be tokenized."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def is_single_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt and not a list of them. A list of integers is one, an empty list has none.

    Raises `TypeError` for what is neither.
    """
    if isinstance(prompts, str | Mapping):
        return True
    values: object = prompts
    if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview):  # an array or a tensor
        values = prompts.tolist()
    if not isinstance(values, Sequence) or isinstance(values, bytes | bytearray | memoryview):
        raise TypeError(f"prompts must be str, token ids, a dict, or a list of these, got {type(prompts).__name__}")
    if not len(values):
        return False
    return not isinstance(values[0], str | Mapping | Sequence) and not getattr(values[0], "ndim", 0)


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Tell the forms of a prompt apart.

    Raises `TypeError` for what is none of them, and `ParameterError` for a dict without a prompt or token ids that
    are not integers.
    """
    if isinstance(prompt, str):
        check_unicode("prompt", prompt)
        return ParsedPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | memoryview):
            raise TypeError(f"a prompt must be str, token ids or a dict, got {type(prompt).__name__}")
        return ParsedPrompt(token_ids=id_list("prompt_token_ids", prompt))
    unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")]
    if unknown:
        raise parameter_error("prompt", "a dict of prompt, prompt_token_ids, cache_salt", unknown)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise parameter_error("prompt", "a dict with prompt or prompt_token_ids", dict(prompt))
    salt = prompt.get("cache_salt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if not isinstance(value, str | None):
            raise parameter_error(name, "a string", value)
        check_unicode(name, value or "")
    return ParsedPrompt(
        text=text,
        token_ids=None if token_ids is None else id_list("prompt_token_ids", token_ids),
        cache_salt=salt or None,
    )


def bad_word_ids(tokenizer: Tokenizer | None, words: Sequence[str]) -> list[list[int]]:
    """Token ids of words that must not be generated: each as it is, and with a space before it if that is
    another end of tokens. Raises `ParameterError` if there is no tokenizer.
    """
    if not words:
        return []
    if tokenizer is None:
        raise parameter_error("bad_words", "empty for an engine without a tokenizer", list(words))
    found = []
    for word in words:
        bare = word.lstrip(" ") or word
        ids = tokenizer.encode(bare, add_special_tokens=False)
        spaced = tokenizer.encode(" " + bare, add_special_tokens=False)
        found.append(ids)
        if spaced[-len(ids) :] != ids:  # Else the shorter one matches wherever this one does.
            found.append(spaced)
    return [ids for ids in found if ids]


def check_lora_request(lora_request: object) -> None:
    """Raises `ParameterError` for anything but None."""
    if lora_request is not None:
        raise parameter_error("lora_request", "None (adapters are not supported)", lora_request)


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Raises `ValueError` if there is none."""
    if tokenizer is None:
        raise ValueError("there is no tokenizer: skip_tokenizer_init is True")
    return tokenizer


def encode_prompts(tokenizer: Tokenizer | None, prompts: Sequence[ParsedPrompt]) -> list[list[int]]:
    """Token ids of prompts. Raises `ParameterError` for text if there is no tokenizer."""
    texts = [prompt.text for prompt in prompts if prompt.token_ids is None and prompt.text is not None]
    if texts and tokenizer is None:
        raise parameter_error("prompt", "token ids, since the engine runs without a tokenizer", texts[0])
    encoded = iter(tokenizer.encode_batch(texts) if tokenizer and texts else ())
    return [next(encoded) if prompt.token_ids is None else prompt.token_ids for prompt in prompts]


def start_token(tokenizer: Tokenizer | None, prompt: ParsedPrompt) -> int:
    """What a prompt without tokens starts from: the BOS token. Raises `ParameterError` if there is none."""
    bos = tokenizer.bos_token_id if tokenizer else None
    if bos is None:
        raise parameter_error("prompt", "at least one token (there is no BOS token to start from)", prompt.text)
    return bos


def parse_request_id(request_id: object) -> str:
    """Raises `TypeError` for what is no string, and `ParameterError` for what is not Unicode."""
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be a string, got {type(request_id).__name__}")
    check_unicode("request_id", request_id)
    return request_id


def priority_list(priorities: Iterable[int] | None, count: int) -> list[int]:
    """One entry for each of `count` prompts, 0 for None. Raises `ParameterError` for another count and for no list."""
    if priorities is None:
        return [0] * count
    expected = f"a list with an integer for each of {count} prompts"
    if not isinstance(priorities, Iterable) or isinstance(priorities, str | bytes | Mapping):
        raise parameter_error("priority", expected, priorities)
    found = list(priorities)
    if len(found) != count:
        raise parameter_error("priority", expected, found)
    return found


def parse_priority(priority: object) -> int:
    """Raises `ParameterError` for what is not a 64-bit integer."""
    try:
        value = operator.index(priority)  # type: ignore[arg-type]
    except TypeError:
        value = None
    if value is None or isinstance(priority, bool) or not -(1 << 63) <= value < 1 << 63:
        raise parameter_error("priority", "a 64-bit integer", priority)
    return value
