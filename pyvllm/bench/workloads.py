"""The fixed workloads that every engine is measured on, as token ids, so that no tokenizer counts.

Seeds are fixed: the same work everywhere. A salt changes tokens and keeps lengths, so that no cache serves a repeat.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

_LOWEST_ID: Final = 1000
_HIGHEST_ID: Final = 120_000
_SALT_STEP: Final = 7919


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and how much to generate for it."""

    prompt: list[int]
    """Token ids."""
    output_len: int
    """Tokens to generate for each sequence; the end of a text is ignored."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are given to an engine all at once."""

    name: str
    """As in reports."""
    requests: list[Request]
    """In the order in which they are given."""
    n: int = 1
    """Sequences of each request."""
    shared_len: int = 0
    """Tokens at the beginning that groups of prompts share. Reusing them is then part of the work, else forbidden."""

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens to generate."""
        return self.n * sum(request.output_len for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(request.prompt) + request.output_len for request in self.requests)


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(_LOWEST_ID, _HIGHEST_ID) for _ in range(length)]


def _nano() -> Workload:
    """256 requests, prompts and outputs uniform from 100 to 1024 tokens: nano-vllm's benchmark."""
    rng = random.Random(0)
    requests = [
        Request(prompt=_ids(rng, rng.randint(100, 1024)), output_len=rng.randint(100, 1024)) for _ in range(256)
    ]
    return Workload(name="nano", requests=requests)


def _log_normal(rng: random.Random, mean: float, sigma: float) -> int:
    return max(4, min(1024, int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


def _sharegpt(count: int) -> list[Request]:
    """Log-normal lengths with the means of ShareGPT's conversations, from 4 to 1024 tokens."""
    rng = random.Random(1)
    return [
        Request(prompt=_ids(rng, _log_normal(rng, 225, 1.1)), output_len=_log_normal(rng, 205, 0.9))
        for _ in range(count)
    ]


def _fixed(name: str, count: int, input_len: int, output_len: int, seed: int = 2) -> Workload:
    rng = random.Random(seed)
    return Workload(
        name=name, requests=[Request(prompt=_ids(rng, input_len), output_len=output_len) for _ in range(count)]
    )


def _prefix() -> Workload:
    """512 requests in 4 groups that share 1024 tokens each, 64 tokens of their own, 128 to generate."""
    rng = random.Random(3)
    shared = [_ids(rng, 1024) for _ in range(4)]
    requests = [Request(prompt=shared[i % 4] + _ids(rng, 64), output_len=128) for i in range(512)]
    return Workload(name="prefix", requests=requests, shared_len=1024)


_MAKERS: Final[dict[str, Callable[[], Workload]]] = {
    "nano": _nano,
    "sharegpt": lambda: Workload(name="sharegpt", requests=_sharegpt(1000)),
    "sharegpt_n4": lambda: Workload(name="sharegpt_n4", requests=_sharegpt(250), n=4),
    "decode1": lambda: _fixed("decode1", 1, 128, 256),
    "isl1024osl512": lambda: _fixed("isl1024osl512", 1024, 1024, 512),
    "prefill4k": lambda: _fixed("prefill4k", 64, 4096, 1),
    "prefix": _prefix,
}
FIXED_WORKLOADS: Final = tuple(_MAKERS)
"""Names that `fixed_workload` knows."""


def fixed_workload(name: str, salt: int, vocab_size: int = _HIGHEST_ID) -> Workload:
    """The workload of this name with tokens changed by `salt`, folded into a vocabulary if that is smaller.

    Raises `ValueError` for an unknown name, or fewer than 2 ids.
    """
    if name not in _MAKERS:
        raise ValueError(f"workload must be one of {', '.join(FIXED_WORKLOADS)} or random, got {name!r}")
    return _salted(_MAKERS[name](), salt, vocab_size)


def random_workload(
    salt: int, *, num_prompts: int, input_len: int, output_len: int, n: int, seed: int, vocab_size: int
) -> Workload:
    """`num_prompts` requests of equal lengths. All numbers but the salt and the seed are at least 1."""
    workload = replace(_fixed(f"random{num_prompts}", num_prompts, input_len, output_len, seed), n=n)
    return _salted(workload, salt, vocab_size)


def spread_workload(
    salt: int, *, num_prompts: int, input_len: int, output_len: int, ratio: float, seed: int, vocab_size: int
) -> Workload:
    """`num_prompts` requests whose lengths are spread evenly from (1 - ratio) to (1 + ratio) times those given."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, rng.randint(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))))

    requests = [Request(prompt=_ids(rng, length(input_len)), output_len=length(output_len)) for _ in range(num_prompts)]
    return _salted(Workload(name="random", requests=requests), salt, vocab_size)


def ramp(count: int, longest: int, vocab_size: int) -> Workload:
    """A warm-up: `count` short requests that end one after another, so that each size of batch is met.

    `longest`: most tokens of prompt and output, at least 2.
    """
    rng = random.Random(4)
    input_len = min(16, longest // 2)
    most = min(64, longest - input_len)
    requests = [Request(prompt=_ids(rng, input_len), output_len=1 + i * most // count) for i in range(count)]
    return _salted(Workload(name="ramp", requests=requests), 0, vocab_size)


def _salted(workload: Workload, salt: int, vocab_size: int) -> Workload:
    if vocab_size < 2:
        raise ValueError(f"vocab_size must be at least 2, got {vocab_size}")
    high = min(_HIGHEST_ID, vocab_size)
    # Small vocabularies have few ids to leave out; large ones begin with special tokens.
    low = _LOWEST_ID if high > 2 * _LOWEST_ID else 0
    span = high - low
    requests = [
        replace(request, prompt=[low + (token + _SALT_STEP * salt) % span for token in request.prompt])
        for request in workload.requests
    ]
    return replace(workload, requests=requests)
