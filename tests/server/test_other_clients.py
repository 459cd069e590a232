"""Programs on top of OpenAI's client: langchain-openai and litellm, where they are installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def _answer(server: Served, **fields: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0} | fields
    text: str = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    return text


def test_langchain(server: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")
    options = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "tiny", "temperature": 0, "max_tokens": 8}
    chat = langchain.ChatOpenAI(**options)
    expected = _answer(server)
    assert chat.invoke(MESSAGES).content == expected
    assert "".join(chunk.content for chunk in chat.stream(MESSAGES)) == expected
    assert chat.bind(stop=[expected[-1]]).invoke(MESSAGES).content == _answer(server, stop=[expected[-1]])
    properties = {"a": {"type": "boolean"}}
    schema = {
        "title": "A",
        "type": "object",
        "properties": properties,
        "required": ["a"],
        "additionalProperties": False,
    }
    form = langchain.ChatOpenAI(**options | {"max_tokens": 200}).with_structured_output(schema, method="json_schema")
    assert set(form.invoke(MESSAGES)) == {"a"}
    text = langchain.OpenAI(**options).invoke("Hello")
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    assert text == server.post("/v1/completions", body).json()["choices"][0]["text"]


def test_litellm(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # Else it asks the network for prices.
    litellm = pytest.importorskip("litellm")
    options = {"api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": 8, "temperature": 0}
    expected = _answer(server)
    answer = litellm.completion(model="openai/tiny", messages=MESSAGES, **options)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens > 0
    stream = litellm.completion(model="openai/tiny", messages=MESSAGES, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    vllm = litellm.completion(model="hosted_vllm/tiny", messages=MESSAGES, **options)
    assert vllm.choices[0].message.content == expected
    text = litellm.text_completion(model="text-completion-openai/tiny", prompt="Hello", **options)
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    assert text.choices[0].text == server.post("/v1/completions", body).json()["choices"][0]["text"]
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model="openai/tiny", messages=MESSAGES, **options | {"max_tokens": -1})
