"""The fixed workloads: the same tokens everywhere and for ever."""

import hashlib
import json
from typing import Any

import pytest

from pyvllm.bench.models import BENCH_MODELS
from pyvllm.bench.workloads import FIXED_WORKLOADS, Workload, fixed_workload, ramp, random_workload

# SHA-256 of [[prompt, output_len], ...] as JSON with salts 0 and 3, computed from the script that peers are measured
# with; number of prompts, of their tokens, of tokens to generate for a sequence of each.
EXPECTED: dict[str, tuple[str, str, tuple[int, int, int]]] = {
    "nano": ("c13592357e691538", "64d94090c4048263", (256, 143_804, 138_596)),
    "sharegpt": ("a65d13c36669ce17", "09ddc5c217ec5abd", (1000, 204_760, 206_904)),
    "sharegpt_n4": ("cfb8637e1e8743fd", "1b0b5d8d62514320", (250, 49_993, 51_890)),
    "decode1": ("8919ffab3c33784e", "d013bd6e8a8640c5", (1, 128, 256)),
    "isl1024osl512": ("0402bc6bffd86191", "0a12cca5a67e39c2", (1024, 1_048_576, 524_288)),
    "prefill4k": ("a7fb1cb247dc280f", "aa99a175931068a3", (64, 262_144, 64)),
    "prefix": ("300415af633e46db", "2753763e8adc4091", (512, 557_056, 65_536)),
}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def digest_of(work: Workload) -> str:
    return digest([[request.prompt, request.output_len] for request in work.requests])


@pytest.mark.parametrize("name", FIXED_WORKLOADS)
def test_fixed_workloads_are_those_that_peers_are_measured_on(name: str) -> None:
    first, salted, (count, input_tokens, output_tokens) = EXPECTED[name]
    work = fixed_workload(name, 0)
    assert digest_of(work) == first
    assert digest_of(fixed_workload(name, 3)) == salted
    assert (len(work.requests), work.input_tokens) == (count, input_tokens)
    assert work.n == (4 if name == "sharegpt_n4" else 1)
    assert work.output_tokens == work.n * output_tokens
    assert work.longest == max(len(request.prompt) + request.output_len for request in work.requests)


def test_configurations_are_those_that_peers_are_measured_on() -> None:
    found = {name: digest(dict(sorted(config.items()))) for name, config in BENCH_MODELS.items()}
    assert found == {"llama3-8b": "a30847f5c18804cf", "qwen3-0.6b": "a3b19b3f5bc1fe15"}


def test_a_salt_changes_all_tokens_and_keeps_what_is_shared() -> None:
    one, other = fixed_workload("prefix", 1), fixed_workload("prefix", 2)
    assert one.shared_len == 1024
    for mine, theirs in zip(one.requests, other.requests, strict=True):
        assert len(mine.prompt) == len(theirs.prompt)
        assert all(a != b for a, b in zip(mine.prompt, theirs.prompt, strict=True))
    for work in (one, other):
        assert len({tuple(request.prompt[:1024]) for request in work.requests}) == 4
        assert len({tuple(request.prompt) for request in work.requests}) == 512


@pytest.mark.parametrize("vocab_size", [2, 320, 1500, 2001, 49_152])
def test_tokens_are_folded_into_small_vocabularies(vocab_size: int) -> None:
    for salt in (0, 1):
        tokens = {token for request in fixed_workload("prefix", salt, vocab_size).requests for token in request.prompt}
        assert min(tokens) >= 0
        assert max(tokens) < vocab_size
        assert len(tokens) > min(vocab_size, 1000) // 2


def test_random_workload_has_the_lengths_asked_for() -> None:
    options = {"num_prompts": 3, "input_len": 5, "output_len": 7, "n": 2, "vocab_size": 320}
    work = random_workload(1, seed=0, **options)
    assert [(len(request.prompt), request.output_len) for request in work.requests] == [(5, 7)] * 3
    assert (work.n, work.output_tokens) == (2, 42)
    assert work == random_workload(1, seed=0, **options)
    assert work.requests != random_workload(1, seed=1, **options).requests
    assert work.requests != random_workload(2, seed=0, **options).requests


def test_ramp_ends_at_every_size_of_batch() -> None:
    work = ramp(128, longest=1000, vocab_size=320)
    lengths = [request.output_len for request in work.requests]
    assert len(lengths) == 128
    assert (lengths[0], lengths[-1], sorted(lengths)) == (1, 64, lengths)
    assert {lengths.count(length) for length in lengths} == {2}
    assert ramp(3, longest=2, vocab_size=320).longest == 2


def test_unknown_workload_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"nano, sharegpt.*got 'nono'"):
        fixed_workload("nono", 0)
