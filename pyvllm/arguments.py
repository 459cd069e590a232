"""Command-line flags made from the fields of a dataclass and the docstrings under them."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import textwrap
import types
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints


class _Arguments(Protocol):
    """What a parser and an argument group have in common."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, as one line. Fields without one are absent."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    if not isinstance(body, ast.ClassDef):
        raise TypeError(f"{cls} is not a class")
    docs = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if documented and isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            docs[item.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return docs


def add_field_arguments(parser: _Arguments, cls: type, skip: Collection[str] = ()) -> None:
    """Add `--field-name` for each documented field of a dataclass.

    Nothing is put in the namespace for a flag that is not given, so that the field's own default holds.
    """
    docs, hints = field_docs(cls), get_type_hints(cls)
    for item in fields(cls):
        if item.name in skip or item.name not in docs:
            continue
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": item.name}
        options["help"] = docs[item.name].replace("%", "%%") + _default_text(item.default)
        parser.add_argument("--" + item.name.replace("_", "-"), **options, **_value_options(hints[item.name]))


def _default_text(default: object) -> str:
    return "" if default is MISSING or default is None else f" [default: {default}]"


def _value_options(hint: object) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if kinds == (bool,):
        return {"action": argparse.BooleanOptionalAction}
    lists = [kind for kind in kinds if get_origin(kind) is list]
    if lists:
        return {"action": "append", "type": get_args(lists[0])[0], "metavar": "VALUE"}
    dicts = [kind for kind in kinds if get_origin(kind) is dict]
    if dicts and get_args(dicts[0]) == (str, str):
        return {"action": _Merge, "type": _pair_reader, "metavar": "NAME=VALUE"}
    if dicts:
        return {"type": _json_reader(get_args(dicts[0])[0]), "metavar": "JSON"}
    classes = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
    if classes:
        return {"type": _class_reader(classes[0]), "metavar": "JSON"}
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        return {"choices": get_args(kinds[0])}
    return {"type": _reader(kinds), "metavar": "VALUE"}


def _reader(kinds: tuple[object, ...]) -> Callable[[str], object]:
    """Reads a value as the first of these kinds that fits. An optional number may be given as `none`."""
    words = {str(word).lower(): word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}
    if bool in kinds:
        words |= {"true": True, "false": False}
    readers = [kind for kind in (int, float, str) if kind in kinds]

    def read(text: str) -> object:
        if text.lower() in words:
            return words[text.lower()]
        if text.lower() == "none" and str not in kinds:
            return None
        for reader in readers:
            try:
                return reader(text)
            except ValueError:
                continue
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}")

    return read


class _Merge(argparse.Action):
    """A flag that may be given several times, each time with further entries of one dict."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


def _pair_reader(text: str) -> dict[str, Any]:
    """Reads name=value, or a JSON object of such pairs."""
    if text.startswith("{"):
        return _json_object(text)
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"must be name=value or a JSON object, got {text!r}")
    return {name: value}


def _json_reader(key: Callable[[str], object]) -> Callable[[str], object]:
    """Reads a JSON object whose keys are made of this type."""

    def read(text: str) -> object:
        try:
            return {key(name): item for name, item in _json_object(text).items()}
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"bad key: {error}") from None

    return read


def _class_reader(cls: Callable[..., object]) -> Callable[[str], object]:
    """Reads a JSON object whose entries are the arguments of this class."""

    def read(text: str) -> object:
        try:
            return cls(**_json_object(text))
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value
