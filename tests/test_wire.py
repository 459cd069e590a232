"""Frames, and what is JSON in them."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvllm import EngineArgs, ParameterError, SamplingParams
from pyvllm.engine import EngineInfo
from pyvllm.sampling_params import RequestOutputKind
from pyvllm.wire import (
    FrameReader,
    Kind,
    args_to_json,
    error_from_json,
    error_to_json,
    frame,
    info_from_json,
    info_to_json,
)

FRAMES = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40)), max_size=8)


@given(FRAMES, st.lists(st.integers(min_value=1, max_value=9), min_size=1))
def test_frames_are_put_together_however_they_are_cut(frames: list[tuple[Kind, bytes]], sizes: Sequence[int]) -> None:
    sent = b"".join(frame(kind, body[:3], body[3:]) for kind, body in frames)
    reader, start = FrameReader(), 0
    found: list[tuple[Kind, bytes]] = []
    while start < len(sent):
        size = sizes[start % len(sizes)]
        found += reader.feed(sent[start : start + size])
        start += size
    assert found == frames


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="77"):
        list(FrameReader().feed(b"\x00\x00\x00\x00\x4d"))


class OddError(KeyError):
    """Of a type that the other process does not have."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("block_size must be small"), ValueError, "block_size must be small"),
        (FileNotFoundError(2, "No such file", "x"), FileNotFoundError, "[Errno 2] No such file: 'x'"),
        (MemoryError("no room"), MemoryError, "no room"),
        (ParameterError("n must be 1"), ParameterError, "n must be 1"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError, "UnicodeDecodeError: 'utf-8' codec can't"),
        (OddError("k"), KeyError, "OddError: 'k'"),
        (SystemExit(3), RuntimeError, "SystemExit: 3"),
    ],
)
def test_errors_keep_type_and_text(error: BaseException, kind: type[Exception], text: str) -> None:
    found = error_from_json(error_to_json(error))
    assert type(found) is kind or (kind is ValueError and isinstance(found, ValueError))
    assert text in str(found)


def test_errors_that_are_no_users_fault_say_where_they_come_from() -> None:
    def deep() -> None:
        raise RuntimeError("why")

    with pytest.raises(RuntimeError) as caught:
        deep()
    (note,) = error_from_json(error_to_json(caught.value)).__notes__
    assert "in deep" in note


def test_arguments_and_facts_survive() -> None:
    args = EngineArgs(model="m", max_model_len="16k", hf_overrides={"a": [1]}, swap_space=0.5, seed=None, hf_token="t")
    assert EngineArgs(**json.loads(json.dumps(args_to_json(args)))) == args
    params = SamplingParams(logit_bias={3: 1.5}, stop=["x"], output_kind=RequestOutputKind.DELTA, top_p=0.5)
    info = EngineInfo(
        model="m",
        max_model_len=5,
        vocab_size=7,
        chat_template=None,
        default_sampling_params=params,
        block_size=16,
        block_bytes=1 << 40,
    )
    assert info_from_json(json.loads(json.dumps(info_to_json(info)))) == info
