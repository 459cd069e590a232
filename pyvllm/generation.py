"""What a model's generation_config.json says: default sampling parameters, and which tokens end a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pyvllm.config import EngineArgs
from pyvllm.json_file import read_object
from pyvllm.sampling_params import SamplingParams

logger = logging.getLogger("pyvllm")

IGNORE: Final = "vllm"
"""Value of `EngineArgs.generation_config` with which the file gives no sampling parameters."""

_FIELDS: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Entry of the file -> field of `SamplingParams`."""


def read_generation_config(args: EngineArgs, found: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries that count. `found`: those of the file beside the model, if there is one.

    Raises FileNotFoundError or ValueError naming the file that `generation_config` names.
    """
    if args.generation_config in ("auto", IGNORE):
        return dict(found or {})
    path = Path(args.generation_config).expanduser()
    path = path / "generation_config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"generation_config is {args.generation_config!r}: {path} is not a file")
    return read_object(path)


def default_sampling_params(args: EngineArgs, config: Mapping[str, Any]) -> SamplingParams:
    """Parameters of requests that bring none. Raises ValueError naming the entry that is out of its range."""
    entries = {} if args.generation_config == IGNORE else dict(config)
    entries |= args.override_generation_config or {}
    given = {field: entries[name] for name, field in _FIELDS.items() if entries.get(name) is not None}
    try:
        params = SamplingParams(**given)
    except ValueError as error:
        raise ValueError(f"generation_config (or override_generation_config): {error}") from error
    changed = {field: value for field, value in given.items() if value != getattr(SamplingParams(), field)}
    if changed:
        logger.info("default sampling parameters of this model: %s (generation_config='vllm' ignores them)", changed)
    return params


def eos_token_ids(of_tokenizer: Sequence[int], *configs: Mapping[str, Any]) -> list[int]:
    """All tokens that end a text: the tokenizer's first, then those that the model's configurations name.

    Raises ValueError for an `eos_token_id` that is neither null, an integer, nor a list of integers.
    """
    found = list(of_tokenizer)
    for config in configs:
        entry = config.get("eos_token_id")
        entries = entry if isinstance(entry, list) else [] if entry is None else [entry]
        for token_id in entries:
            if type(token_id) is not int or token_id < 0:
                raise ValueError(f"eos_token_id of the model must be null, an id or a list of ids, got {entry!r}")
        found += entries
    return list(dict.fromkeys(found))
