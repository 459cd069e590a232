"""/v1/completions, through the client that most programs use."""

from __future__ import annotations

from typing import Any

import openai

from tests.server.answers import CHAT, body_of, streamed
from tests.server.conftest import Served

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}


def test_openai_client_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="Hello", **GREEDY)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.total_tokens == 5 + answer.usage.completion_tokens


def test_openai_client_streams_the_same_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "temperature": 1, "seed": 7, "max_tokens": 40}
    whole = client.completions.create(**options)
    pieces = list(client.completions.create(stream=True, **options))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert len(pieces) > 2
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({(piece.id, piece.created, piece.model) for piece in pieces}) == 1


def test_text_and_its_ids_are_the_same_prompt(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": "the inner song"}).json()["tokens"]
    by_text = server.post("/v1/completions", GREEDY | {"prompt": "the inner song"}).json()
    by_ids = server.post("/v1/completions", GREEDY | {"prompt": ids}).json()
    assert by_text["choices"] == by_ids["choices"]


def test_stop_strings_are_cut_and_named(server: Served) -> None:
    text = server.post("/v1/completions", GREEDY | {"prompt": "abc", "max_tokens": 24}).json()["choices"][0]["text"]
    stop = text[5:8]
    cut = text[: text.index(stop)]
    body = GREEDY | {"prompt": "abc", "max_tokens": 24, "stop": [stop]}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    chunks = streamed(server, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_ids_come_with_the_answer_if_asked_for(server: Served) -> None:
    body = GREEDY | {"prompt": "Hello", "return_token_ids": True, "prompt_logprobs": 1}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert len(choice["prompt_token_ids"]) == len(choice["prompt_logprobs"]) == 5
    assert choice["prompt_logprobs"][0] is None
    assert str(choice["prompt_token_ids"][1]) in choice["prompt_logprobs"][1]
    del body["prompt_logprobs"]
    chunks = streamed(server, "/v1/completions", body)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == choice["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_truncation_keeps_the_end_of_a_prompt(server: Served) -> None:
    body = GREEDY | {"prompt": "abcdefgh", "truncate_prompt_tokens": 3, "return_token_ids": True}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["prompt_token_ids"] == server.post("/tokenize", {"prompt": "fgh"}).json()["tokens"]
    long = {"prompt": "x" * 1000, "max_tokens": 1}
    assert server.post("/v1/completions", long).status_code == 400
    # As much as leaves room for the output that is asked for.
    fields: dict[str, Any]
    for fields, kept in (({}, 511), ({"max_tokens": 100}, 412), ({"max_tokens": None}, 496)):
        body = long | {"truncate_prompt_tokens": -1, "ignore_eos": True, "return_token_ids": True} | fields
        answer = server.post("/v1/completions", body).json()
        assert [answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion")] == [kept, 512 - kept]
        assert len(answer["choices"][0]["prompt_token_ids"]) == kept
    chat = body_of(CHAT, "x" * 1000, truncate_prompt_tokens=-1, min_tokens=40)
    assert server.post(CHAT, chat).json()["usage"]["prompt_tokens"] == 472


def test_context_length_is_said_with_its_numbers(server: Served) -> None:
    response = server.post("/v1/completions", {"prompt": "x" * 600, "max_tokens": 4})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert "600" in error["message"]
    assert "512" in error["message"]
