"""Constrained output over HTTP: `structured_outputs` and OpenAI's `response_format`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.answers import streamed
from tests.server.conftest import Served
from tests.server.test_errors import assert_error

COMPLETION: dict[str, Any] = {"prompt": "Hello", "max_tokens": 64, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
CHAT_PATH = "/v1/chat/completions"


def _format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'root ::= "x" [0-9]', "regex": None}, "x[0-9]"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, '{"a":(true|false)}'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_text_has_the_form(server: Served, form: dict[str, Any], pattern: str, stream: bool) -> None:
    body = COMPLETION | {"structured_outputs": form}
    if stream:
        chunks = streamed(server, "/v1/completions", body)
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    else:
        text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert re.fullmatch(pattern, text), text


def test_response_format_is_a_schema(server: Served) -> None:
    answer = server.post(CHAT_PATH, CHAT | _format(SCHEMA)).json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"a"}
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_response_format_is_any_object(server: Served) -> None:
    body = CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 4}
    assert server.post(CHAT_PATH, body).json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    "value",
    [
        *("x", [], {}, {"regex": "a", "choice": ["b"]}, {"regex": 5}, {"choice": []}, {"xyzzy": 1}, {"regex": "("}),
        *({"json": {"type": "nothing"}}, {"json": "{"}, {"grammar": "not a grammar"}, {"structural_tag": "x"}),
        {"json_object": False},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_forms_are_named(server: Served, value: Any, stream: bool) -> None:
    response = server.post("/v1/completions", COMPLETION | {"structured_outputs": value, "stream": stream})
    if response.status_code == 200:  # The stream had begun when the grammar was found to be none.
        assert stream
        assert '"param":"structured_outputs"' in response.text
        return
    assert_error(response, 400, "structured_outputs")


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "x"}}},
        {"response_format": {"type": "structural_tag"}},
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "a", "schema": {}}],
                "triggers": ["b"],
            }
        },
        {"response_format": {"type": "structural_tag", "structures": 5}},
        _format({"type": "nothing"}),
        _format(SCHEMA) | {"structured_outputs": {"regex": "a"}},
    ],
)
def test_wrong_response_formats_are_named(server: Served, field: dict[str, Any]) -> None:
    assert "response_format" in assert_error(server.post(CHAT_PATH, CHAT | field), 400, "response_format")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "must not be given beside guided_json"),
        (_format(SCHEMA) | {"guided_choice": ["a"]}, "guided_choice", "must not be given beside response_format"),
        ({"structured_outputs": {"regex": 5}, "guided_regex": "a"}, "structured_outputs", "regex is a string, got 5"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only be given with"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(
    server: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    assert message in assert_error(server.post(CHAT_PATH, CHAT | fields), 400, param)


def test_whitespace_of_guided_json_has_its_pattern(server: Served) -> None:
    body = CHAT | {"guided_json": SCHEMA, "guided_whitespace_pattern": "  "}
    text = server.post(CHAT_PATH, body).json()["choices"][0]["message"]["content"]
    assert re.fullmatch(r'\{(  )?"a"(  )?:(  )?(true|false)(  )?\}', text), text
    assert "  " in text


def test_any_text_beside_a_form_is_that_form(server: Served) -> None:
    body = CHAT | {"response_format": {"type": "text"}, "guided_choice": ["red"]}
    assert server.post(CHAT_PATH, body).json()["choices"][0]["message"]["content"] == "red"
