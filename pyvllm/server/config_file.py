"""`--config file.yaml`: flags of the command line, written into a file."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def apply_config_file(parser: argparse.ArgumentParser, given: argparse.Namespace, path: str) -> argparse.Namespace:
    """`given` completed by what the file says; flags of the command line win.

    `parser`: the one that made `given`, which reads the file's values too. Raises FileNotFoundError; ValueError naming
    the entry that is unknown, with the nearest name there is, or that has a wrong value.
    """
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    argv: list[str] = []
    for key, value in read_yaml(Path(path).expanduser()).items():
        name = str(key).replace("-", "_")
        if name not in actions or name in ("help", "config"):
            near = difflib.get_close_matches(name, actions, n=1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            raise ValueError(f"{path}: unknown entry {key!r}{hint}")
        if not hasattr(given, name) and value is not None:
            argv += _flag(actions[name], value, where=f"{path}: {key}")
    return argparse.Namespace(**(vars(parser.parse_args(argv)) | vars(given)))


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The entries of a YAML file. Raises FileNotFoundError, or ValueError saying what is wrong with it."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold entries such as port: 8000, got {type(found).__name__}")
    return found


def _flag(action: argparse.Action, value: object, *, where: str) -> list[str]:
    """The words of a command line that mean the same."""
    flag = max(action.option_strings, key=len)
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false, got {value!r}")
        positive = next(name for name in action.option_strings if not name.startswith("--no-"))
        return [positive if value else "--no-" + positive.removeprefix("--")]
    if isinstance(value, list) and action.nargs == "+":
        return [flag, *map(str, value)] if value else []
    if isinstance(value, list):
        return [f"{flag}={entry}" for entry in value]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
