"""The server's own description: requests made from it are answered, whatever is in them."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st

from tests.server.conftest import Served

POSTS = ("/v1/completions", "/v1/chat/completions", "/invocations", "/tokenize", "/detokenize", "/ping")
GETS = ("/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/v1/models/{model_id}", "/engine/snapshot")


@pytest.fixture(scope="module")
def schema(session_server: Served) -> Any:
    return schemathesis.openapi.from_url(f"{session_server.url}/openapi.json")


def test_every_field_is_described(server: Served) -> None:
    with server.http() as http:
        described = http.get("/openapi.json").json()
    assert set(described["paths"]) == {*POSTS, *GETS}
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        properties = described["components"]["schemas"][name]["properties"]
        assert {"temperature", "stop", "use_beam_search", "stream_options", "logit_bias"} <= set(properties)
        assert [field for field, item in properties.items() if not item.get("description")] == []


@pytest.mark.parametrize(("path", "method"), [*((path, "POST") for path in POSTS), *((path, "GET") for path in GETS)])
def test_no_request_is_a_server_error(server: Served, schema: Any, path: str, method: str) -> None:
    operation = schema[path][method]
    strategy = st.one_of(
        operation.as_strategy(), operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    )
    examples = 60 if method == "POST" else 5

    @hypothesis.settings(max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=strategy)
    def ask(case: Any) -> None:
        response = case.call(timeout=60)
        assert response.status_code < 500 or response.status_code == 501, (case.body, response.content)

    ask()
    with server.http() as http:
        assert http.get("/health").status_code == 200
