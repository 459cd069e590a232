"""Log-probabilities over HTTP: their shapes, and that they are those that programs get offline."""

from __future__ import annotations

from typing import Any

import pytest

from pyvllm import LLM, SamplingParams
from tests.server.answers import CHAT, COMPLETIONS, body_of, both, stream, streamed, whole
from tests.server.conftest import SAY, Served
from tests.server.test_errors import assert_error

PATHS = (COMPLETIONS, CHAT)
TOLERANCE = 1e-4
MESSAGES = [{"role": "user", "content": "the rain in"}]


def asked(path: str, count: int) -> dict[str, Any]:
    """So many most probable tokens at each position."""
    return {"logprobs": count} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": count}


def ids_of(table: Any) -> list[dict[int, float]]:
    """Of each position id -> log-probability, of an answer that writes tokens as ids."""

    def number(text: str) -> int:
        return int(text.removeprefix("token_id:"))

    if "top_logprobs" in table:
        return [{number(text): value for text, value in row.items()} for row in table["top_logprobs"]]
    return [
        {number(entry["token"]): entry["logprob"] for entry in (one, *one["top_logprobs"])} for one in table["content"]
    ]


def assert_close(found: list[dict[int, float]], expected: Any) -> None:
    """Log-probabilities equal those that outputs of the engine have."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx({token_id: one.logprob for token_id, one in theirs.items()}, abs=TOLERANCE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("count", [0, 3, 20])
def test_they_are_those_that_are_there_offline(server: Served, llm: LLM, path: str, count: int) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 1, "seed": 3, "ignore_eos": True}
    params = SamplingParams(**fields, logprobs=count)
    if path == COMPLETIONS:
        (output,) = llm.generate("the rain in", params, use_tqdm=False)
    else:
        (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
    body = body_of(path, "the rain in", **fields, **asked(path, count), return_tokens_as_token_ids=True)
    for answer in both(server, path, body):
        assert_close(ids_of(answer.choices[0].logprobs), output.outputs[0].logprobs)


@pytest.mark.parametrize("path", PATHS)
def test_those_of_prompts_are_too(server: Served, llm: LLM, path: str) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
    if path == COMPLETIONS:
        (output,) = llm.generate("the rain in", params, use_tqdm=False)
    else:
        (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
    answer = server.post(path, body_of(path, "the rain in", max_tokens=1, temperature=0, prompt_logprobs=2)).json()
    found = (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_logprobs"]
    assert output.prompt_logprobs is not None
    assert found[0] is output.prompt_logprobs[0] is None
    for mine, theirs in zip(found[1:], output.prompt_logprobs[1:], strict=True):
        assert theirs is not None
        ranks = {int(token_id): (one["rank"], one["decoded_token"]) for token_id, one in mine.items()}
        assert ranks == {token_id: (one.rank, one.decoded_token) for token_id, one in theirs.items()}
        for token_id, one in theirs.items():
            assert mine[str(token_id)]["logprob"] == pytest.approx(one.logprob, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("path", "field", "value", "message"),
    [
        (COMPLETIONS, "logprobs", 21, "logprobs must be at most max_logprobs (20), got 21"),
        (COMPLETIONS, "logprobs", -1, "logprobs must be at most max_logprobs (20), got 320"),
        (COMPLETIONS, "logprobs", -2, "logprobs must be None, -1 (all) or an integer of at least 0, got -2"),
        (COMPLETIONS, "logprobs", True, "logprobs must be None, -1 (all) or an integer of at least 0, got True"),
        (CHAT, "top_logprobs", 21, "top_logprobs must be at most max_logprobs (20), got 21"),
        (CHAT, "top_logprobs", -1, "top_logprobs must be at most max_logprobs (20), got 320"),
        (CHAT, "top_logprobs", -2, "top_logprobs must be None, -1 (all) or an integer of at least 0, got -2"),
        (CHAT, "top_logprobs", "3", "top_logprobs: input should be a valid integer, got '3'"),
        (CHAT, "logprobs", 3, "logprobs: input should be a valid boolean, got 3"),
        *((path, "prompt_logprobs", 21, "prompt_logprobs must be at most max_logprobs (20), got 21") for path in PATHS),
        *(
            (
                path,
                "prompt_logprobs",
                "x",
                "prompt_logprobs must be None, -1 (all) or an integer of at least 0, got 'x'",
            )
            for path in PATHS
        ),
    ],
)
def test_wrong_counts_are_named(server: Served, path: str, field: str, value: Any, message: str) -> None:
    beside = {"logprobs": True} if field == "top_logprobs" else {}
    assert assert_error(server.post(path, body_of(path, "a", **beside) | {field: value}), 400, field) == message


def test_b068_minus_infinity_is_a_number_that_json_has(other_server: Served) -> None:
    for fields in ({"top_k": 1, "temperature": 1}, {"allowed_token_ids": [70]}):
        body = {"prompt": "the", "max_tokens": 3, "logprobs": 5, "ignore_eos": True} | fields
        for answer in both(other_server, COMPLETIONS, body):
            table = answer.choices[0].logprobs
            assert table is not None
            assert table["token_logprobs"] == [0.0, 0.0, 0.0]
            for row in table["top_logprobs"]:
                assert set(row.values()) == {0.0, -9999.0}
        chat = body_of(CHAT, "the", max_tokens=3, logprobs=True, top_logprobs=5, ignore_eos=True, **fields)
        (choice,) = other_server.post(CHAT, chat).json()["choices"]
        for entry in choice["logprobs"]["content"]:
            assert [one["logprob"] for one in entry["top_logprobs"]] == [0.0, *[-9999.0] * 4]


@pytest.mark.parametrize("path", PATHS)
def test_all_of_the_vocabulary_where_the_server_allows_that(other_server: Served, path: str) -> None:
    body = body_of(path, "the rain", max_tokens=2, ignore_eos=True, return_tokens_as_token_ids=True, **asked(path, -1))
    for answer in both(other_server, path, body):
        assert [len(row) for row in ids_of(answer.choices[0].logprobs)] == [320, 320]
    scored = other_server.post(path, body | {"prompt_logprobs": -1}).json()
    rows = (scored["choices"][0] if path == COMPLETIONS else scored)["prompt_logprobs"]
    assert {len(row) for row in rows[1:]} == {320}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_b070_offsets_of_tokens_in_the_text(server: Served, echo: bool, as_ids: bool) -> None:
    body = {"prompt": "the inner song", "logprobs": 1, "echo": echo, "max_tokens": 20} | SAY
    prompt_tokens = ["the", " ", "in", "n", "er", " s", "on", "g"]
    tokens = prompt_tokens * 2 if echo else prompt_tokens
    start = 0 if echo else len("the inner song")
    offsets = [start + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    for answer in both(server, COMPLETIONS, body | {"return_tokens_as_token_ids": as_ids}):
        table = answer.choices[0].logprobs
        assert table is not None
        # The token that ends the text is one of the completion's, and has no place in the text.
        assert table["text_offset"] == [*offsets, offsets[-1] + 1]
        shown = table["tokens"][: len(tokens)]
        assert all(token.startswith("token_id:") for token in shown) if as_ids else shown == tokens


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_b071_echo_with_logprobs(server: Served, max_tokens: int, as_ids: bool) -> None:
    prompt = server.post("/tokenize", {"prompt": "Hello"}).json()["tokens"]
    assert len(prompt) == 5
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens} | SAY
    for answer in both(server, COMPLETIONS, body | {"return_tokens_as_token_ids": as_ids}):
        (choice,) = answer.choices
        assert choice.ending == ("Hello" + "Hello"[:max_tokens], "length", None)
        assert answer.completion_tokens == max_tokens
        table = choice.logprobs
        assert table is not None
        assert {name: len(entries) for name, entries in table.items()} == dict.fromkeys(
            ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 5 + max_tokens
        )
        assert table["token_logprobs"][0] is table["top_logprobs"][0] is None
        assert all(-9999.0 <= value <= 0 for value in table["token_logprobs"][1:])
        assert table["text_offset"] == list(range(5 + max_tokens))
        if as_ids:
            assert table["tokens"] == [f"token_id:{i}" for i in [*prompt, *prompt[:max_tokens]]]
        else:
            assert "".join(table["tokens"]) == choice.text


def test_b073_chats_with_and_without_top_logprobs(server: Served) -> None:
    body = body_of(CHAT, "hi", max_tokens=2, ignore_eos=True)
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        (choice,) = server.post(CHAT, body | fields).json()["choices"]
        assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]
    for fields in ({"logprobs": False, "top_logprobs": 3}, {"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}):
        assert_error(server.post(CHAT, body | fields), 400, "top_logprobs")


def test_b076_bytes_of_a_chats_tokens(server: Served) -> None:
    script = "é😀"
    body = body_of(CHAT, script, logprobs=True, top_logprobs=1, max_tokens=20, **SAY)
    for answer in both(server, CHAT, body):
        (choice,) = answer.choices
        assert choice.ending == (script, "stop", None)
        assert choice.logprobs is not None
        content = choice.logprobs["content"]
        assert [entry["bytes"] for entry in content] == [[byte] for byte in script.encode()]
        for entry in content:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert isinstance(entry["token"], str)
            assert -9999.0 <= entry["logprob"] <= 0
            assert [set(one) for one in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}]
        # The token of the end is generated, but not shown.
        assert answer.completion_tokens == len(content) + 1 == 7


def test_a_text_that_is_only_scored_is_streamed_without_a_token(server: Served) -> None:
    body = {"prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2, "return_token_ids": True}
    assert stream(server, COMPLETIONS, body).texts == whole(server, COMPLETIONS, body).texts == ["Hello", "Hello"]
    chunks = streamed(server, COMPLETIONS, body)
    assert [len(chunk["choices"][0].get("token_ids", [])) for chunk in chunks] == [0] * 4
