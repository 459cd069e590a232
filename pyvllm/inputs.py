"""Prompts as users give them, and as the engine takes them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from pyvllm.sampling_params import parameter_error


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
    """Whether this is one prompt and not a list of them. A list of integers is one, an empty list has none."""
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and prompts.dtype != object
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be str, token ids, a dict, or a list of these, got {type(prompts).__name__}")
    return bool(len(prompts)) and not isinstance(prompts[0], str | Mapping | Sequence | np.ndarray)


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Tell the forms of a prompt apart.

    Raises `TypeError` for what is none of them, and `ParameterError` for a dict without a prompt or token ids that
    are not integers.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(token_ids=token_id_list(prompt))
    unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"})
    if unknown:
        raise parameter_error("prompt", "a dict of prompt, prompt_token_ids, cache_salt", unknown)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise parameter_error("prompt", "a dict with prompt or prompt_token_ids", dict(prompt))
    salt = prompt.get("cache_salt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if not isinstance(value, str | None):
            raise parameter_error(name, "a string", value)
    return ParsedPrompt(
        text=text, token_ids=None if token_ids is None else token_id_list(token_ids), cache_salt=salt or None
    )


def token_id_list(token_ids: object) -> list[int]:
    """Token ids as a list of Python integers. Raises `ParameterError` for what is not an integer, bools included."""
    if isinstance(token_ids, np.ndarray):
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, str | bytes | Mapping):
        raise TypeError(f"a prompt must be str, token ids or a dict, got {type(token_ids).__name__}")
    ids = list(token_ids)
    for place, token_id in enumerate(ids):
        if type(token_id) is int:
            continue
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise parameter_error("prompt_token_ids", "a list of integers", token_id)
        ids[place] = operator.index(token_id)
    return ids
