"""Beam search over HTTP: streams show early what no beam can change, and are in the end what the whole answer is."""

from __future__ import annotations

from typing import Any

import pytest

from pyvllm import LLM, SamplingParams
from tests.server.answers import CHAT, COMPLETIONS, body_of, joined, streamed, whole
from tests.server.conftest import Served
from tests.server.test_errors import assert_error
from tests.some_processors import settled

PATHS = (COMPLETIONS, CHAT)
SETTLED: dict[str, Any] = {"logits_processors": ["settled"], "max_tokens": 30, "use_beam_search": True}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("best_of", "n"), [(2, 1), (4, 4), (5, 2)])
@pytest.mark.parametrize("more", [{}, {"stop": ["zz"], "return_token_ids": True}, {"logprobs": True}])
def test_streams_of_beams(server: Served, path: str, best_of: int, n: int, more: dict[str, Any]) -> None:
    if path == COMPLETIONS and "logprobs" in more:
        more = {"logprobs": 2}
    body = body_of(path, "the rain", n=n, best_of=best_of, **SETTLED, **more)
    expected = whole(server, path, body)
    assert len(expected.choices) == n
    chunks = streamed(server, path, body | {"stream_options": {"include_usage": True}})
    assert joined(chunks) == expected
    ends = [i for i, chunk in enumerate(chunks) for choice in chunk["choices"] if choice["finish_reason"]]
    before_the_end = joined(chunks[: min(ends) - 2 * n])
    assert len(before_the_end.texts[0]) >= 20


@pytest.mark.parametrize("path", PATHS)
def test_beams_are_those_that_are_there_offline(server: Served, llm: LLM, path: str) -> None:
    params = SamplingParams(
        n=3, best_of=4, use_beam_search=True, temperature=0, max_tokens=12, logits_processors=[settled]
    )
    if path == COMPLETIONS:
        (output,) = llm.generate("the rain", params, use_tqdm=False)
    else:
        (output,) = llm.chat([{"role": "user", "content": "the rain"}], params, use_tqdm=False)
    body = body_of(path, "the rain", n=3, best_of=4, **SETTLED | {"max_tokens": 12})
    assert whole(server, path, body).texts == [one.text for one in output.outputs]


def test_beams_of_several_prompts_are_streamed_side_by_side(server: Served) -> None:
    body = {"prompt": ["the rain", "in"], "n": 2, "best_of": 3, "echo": True} | SETTLED
    expected = whole(server, COMPLETIONS, body)
    assert [text.startswith("the rain") for text in expected.texts] == [True, True, False, False]
    assert [text.startswith("in") for text in expected.texts] == [False, False, True, True]
    assert joined(streamed(server, COMPLETIONS, body)).texts == expected.texts


@pytest.mark.parametrize("path", PATHS)
def test_the_best_of_samples_cannot_be_streamed(server: Served, path: str) -> None:
    body = body_of(path, "the rain", n=2, best_of=4, max_tokens=4)
    assert len(whole(server, path, body).choices) == 2
    message = assert_error(server.post(path, body | {"stream": True}), 400, "best_of")
    assert message.startswith("best_of (4) above n (2) cannot stream")
