"""What clients are told of requests that are wrong: 400 with the field's name, in OpenAI's shape, whatever it is."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import Served, wait_until

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
PATH = "/v1/completions"


def assert_error(response: httpx.Response, status: int, param: str | None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    message: str = error["message"]
    assert message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (0, -1, 1.5, "2", True, 10**7, [1])],
        *[("best_of", value) for value in (0, -1, "2", 10**7)],
        *[("temperature", value) for value in (-0.1, 2.1, 999999, "0.7", [1], True)],
        *[("top_p", value) for value in (-1, 1.01, "1")],
        *[("top_k", value) for value in (-2, 1.5, "1")],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("repetition_penalty", value) for value in (0, -1, "x")],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (2.01, -2.01, "x")],
        *[("max_tokens", value) for value in (-1, 1.5, "x", 10**30)],
        *[("min_tokens", value) for value in (-1, 10**9, "x")],
        *[("seed", value) for value in ("x", 1.5, 2**64)],
        *[("stop", value) for value in ("", [""], ["a", None], 5, [5], {"a": 1}, ["a"] * 65)],
        *[("stop_token_ids", value) for value in ([320], [-1], ["a"], 5, "abc", [1.5], [True])],
        *[("logprobs", value) for value in (21, -2, 2**31, 2**32 + 1, "x", True)],
        *[("prompt_logprobs", value) for value in (21, -2, "x")],
        *[("allowed_token_ids", value) for value in ([], [320], [-1], "x")],
        *[
            ("logit_bias", value)
            for value in ({"320": 5}, {"-1": 5}, {"\u0661": 5}, {" 1": 5}, {"abc": 1}, {"3": 101}, {"3": "x"}, [1], "x")
        ],
        *[("ignore_eos", value) for value in ("x", 1, [1])],
        *[("early_stopping", value) for value in ("x", 5)],
        *[("stream", value) for value in ("x", 1)],
        *[("priority", value) for value in ("x", 1.5, 2**63)],
        *[("cache_salt", value) for value in ("", "x" * 10**6, "\u0000", "a/../b", "a\nb", 5)],
        *[("request_id", value) for value in ("", "a b", "x" * 129, "a\nERROR x", 5)],
        *[("truncate_prompt_tokens", value) for value in (-2, 0, "x")],
        *[("stream_options", value) for value in ("x", {"include_usage": "x"}, {"other": 1}, {})],
        *[("response_format", value) for value in ("x", {}, {"type": "x"}, {"type": "text", "more": 1})],
        ("suffix", "x"),
        ("model", 5),
    ],
)
def test_wrong_values_are_named(server: Served, field: str, value: Any) -> None:
    message = assert_error(server.post(PATH, BODY | {field: value}), 400, field)
    assert field in message


@pytest.mark.parametrize(
    "prompt", [[1.5], [1e20], [True], [[]], ["a", 1], [1, "a"], {}, 5, [2**31], [None], [{}], [[1], "a"]]
)
def test_prompts_that_are_none(server: Served, prompt: Any) -> None:
    assert "prompt" in assert_error(server.post(PATH, BODY | {"prompt": prompt}), 400, "prompt")


@pytest.mark.parametrize("field", ["logit_bias", "stop", "prompt", "metadata", "structured_outputs", "user"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_named(server: Served, field: str, opening: str) -> None:
    depth = 1000
    value = opening * depth + "1" + {"[": "]", '{"a":': "}"}[opening] * depth
    fields = {"prompt": '"a"', "max_tokens": "1", field: value}
    content = "{" + ",".join(f'"{name}":{one}' for name, one in fields.items()) + "}"
    with server.http() as http:
        response = http.post(PATH, content=content, headers={"content-type": "application/json"})
        assert_error(response, 400, field)
        kwargs = f'{{"messages":[{{"role":"user","content":"a"}}],"max_tokens":1,"chat_template_kwargs":{value}}}'
        response = http.post("/v1/chat/completions", content=kwargs, headers={"content-type": "application/json"})
        assert_error(response, 400, "chat_template_kwargs")


def test_nesting_that_is_usual_is_taken(server: Served) -> None:
    value: Any = 1
    for _ in range(90):
        value = {"a": value}
    assert server.post(PATH, BODY | {"metadata": value}).status_code == 200
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": {"x": value}}
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert server.post(PATH, BODY | {"prompt": [[1]] * 500, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("field", ["bad_words", "structured_outputs", "stop_regex", "vllm_xargs"])
def test_planned_features_are_refused_until_they_exist(server: Served, field: str) -> None:
    with server.http() as http:
        schema = http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    if "501" in schema[field]["description"]:
        assert_error(server.post(PATH, BODY | {field: ["x"]}), 501, field)


def test_messages_do_not_repeat_long_values(server: Served) -> None:
    for field, value in (
        ("stop_regex", ["a{1,100}b"] * 10_000),
        ("stop", [5] * 10**5),
        ("structured_outputs", ["x"] * 10**5),
    ):
        assert len(assert_error(server.post(PATH, BODY | {field: value}), 400, field)) <= 2003


def test_unknown_fields_have_a_nearest_name(server: Served) -> None:
    message = assert_error(server.post(PATH, BODY | {"temprature": 1}), 400, "temprature")
    assert "did you mean temperature?" in message
    assert_error(server.post(PATH, BODY | {"xyzzy": None}), 400, "xyzzy")


def test_openai_client_gets_its_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.param == "model"
    assert "tiny" in str(missing.value)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'"x"', "application/json; charset=utf-8", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"prompt":"\\ud800"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"prompt=a", "application/x-www-form-urlencoded", 415),
        (b"{}", "text/plain", 415),
    ],
)
def test_bodies_that_are_no_request(server: Served, content: bytes, kind: str, status: int) -> None:
    with server.http() as http:
        assert_error(http.post(PATH, content=content, headers={"content-type": kind}), status, None)


def test_paths_and_methods(server: Served) -> None:
    with server.http() as http:
        assert_error(http.get("/nothing"), 404, None)
        assert_error(http.get("/v1/models/"), 404, "model")
        response = http.get(PATH)
        assert_error(response, 405, None)
        assert response.headers["allow"] == "POST"
        assert_error(http.post("/v1/models", json={}), 405, None)
        for path in ("/health", "/v1/models", "/metrics"):
            response = http.head(path)
            assert (response.status_code, response.content) == (200, b"")


def test_large_bodies_are_refused_before_they_are_read(server: Served) -> None:
    def pieces() -> Any:
        for _ in range(50):
            yield b" " * 2**20

    with server.http() as http:
        json_type = {"content-type": "application/json"}
        assert_error(http.post(PATH, content=b" " * (17 * 2**20), headers=json_type), 413, None)
        assert_error(http.post(PATH, content=pieces(), headers=json_type), 413, None)
        assert http.get("/health").status_code == 200


def test_large_heads_are_refused(server: Served) -> None:
    for size in (70_000, 2**20):
        with server.http() as http:
            assert_error(http.get("/health", headers={"X-Long": "x" * size}), 431, None)
            assert_error(http.get("/health?" + "x" * 65_000, headers={"X-Long": "x" * 600}), 431, None)
            assert_error(http.get("/health", headers={f"X-{i}": "x" * 600 for i in range(size // 600)}), 431, None)
            assert http.get("/health").status_code == 200


def test_refusals_cost_nothing_and_are_counted(server: Served) -> None:
    before = server.metric("pyvllm:admission_rejections_total")
    for _ in range(20):
        server.post(PATH, {"prompt": "x" * 600})
    assert server.metric("pyvllm:admission_rejections_total") == before + 20


def test_many_prompts_are_refused(server: Served) -> None:
    assert_error(server.post(PATH, {"prompt": ["a"] * 100_000}), 400, "prompt")
    assert_error(server.post(PATH, {"prompt": ["a"] * 1000, "n": 64}), 400, "n")


def test_request_ids_are_names_or_are_replaced(server: Served) -> None:
    with server.http() as http:
        answer = http.post(PATH, json=BODY, headers={"X-Request-Id": "job-1"})
        assert answer.json()["id"] == "cmpl-job-1"
        assert answer.headers["x-request-id"] == "job-1"
        for bad in ("x" * 10_000, "a ERROR x", "a/b"):
            answer = http.post(PATH, json=BODY, headers={"X-Request-Id": bad})
            assert answer.status_code == 200
            assert bad not in answer.text
            assert answer.headers["x-request-id"] != bad
        assert http.post(PATH, json=BODY | {"request_id": "mine"}).json()["id"] == "cmpl-mine"


def test_one_line_is_logged_for_a_request_and_no_prompt(server: Served) -> None:
    marker = "secretive words"
    size = len(server.log.read_text())
    with server.http() as http:
        http.post(PATH, json=BODY | {"prompt": marker}, headers={"X-Request-Id": "logged-1"})
        http.post(PATH, json=BODY | {"prompt": marker, "temperature": -1}, headers={"X-Request-Id": "logged-2"})

    def logged() -> list[str]:
        return [line for line in server.log.read_text()[size:].splitlines() if "logged-" in line]

    wait_until(lambda: len(logged()) == 2)  # The line comes after the answer.
    lines = logged()
    assert f"POST {PATH} 200 " in lines[0]
    assert "15 prompt and 2 output tokens" in lines[0]
    assert f"POST {PATH} 400 " in lines[1]
    assert marker not in server.log.read_text()
