"""Chat templates: conversations to the text a model was trained on, rendered as `transformers` renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

_RESERVED: Final = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "tokenizer", "return_tensors", "return_dict"),
    }
)
"""Names that `chat_template_kwargs` may not set."""

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is given; templates read the first, gpt-oss's the second."""

_CUT_HERE: Final = "PYVLLM_CONTINUES_HERE "
"""Marks the end of the final message. The space at its end shows whether the template strips."""


def choose_template(templates: Mapping[str, str], given: str | None, *, has_tools: bool = False) -> str:
    """The template's text: `given`, or else the model's own.

    `given` is a template's text, the path of a file that holds one, or a name in `templates`. Without it the model's
    template named `tool_use` is taken for a conversation with tools, if there is one, and `default` otherwise.

    Not for what comes from a client of a server: the path could be that of any file.

    Raises ValueError saying what to do if there is none.
    """
    if not isinstance(given, str | None):
        raise ValueError(f"chat_template must be None or a string, got {given!r}")
    if given is not None:
        return templates[given] if given in templates else load_template(given)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        names = ", ".join(sorted(templates))
        raise ValueError(f"chat_template must be one of {names}: the model has several chat templates and no default")
    raise ValueError(
        "the model has no chat template, as is usual for models that were not trained for chat; "
        "pass chat_template (a file or the template's text), or use generate with a prompt"
    )


def load_template(given: str) -> str:
    """A template given as a text or as the path of a file. What has a brace or a line break is a text.

    Raises FileNotFoundError naming the path; ValueError if the file is not UTF-8.
    """
    if not given or any(character in given for character in "{}\n"):
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"chat_template is {given!r}: no such file, nor a template (which would have braces in it)"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template {path}: not UTF-8: {error}") from error


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation.

    `template`: its text. `messages`: mappings with `role` and `content`, a string or a list of text parts, which are
    joined by line breaks. `special_tokens`: `bos_token` and so on, which templates may write. `add_generation_prompt`:
    end with the beginning of the assistant's answer. `continue_final_message`: instead leave the last message open, so
    that the model goes on with it. `tools`, `documents`: passed to the template. `template_kwargs`: other variables
    that it reads, special tokens included.

    The text may have BOS in it: encode it without adding special tokens.

    Raises ValueError naming the part of the input that is wrong, or with what the template itself has to say.
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt and continue_final_message exclude each other: set one to False")
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not isinstance(tools, list | tuple | None):
        raise ValueError(f"tools must be None or a list of dicts, got {type(tools).__name__}")
    if not isinstance(template_kwargs, Mapping | None):
        raise ValueError(f"chat_template_kwargs must be None or a dict, got {type(template_kwargs).__name__}")
    variables = {**(special_tokens or {}), **(template_kwargs or {})}
    if reserved := sorted(_RESERVED & set(template_kwargs or {})):
        raise ValueError(f"chat_template_kwargs may not have {', '.join(reserved)}: arguments of their own, or none")
    conversation = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not conversation:
        raise ValueError("messages is empty, must have at least one message")
    final_content = conversation[-1]["content"]
    if continue_final_message:
        conversation[-1]["content"] = final_content + _CUT_HERE
    plain = {name: _plain(value, f"chat_template_kwargs[{name!r}]") for name, value in variables.items()}
    plain |= {"messages": conversation, "tools": _plain(tools, "tools"), "documents": _plain(documents, "documents")}
    text = _render(template, plain | {"add_generation_prompt": add_generation_prompt})
    return _cut(text, final_content) if continue_final_message else text


def _cut(text: str, final_content: str) -> str:
    """`text` up to the end of the final message, without the spaces that the template strips there."""
    end = text.rfind(_CUT_HERE.strip())
    if end < 0 or final_content.strip() not in text:
        raise ValueError(
            "continue_final_message is set, but the chat template does not write the final message as it is"
        )
    return text[:end] if text.startswith(_CUT_HERE, end) else text[:end].rstrip()


# --- messages ---------------------------------------------------------------------------------------------------------


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be a dict with role and content, got {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where}.role is {message.get('role')!r}, must be a string")
    # None means absent, which templates can tell from a value.
    plain = {name: _plain(value, f"{where}.{name}") for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain | {"content": _content(plain.get("content"), f"{where}.content")}


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of parts, got {type(content).__name__}")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise ValueError(f"{where} must be a part such as {{'type': 'text', 'text': ...}}, got {part!r}")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise ValueError(f"{where}.type is {kind!r}, supported: 'text', 'refusal'")
    text = part.get(kind)
    if not isinstance(text, str):
        raise ValueError(f"{where}.{kind} is {text!r}, must be a string")
    return text


def _tool_calls(calls: object, where: str) -> list[Any]:
    """OpenAI sends a call's arguments as the text of a JSON object; templates expect the object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} must be a list of dicts, got {calls!r}")
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise ValueError(f"{where}[{i}].function.arguments is not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}[{i}].function.arguments must be a JSON object, got {arguments!r}")
        function["arguments"] = arguments
    return calls


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON's types alone: a template may call the methods of all that it is given."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # a subclass may have methods of its own
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ValueError(f"{where} must be made of strings, numbers, lists and dicts, got {type(value).__name__}")


# --- the sandbox ------------------------------------------------------------------------------------------------------


def _render(template: str, variables: dict[str, Any]) -> str:
    try:
        return _compile(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:  # `raise_exception` in the template, among others
        raise ValueError(f"chat template: {error.message}") from error
    except Exception as error:  # whatever a template's expressions come to: it is not the engine's fault
        raise ValueError(f"chat template cannot render these messages: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`...`{% endgeneration %}` marks the assistant's tokens for training; here its body is all."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, without attributes that would reach into Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have the attribute {name!r}")


class _Dict:
    """`dict` as a function: the type itself has attributes that a template must not reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
