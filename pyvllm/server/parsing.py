"""From the bytes of a request to a body, and from a body to `SamplingParams`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from pyvllm.sampling_params import SamplingParams, parameter_error
from pyvllm.server.config import UnknownFields
from pyvllm.server.errors import ApiError, bad_request, not_supported
from pyvllm.server.forms import structured_outputs
from pyvllm.server.protocol import NOT_YET, SAMPLING_FIELDS, Body

MAX_TEMPERATURE: Final = 2.0
MAX_STOPS: Final = 64
MAX_PROCESSORS: Final = 64
MAX_BAD_WORDS: Final = 1024
MAX_BAD_CHARACTERS: Final = 1 << 14
"""Of all bad words, which become tokens on the event loop, while everybody waits."""
MAX_DEPTH: Final = 100
"""Objects and lists within each other: what checks, copies or shows values goes a call deeper for each."""
WARNING_HEADER: Final = "Warning"
_JSON_TYPES: Final = ("application/json", "+json")

_B = TypeVar("_B", bound=Body)


async def read_json(request: Request, limit: int, *, any_type: bool = False) -> dict[str, Any]:
    """The JSON object of a request.

    `limit`: most bytes. `any_type`: whatever the content type says. Raises `ApiError` 413, 415 or 400, and
    `ClientDisconnect`.
    """
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if not any_type and not kind.endswith(_JSON_TYPES):
        raise ApiError(415, f"Content-Type must be application/json, got {kind[:100]!r}")
    stated = request.headers.get("content-length", "")
    too_large = ApiError(413, f"the body must have at most {limit} bytes (the server's max_body_bytes)")
    if stated.isdigit() and int(stated) > limit:
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large
        more = message.get("more_body", False)
    content = b"".join(parts)
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise bad_request(None, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise bad_request(None, f"the body must be a JSON object, got {type(found).__name__}")
    if content.count(b"{") + content.count(b"[") > MAX_DEPTH:
        _check_depth(found)
    return found


def _children(value: object) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_depth(found: Mapping[str, Any]) -> None:
    """Raise `ApiError` naming the first field that is nested too deeply."""
    for name, value in found.items():
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [child for item in level for child in _children(item)]
            if not level:
                break
        else:
            raise bad_request(_clean(name), f"{_clean(name)} must be nested at most {MAX_DEPTH} deep")


def parse_body(model: type[_B], found: Mapping[str, Any], unknown: UnknownFields) -> tuple[_B, dict[str, str]]:
    """The body, and headers for its answer. Raises `ApiError` naming the first field that is wrong."""
    given = {name: value for name, value in found.items() if value is not None}
    extra = [name for name in found if name not in model.model_fields]
    headers = {}
    if extra and unknown == "error":
        raise bad_request(_clean(extra[0]), _unknown(extra[0], list(model.model_fields)))
    if extra:
        listed = ", ".join(_clean(name) for name in extra[:8])
        headers[WARNING_HEADER] = f'299 - "unknown fields ignored: {listed}"'
        given = {name: value for name, value in given.items() if name in model.model_fields}
    for name, feature in NOT_YET.items():
        if name in given:
            if given[name] == [] and name in ("tools", "functions"):
                raise bad_request(name, f"{name} must not be empty: leave it out")
            raise not_supported(name, f"there is no {feature}")
    try:
        return model.model_validate(given), headers
    except ValidationError as error:
        raise _wrong_field(error) from None


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown field {_clean(name)!r}" + (f"; did you mean {near[0]}?" if near else "")


def _clean(name: str) -> str:
    """A client's own name for a field, fit for a header and a message."""
    text = name if len(name) <= 64 else name[:64] + "..."
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in text)


def _wrong_field(error: ValidationError) -> ApiError:
    """The first thing that is wrong. A field that may have several types has an error for each of them."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    name = str(first["loc"][0]) if first["loc"] else None
    same = [one for one in errors if one["loc"][:1] == first["loc"][:1]]
    # Of the types of a union, the one that fitted furthest says most.
    deepest = max(same, key=lambda one: len(one["loc"]))
    place = ".".join(str(part) for part in first["loc"][:1])
    if len(same) == 1:
        place = ".".join(str(part) for part in first["loc"])
    text = deepest["msg"][:1].lower() + deepest["msg"][1:]
    shown = repr(deepest["input"])
    got = "" if deepest["type"] == "missing" else f", got {shown if len(shown) <= 200 else shown[:200] + '...'}"
    return bad_request(name, f"{place}: {text}{got}")


def given_sampling(body: Body, processors: Sequence[str]) -> dict[str, Any]:
    """The sampling parameters that a body has, as `SamplingParams` takes them.

    `processors`: what `logits_processors` may name. Raises `ParameterError` for what is narrower over HTTP than
    elsewhere.
    """
    given = {name: body.__dict__[name] for name in body.model_fields_set if name in SAMPLING_FIELDS}
    temperature = given.get("temperature")
    if isinstance(temperature, int | float) and temperature > MAX_TEMPERATURE:
        raise parameter_error("temperature", f"a number from 0 to {MAX_TEMPERATURE:g}", temperature)
    _check_sizes(given)
    _check_processors(given.get("logits_processors"), processors)
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    if "structured_outputs" in given:
        given["structured_outputs"] = structured_outputs(given["structured_outputs"])
    return given


def _check_sizes(given: Mapping[str, Any]) -> None:
    """Raise `ParameterError` for more than a request may make others wait for."""
    stop, words = given.get("stop"), given.get("bad_words")
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise parameter_error("stop", f"at most {MAX_STOPS} strings", f"{len(stop)} strings")
    texts = [text for text in (words if isinstance(words, list) else [words]) if isinstance(text, str)]
    size = sum(map(len, texts))
    if len(texts) > MAX_BAD_WORDS or size > MAX_BAD_CHARACTERS:
        expected = f"at most {MAX_BAD_WORDS} words of {MAX_BAD_CHARACTERS} characters together"
        raise parameter_error("bad_words", expected, f"{len(texts)} of {size}")


def _check_processors(value: object, known: Sequence[str]) -> None:
    """Raise `ParameterError` for anything but names that are known; what else a client says is never looked up."""
    if value is None:
        return
    names = ", ".join(known) or "it has none"
    expected = f"a list of at most {MAX_PROCESSORS} names of the server's functions ({names})"
    if not isinstance(value, list) or len(value) > MAX_PROCESSORS:
        raise parameter_error("logits_processors", expected, value)
    for name in value:
        if not isinstance(name, str) or name not in known:
            raise parameter_error("logits_processors", expected, name)


def _logit_bias(value: object) -> dict[int, Any]:
    expected = "an object of token id to number"
    if not isinstance(value, dict):
        raise parameter_error("logit_bias", expected, value)
    for key in value:
        if not (key.isascii() and key.removeprefix("-").isdecimal()) or len(key) > 19:
            raise parameter_error("logit_bias", expected, key)
    return {int(key): bias for key, bias in value.items()}


def make_params(defaults: Mapping[str, Any], given: Mapping[str, Any], **fixed: Any) -> SamplingParams:
    """`SamplingParams` of a request.

    `defaults`: the model's, which a beam search, that draws nothing, does not heed. `fixed`: what the server decides.
    Raises `ParameterError`.
    """
    entries = dict(given)
    if entries.get("use_beam_search") is True:
        entries.setdefault("temperature", 0.0)
        if entries.get("best_of") is None:
            entries["best_of"] = entries.get("n", 1)
    else:
        entries = {**defaults, **entries}
    return SamplingParams(**(entries | fixed))
