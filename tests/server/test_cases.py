"""Cases from the field, by number, with the exact values that are right: texts, stops, ends, shapes of streams."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.server.answers import CHAT, COMPLETIONS, body_of, both, chunks_of, stream, streamed, whole
from tests.server.conftest import SAY, Served
from tests.server.test_errors import assert_error

PATHS = (COMPLETIONS, CHAT)
VOCAB_SIZE = 320
C_ID = 66
"""Of the letter c."""


# --- several choices --------------------------------------------------------------------------------------------------


def test_b044_choices_of_a_list_are_numbered_prompt_by_prompt(server: Served) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 0, "max_tokens": 6}
    for answer in both(server, COMPLETIONS, body):
        a, same_as_a, b, same_as_b = answer.texts
        assert a == same_as_a != b == same_as_b
    said = stream(server, COMPLETIONS, body | SAY)
    assert said.texts == ["a", "a", "b", "b"]


def test_b045_streamed_chunks_have_their_own_log_probabilities(server: Served) -> None:
    body = {"prompt": "a", "n": 2, "logprobs": 0, "max_tokens": 2, "seed": 1, "ignore_eos": True}
    chunks = streamed(server, COMPLETIONS, body)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if choice["finish_reason"] is None:
            assert len(choice["logprobs"]["tokens"]) == 1
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]].count("length") == 2
    first, second = stream(server, COMPLETIONS, body).choices
    assert [first.logprobs, second.logprobs] == [c.logprobs for c in whole(server, COMPLETIONS, body).choices]
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert first.logprobs["tokens"] != second.logprobs["tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_b047_edges_of_n_and_best_of(server: Served, path: str) -> None:
    before = server.metric("pyvllm:prompt_tokens_total")
    for wrong in (0, -1, 1.5, "2", True, 10**6):
        assert "n must be" in assert_error(server.post(path, body_of(path, "a", n=wrong)), 400, "n")
    message = assert_error(server.post(path, body_of(path, "a", n=2, best_of=1)), 400, "best_of")
    assert message == "best_of must be None or an integer from n to 16384, got 1 with n = 2"
    assert server.metric("pyvllm:prompt_tokens_total") == before
    assert len(whole(server, path, body_of(path, "a", n=None, max_tokens=1)).choices) == 1


# --- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_b056_numbers_that_are_none(server: Served, number: str) -> None:
    names = ("temperature", "top_p", "min_p", "length_penalty")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    for field in (*(f'"{name}":{number}' for name in (*names, *penalties)), f'"logit_bias":{{"7":{number}}}'):
        content = f'{{"prompt":"a","max_tokens":1,{field}}}'
        with server.http() as http:
            response = http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert json.loads(response.text)["error"]["code"] == 400
    assert whole(server, COMPLETIONS, {"prompt": "a"} | SAY).texts == ["a"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", [-0.1, 2.1, 999999, "0.7"]),
        ("top_p", [-1, 1.01, "0.7"]),
        ("repetition_penalty", [0, -1, "0.7"]),
        ("presence_penalty", [2.01, -2.01, "0.7"]),
        ("max_tokens", [-1, "0.7"]),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_b057_values_out_of_range(server: Served, path: str, name: str, wrong: list[Any]) -> None:
    for value in wrong:
        message = assert_error(server.post(path, body_of(path, "a", **{name: value})), 400, name)
        assert message.startswith(f"{name} must be ")


def test_b057_what_may_be_zero(server: Served) -> None:
    for path in PATHS:
        fields = {"max_tokens": 6, "ignore_eos": True}
        greedy = whole(server, path, body_of(path, "a", temperature=0, **fields))
        assert whole(server, path, body_of(path, "a", temperature=2, top_p=0, **fields)).texts == greedy.texts
    for answer in both(server, COMPLETIONS, {"prompt": "a", "max_tokens": 0}):
        assert (answer.choices[0].ending, answer.completion_tokens) == (("", "length", None), 0)
    assert_error(server.post(CHAT, body_of(CHAT, "a", max_tokens=0)), 400, "max_tokens")


@pytest.mark.parametrize("path", PATHS)
def test_b058_keys_and_values_of_logit_bias(server: Served, path: str) -> None:
    for wrong in ({str(VOCAB_SIZE): 5}, {"-1": 5}, {"abc": 1}, {"3": 101}, {"3": -101}, {"3": "x"}, {"3": None}):
        assert_error(server.post(path, body_of(path, "a", logit_bias=wrong)), 400, "logit_bias")
    fields = {"temperature": 0, "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
    plain = whole(server, path, body_of(path, "a", **fields))
    none: Any
    for none in ({}, None):
        assert whole(server, path, body_of(path, "a", logit_bias=none, **fields)) == plain
    biased = whole(server, path, body_of(path, "a", logit_bias={"7": 100}, **fields))
    assert biased.choices[0].token_ids == [7, 7, 7, 7]
    (first, *_) = plain.choices[0].token_ids or []
    banned = whole(server, path, body_of(path, "a", logit_bias={str(first): -100}, **fields))
    assert first not in (banned.choices[0].token_ids or [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("prompt", value) for value in ([1, 2, VOCAB_SIZE], [-1], [2**31], [1.5], [True], [[1, 2], [VOCAB_SIZE]])),
        *(("allowed_token_ids", value) for value in ([], [VOCAB_SIZE], [-1], [2**31])),
        *(("stop_token_ids", value) for value in ([VOCAB_SIZE], [-1])),
        ("logprob_token_ids", [-1]),
    ],
)
def test_b060_ids_outside_the_vocabulary(server: Served, field: str, value: Any) -> None:
    assert_error(server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1} | {field: value}), 400, field)


def test_b060_the_last_id_of_the_vocabulary_is_taken(server: Served) -> None:
    last = VOCAB_SIZE - 1
    body = {"prompt": [1, 2, last], "allowed_token_ids": [last], "max_tokens": 2, "return_token_ids": True}
    assert whole(server, COMPLETIONS, body).choices[0].token_ids == [last, last]


# --- stops and ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("include", "text"), [(False, "ABC"), (True, "ABCDEFGHIJ")])
def test_b077_no_part_of_a_stop_string_leaks(server: Served, path: str, include: bool, text: str) -> None:
    fields = SAY | {"stop": ["DEFGHIJ"], "include_stop_str_in_output": include, "max_tokens": 20}
    for answer in both(server, path, body_of(path, "ABCDEFGHIJKLM", **fields)):
        assert [choice.ending for choice in answer.choices] == [(text, "stop", "DEFGHIJ")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("script", ["hello", "helloZZZ", "ZZZZZ"])
@pytest.mark.parametrize("stop", [["ZZZZZZ"], ["ZZZZZZ", "elbow", "ohZ"]])
def test_b079_text_kept_back_comes_at_the_end(server: Served, path: str, script: str, stop: list[str]) -> None:
    for max_tokens, reason in ((len(script), "length"), (30, "stop")):
        body = body_of(path, script, stop=stop, max_tokens=max_tokens, **SAY)
        for answer in both(server, path, body):
            assert [choice.ending for choice in answer.choices] == [(script, reason, None)]


@pytest.mark.parametrize("path", PATHS)
def test_b081_odd_stop_values(server: Served, path: str) -> None:
    def ending(stop: Any) -> Any:
        return whole(server, path, body_of(path, "xyzabc", stop=stop, **SAY)).choices[0].ending

    assert ending(None) == ending([]) == ("xyzabc", "stop", None)
    assert ending("a") == ending(["a"]) == ("xyz", "stop", "a")
    assert ending(["1", "2", "3", "4", "c"]) == ("xyzab", "stop", "c")
    assert ending([str(i) for i in range(63)] + ["b"]) == ("xyza", "stop", "b")
    for wrong in ("", [""], ["a", None], ["a", ""], ["a"] * 65, 5, {"a": 1}):
        assert_error(server.post(path, body_of(path, "a", stop=wrong)), 400, "stop")


def test_b087_pairs_of_min_tokens_and_max_tokens(server: Served) -> None:
    def body(least: int, most: int | None) -> dict[str, Any]:
        return body_of(CHAT, "a", min_tokens=least, max_tokens=most, temperature=0)

    wrong = {
        (10, 5): "from 0 to max_tokens, got 10 with max_tokens = 5",
        (10**9, None): "got 1000000000",
        (-1, 5): "got -1",
    }
    for (least, most), message in wrong.items():
        assert message in assert_error(server.post(CHAT, body(least, most)), 400, "min_tokens")
    # An end that is wanted at once has to wait for the tenth token.
    ending = {"logit_bias": {"257": 100}}
    assert whole(server, CHAT, body(10, None) | ending).completion_tokens == 11
    with server.http() as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_b096_a_slow_reader_misses_nothing(server: Served, path: str) -> None:
    body = body_of(path, "slow", max_tokens=50, seed=2, ignore_eos=True, return_token_ids=True)
    expected = whole(server, path, body)
    with server.http() as http, http.stream("POST", path, json=body | {"stream": True}) as response:
        content = ""
        for piece in response.iter_text():
            content += piece
            time.sleep(0.02)
    choices = [chunk["choices"][0] for chunk in chunks_of(content)]
    ids = [i for choice in choices for i in choice.get("token_ids", [])]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
    assert (ids, text) == (expected.choices[0].token_ids, expected.texts[0])
    assert len(ids) == 50


def test_b097_what_the_context_has_room_for_is_said(server: Served) -> None:
    message = assert_error(server.post(COMPLETIONS, {"prompt": "x" * 8, "max_tokens": 509}), 400, "max_tokens")
    assert message == "max_tokens must be at most 504 (max_model_len 512 less 8 prompt tokens), got 509"
    answer = whole(server, COMPLETIONS, {"prompt": "x" * 8, "max_tokens": 504, "temperature": 0, "ignore_eos": True})
    assert answer.completion_tokens == 504
    for name in ("max_tokens", "max_completion_tokens"):
        message = assert_error(server.post(CHAT, body_of(CHAT, "x", **{name: 500})), 400, name)
        assert f"{name} must be at most 493 (max_model_len 512 less 19 prompt tokens), got 500" == message
    # What is no wish of the request's gives way.
    answer = whole(server, COMPLETIONS, {"prompt": "x" * 505, "temperature": 0, "ignore_eos": True})
    assert (answer.completion_tokens, answer.choices[0].finish_reason) == (7, "length")


def test_b098_limits_that_are_not_given(server: Served) -> None:
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    limit: dict[str, Any]
    for limit in ({}, {"max_tokens": None}):
        assert whole(server, COMPLETIONS, {"prompt": "x"} | fields | limit).completion_tokens == 16
        assert whole(server, CHAT, body_of(CHAT, "x") | fields | limit).completion_tokens == 512 - 19
    for limit in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 9}):
        assert whole(server, CHAT, body_of(CHAT, "x") | fields | limit).completion_tokens == 5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("script", "fields", "ending"),
    [
        ("ab", {}, ("ab", "stop", None)),
        ("abcd", {}, ("abc", "length", None)),
        ("abcd", {"stop": "bc"}, ("a", "stop", "bc")),
        ("abcd", {"stop_token_ids": [C_ID]}, ("ab", "stop", C_ID)),
    ],
)
def test_b100_reasons_of_an_end_at_the_third_token(
    server: Served, path: str, script: str, fields: dict[str, Any], ending: tuple[Any, ...]
) -> None:
    for answer in both(server, path, body_of(path, script, max_tokens=3, **fields, **SAY)):
        assert [choice.ending for choice in answer.choices] == [ending]
        assert answer.completion_tokens == 3


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
def test_b106_keys_of_stream_chunks(server: Served, path: str, n: int) -> None:
    chunks = streamed(server, path, body_of(path, "hi", n=n, **SAY))
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], kind, chunks[0]["created"], "tiny")
    }
    for index in range(n):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        if path == CHAT:
            assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)


@pytest.mark.parametrize("path", PATHS)
def test_b107_usage_of_streams(server: Served, path: str) -> None:
    body = body_of(path, "hello", max_tokens=5, n=2, **SAY)
    usage = server.post(path, body).json()["usage"]
    assert usage["completion_tokens"] == 10
    *chunks, last = streamed(server, path, body | {"stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"]) == ([], usage)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    for options in ({"include_usage": False}, None):
        assert all("usage" not in chunk for chunk in streamed(server, path, body | {"stream_options": options}))
    for options in ({"include_usage": True}, {}):
        assert_error(server.post(path, body | {"stream_options": options}), 400, "stream_options")
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in streamed(server, path, body | {"stream_options": options})]
    assert counts == sorted(counts)
    assert counts[-1] == 10


@pytest.mark.parametrize(
    ("prompt", "texts"), [("a", "a"), (["a", "b"], "ab"), ([67, 68, 69], "d"), ([[67], [68]], "de")]
)
def test_b110_forms_of_a_prompt(server: Served, prompt: Any, texts: str) -> None:
    assert whole(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 1} | SAY).texts == list(texts)


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": [""]}, {"prompt": None}, {}])
def test_b110_nothing_is_the_token_that_begins_a_text(server: Served, body: dict[str, Any]) -> None:
    fields = {"temperature": 0, "max_tokens": 3, "return_token_ids": True}
    answer = server.post(COMPLETIONS, fields | body).json()
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[256]]
    assert whole(server, COMPLETIONS, fields | {"prompt": [256]}).texts == [answer["choices"][0]["text"]]


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"]])
def test_b110_what_is_no_prompt(server: Served, prompt: Any) -> None:
    assert_error(server.post(COMPLETIONS, {"prompt": prompt}), 400, "prompt")


@pytest.mark.parametrize(("path", "name"), [(COMPLETIONS, "CompletionRequest"), (CHAT, "ChatCompletionRequest")])
def test_b111_null_means_absent(server: Served, path: str, name: str) -> None:
    with server.http() as http:
        fields = http.get("/openapi.json").json()["components"]["schemas"][name]["properties"]
    body = body_of(path, "hi", temperature=0, max_tokens=2)
    expected = server.post(path, body).json()["choices"]
    nulls = {field: None for field in fields if field not in body}
    assert len(nulls) > 50
    for given in (*({field: None} for field in nulls), nulls):
        response = server.post(path, body | given)
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == expected


@pytest.mark.parametrize("path", PATHS)
def test_b113_content_and_end_are_two_chunks(server: Served, path: str) -> None:
    chunks = streamed(server, path, body_of(path, "a", max_tokens=1, **SAY))
    content: dict[str, Any] = {"delta": {"content": "a"}} if path == CHAT else {"text": "a", "logprobs": None}
    empty: dict[str, Any] = {"delta": {}} if path == CHAT else {"text": "", "logprobs": None}
    assert [chunk["choices"] for chunk in chunks][-2:] == [
        [{"index": 0, "finish_reason": None} | content],
        [{"index": 0, "finish_reason": "length", "stop_reason": None} | empty],
    ]
    assert len(chunks) == (3 if path == CHAT else 2)
