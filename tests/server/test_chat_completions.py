"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.answers import streamed
from tests.server.conftest import Served

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
PATH = "/v1/chat/completions"


def test_openai_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], temperature=0, max_completion_tokens=8
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_shape_of_a_stream(server: Served) -> None:
    chunks = streamed(server, PATH, GREEDY | {"stream_options": {"include_usage": True}})
    common = {name: chunks[0][name] for name in ("id", "object", "created", "model")}
    assert common["object"] == "chat.completion.chunk"
    assert all(common.items() <= chunk.items() for chunk in chunks)
    first, *contents, last, usage = chunks
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    assert first["choices"] == [role]
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in contents)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in contents)
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length", "stop_reason": None}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8


def test_bytes_of_a_stream(server: Served) -> None:
    """Byte for byte, but for what is new in every answer."""
    with server.http() as http:
        response = http.post(PATH, json=GREEDY | {"max_tokens": 1, "stream": True}, headers={"X-Request-Id": "me"})
    events = response.content.split(b"\n\n")
    created = response.text.split('"created":')[1].split(",")[0].encode()
    head = b'data: {"id":"chatcmpl-me","object":"chat.completion.chunk","created":' + created + b',"model":"tiny",'
    role = b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
    assert events[0] == head + role
    assert events[1].startswith(head + b'"choices":[{"index":0,"delta":{"content":"')
    assert events[1].endswith(b'"},"finish_reason":null}]}')
    assert events[2] == head + b'"choices":[{"index":0,"delta":{},"finish_reason":"length","stop_reason":null}]}'
    assert events[3:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize("n", [1, 3])
def test_streams_equal_wholes(server: Served, n: int) -> None:
    body = {"messages": HELLO, "seed": 11, "max_tokens": 30, "n": n}
    whole = server.post(PATH, body).json()["choices"]
    texts = dict.fromkeys(range(n), "")
    ends = {}
    for chunk in streamed(server, PATH, body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] = choice["finish_reason"]
    assert [texts[i] for i in range(n)] == [choice["message"]["content"] for choice in whole]
    assert [ends[i] for i in range(n)] == [choice["finish_reason"] for choice in whole]


def test_prompt_is_what_the_template_makes(server: Served) -> None:
    ids = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    answer = server.post(PATH, GREEDY | {"return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == ids
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_forms_of_content(server: Served) -> None:
    def ids(content: Any) -> list[int]:
        found: list[int] = server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()[
            "tokens"
        ]
        return found

    assert ids("hi") == ids([{"type": "text", "text": "hi"}])
    assert ids("a\nb") == ids([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert ids("") == ids([]) == ids(None)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages", {"messages": ["hi"]}),
        ("messages", {}),
        ("messages[0].role", {"messages": [{"content": "hi"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 600}]}),
        ("top_logprobs", GREEDY | {"top_logprobs": 3}),
        ("top_logprobs", GREEDY | {"top_logprobs": 3, "logprobs": False}),
        ("top_logprobs", GREEDY | {"top_logprobs": 21, "logprobs": True}),
        ("top_logprobs", GREEDY | {"top_logprobs": 2**31, "logprobs": True}),
        ("top_logprobs", GREEDY | {"top_logprobs": 2**32 + 1, "logprobs": True}),
        ("top_logprobs", GREEDY | {"top_logprobs": -1, "logprobs": True}),
        ("logprobs", GREEDY | {"logprobs": 2}),
        ("max_tokens", GREEDY | {"max_tokens": 0}),
        ("max_completion_tokens", GREEDY | {"max_completion_tokens": 0}),
        ("stream_options", GREEDY | {"stream_options": {"include_usage": True}}),
        ("chat_template", GREEDY | {"chat_template": "{{ messages }}"}),
        ("chat_template_kwargs", GREEDY | {"chat_template_kwargs": {"tokenize": True}}),
        ("chat_template_kwargs", GREEDY | {"chat_template_kwargs": {"chat_template": "x"}}),
        ("tools", GREEDY | {"tools": []}),
        ("prompt_logprobs", GREEDY | {"prompt_logprobs": 1, "stream": True}),
    ],
)
def test_wrong_fields_are_named(server: Served, field: str, body: dict[str, Any]) -> None:
    response = server.post(PATH, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
    ],
)
def test_what_does_not_exist_is_not_ignored(server: Served, field: str, value: Any) -> None:
    response = server.post(PATH, GREEDY | {field: value})
    assert response.status_code == 501
    assert response.json()["error"]["param"] == field


def test_text_is_a_response_format(server: Served) -> None:
    body = GREEDY | {"response_format": {"type": "text"}, "tool_choice": "none", "user": "me", "store": False}
    assert server.post(PATH, body).status_code == 200


def test_final_message_goes_on(server: Served) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    body = GREEDY | {"messages": messages, "continue_final_message": True}
    answer = server.post(PATH, body).json()
    text = server.post("/detokenize", {"tokens": server.post("/tokenize", _tokenize(body)).json()["tokens"]}).json()
    assert text["prompt"].endswith("<|im_start|>assistant\nI am")
    both = server.post(PATH, body | {"add_generation_prompt": True})
    assert both.status_code == 400
    echoed = server.post(PATH, body | {"echo": True}).json()["choices"][0]["message"]["content"]
    assert echoed == "I am" + answer["choices"][0]["message"]["content"]
    pieces = streamed(server, PATH, body | {"echo": True})
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in pieces) == echoed


def _tokenize(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("messages", "continue_final_message")}


def test_invocations_take_either_body(server: Served) -> None:
    assert server.post("/invocations", GREEDY).json()["object"] == "chat.completion"
    assert server.post("/invocations", {"prompt": "Hello"}).json()["object"] == "text_completion"
    assert server.post("/invocations", {"x": 1}).status_code == 400
