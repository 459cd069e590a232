"""/v1/completions, through the client that most programs use."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.conftest import Served

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def streamed(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks_of(response.text)


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


def test_choices_of_a_list_are_numbered_prompt_by_prompt(server: Served) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 0, "max_tokens": 6}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == choices[1]["text"] != choices[2]["text"] == choices[3]["text"]
    texts = dict.fromkeys(range(4), "")
    ends = []
    for chunk in streamed(server, "/v1/completions", body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            ends += [choice["index"]] if choice["finish_reason"] else []
    assert [texts[i] for i in range(4)] == [choice["text"] for choice in choices]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ("", 1), ([""], 1), (None, 1)],
)
def test_forms_of_a_prompt(server: Served, prompt: Any, count: int) -> None:
    response = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == count


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [1, "a"], ["a", 1], [1.5], [True], [-1], [320], [2**31], [[1], "a"], [[1, 2], [320]], 5, {}, [{}]],
)
def test_wrong_prompts_are_named(server: Served, prompt: Any) -> None:
    response = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert "prompt" in error["message"]


def test_text_and_its_ids_are_the_same_prompt(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": "the inner song"}).json()["tokens"]
    by_text = server.post("/v1/completions", GREEDY | {"prompt": "the inner song"}).json()
    by_ids = server.post("/v1/completions", GREEDY | {"prompt": ids}).json()
    assert by_text["choices"] == by_ids["choices"]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs(server: Served, max_tokens: int, as_ids: bool) -> None:
    prompt = "Hello"
    body = {
        "prompt": prompt,
        "echo": True,
        "logprobs": 1,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = server.post("/v1/completions", body | {"return_tokens_as_token_ids": as_ids}).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert {len(entries) for entries in logprobs.values()} == {5 + max_tokens}
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(-9999.0 <= value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][:6] == [0, 1, 2, 3, 4, 5][: 5 + max_tokens]
    assert choice["text"].startswith(prompt)
    if as_ids:
        assert all(token.startswith("token_id:") for token in logprobs["tokens"])
    else:
        assert logprobs["tokens"][:5] == list(prompt)


def test_streamed_logprobs_are_those_of_the_whole(server: Served) -> None:
    body = {"prompt": "Hello", "echo": True, "logprobs": 2, "max_tokens": 6, "seed": 3, "n": 2}
    whole = server.post("/v1/completions", body).json()["choices"]
    joined: dict[int, dict[str, list[Any]]] = {}
    for chunk in streamed(server, "/v1/completions", body):
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                joined.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    assert [joined[i] for i in range(2)] == [choice["logprobs"] for choice in whole]


def test_offsets_without_echo_begin_after_the_prompt(server: Served) -> None:
    answer = server.post("/v1/completions", GREEDY | {"prompt": "Hello", "logprobs": 0}).json()
    assert answer["choices"][0]["logprobs"]["text_offset"][0] == 5


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


@pytest.mark.parametrize(("options", "extra"), [({"include_usage": True}, 1), ({"include_usage": False}, 0), (None, 0)])
def test_usage_ends_a_stream_that_asks_for_it(server: Served, options: Any, extra: int) -> None:
    body = GREEDY | {"prompt": "Hello", "ignore_eos": True}
    chunks = streamed(server, "/v1/completions", body | {"stream_options": options})
    assert len([chunk for chunk in chunks if not chunk["choices"]]) == extra
    if extra:
        assert chunks[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)


def test_continuous_usage_grows_to_the_total(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = GREEDY | {"prompt": "Hello", "ignore_eos": True, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed(server, "/v1/completions", body)]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_best_of_and_beams(server: Served) -> None:
    body = {"prompt": "Hello", "n": 2, "best_of": 4, "max_tokens": 6}
    assert len(server.post("/v1/completions", body).json()["choices"]) == 2
    assert server.post("/v1/completions", body | {"stream": True}).json()["error"]["param"] == "best_of"
    beams = {"prompt": "Hello", "n": 2, "best_of": 3, "use_beam_search": True, "max_tokens": 6}
    whole = server.post("/v1/completions", beams).json()["choices"]
    assert [choice["index"] for choice in whole] == [0, 1]
    texts = {0: "", 1: ""}
    for chunk in streamed(server, "/v1/completions", beams):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole]


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
    assert server.post("/v1/completions", long | {"truncate_prompt_tokens": -1}).json()["usage"]["prompt_tokens"] == 511


def test_context_length_is_said_with_its_numbers(server: Served) -> None:
    response = server.post("/v1/completions", {"prompt": "x" * 600, "max_tokens": 4})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert "600" in error["message"]
    assert "512" in error["message"]


def test_null_is_as_if_not_given(server: Served) -> None:
    with server.http() as http:
        schema = http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    nulls = dict.fromkeys(schema["properties"]) | GREEDY | {"prompt": "Hello"}
    response = server.post("/v1/completions", nulls)
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == server.post("/v1/completions", GREEDY | {"prompt": "Hello"}).json()["choices"]
