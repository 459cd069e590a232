"""API keys: which requests need one, whatever way the path is spelled."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from pyvllm.server.auth import ApiKeys
from tests.async_requests import PATIENCE_S
from tests.server.conftest import Served, serve

KEYS = ("key-one-5123", "key-two-8841")


@pytest.fixture(scope="module")
def keyed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keyed")
    flags = ["--api-key", KEYS[0], "--api-key", KEYS[1], "--root-path", "/llm", "--served-model-name", "tiny"]
    flags += ["--allowed-origins", '["https://page.example"]']
    with serve(tiny_llama, folder, *flags) as served:
        served.key = KEYS[1]
        yield served


def _routes(served: Served) -> list[tuple[str, str]]:
    with served.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    found = [(method.upper(), path.replace("{model_id}", "tiny")) for path, item in paths.items() for method in item]
    return [*found, ("GET", "/docs"), ("GET", "/redoc"), ("GET", "/openapi.json"), ("GET", "/nothing")]


def test_every_route_needs_a_key_but_health(keyed: Served) -> None:
    routes = _routes(keyed)
    assert {"/v1/completions", "/metrics", "/tokenize", "/invocations", "/engine/snapshot"} <= {
        path for _, path in routes
    }
    with httpx.Client(timeout=PATIENCE_S, base_url=keyed.url) as stranger:
        for method, path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEYS[0]}):
                response = stranger.request(method, path, headers=headers)
                if (method, path) == ("GET", "/health"):
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, (method, path, headers)
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == 401


def test_each_key_opens_every_route(keyed: Served) -> None:
    for key in KEYS:
        with httpx.Client(timeout=PATIENCE_S, base_url=keyed.url, headers={"Authorization": f"Bearer {key}"}) as http:
            assert all(http.request(method, path).status_code != 401 for method, path in _routes(keyed))
    assert keyed.client().models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0).models.list()


@pytest.mark.parametrize(
    "target",
    [
        *(
            "//v1/models",
            "/V1/models",
            "/v1/../v1/models",
            "/v1/models/",
            "/health/../v1/models",
            "/health/",
            "/Health",
        ),
        *(
            "/llm/v1/models",
            "/llm/llm/health",
            "//health",
            "/health;x",
            "/%2e/health",
            "*",
            "http://health/v1/models?/health",
        ),
    ],
)
def test_spellings_of_a_path_open_nothing(keyed: Served, target: str) -> None:
    assert _raw_status(keyed, f"GET {target} HTTP/1.1\r\nHost: a\r\n") in (400, 401)


@pytest.mark.parametrize("host", ["x/health?", "a/v1/..#", "a\\health", ""])
def test_host_header_opens_nothing(keyed: Served, host: str) -> None:
    assert _raw_status(keyed, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n") in (400, 401)


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT"])
def test_methods_open_nothing(keyed: Served, method: str) -> None:
    assert _raw_status(keyed, f"{method} /v1/models HTTP/1.1\r\nHost: a\r\n") in (400, 401)


def test_websockets_open_nothing(keyed: Served) -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    assert _raw_status(keyed, head) in (400, 401, 403)


@pytest.mark.parametrize("value", [b"Bearer \xc3\xa9", b"Bearer", b"", b"Basic a2V5", b"Bearer " + b"x" * 10_000])
def test_odd_keys_are_refused(keyed: Served, value: bytes) -> None:
    with httpx.Client(timeout=PATIENCE_S, base_url=keyed.url) as http:
        assert http.get("/v1/models", headers=[(b"authorization", value)]).status_code == 401


def test_preflight_needs_no_key(keyed: Served) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with httpx.Client(timeout=PATIENCE_S, base_url=keyed.url) as http:
        allowed = http.options("/v1/completions", headers=headers)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        refused = http.options("/v1/completions", headers=headers | {"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in refused.headers
        # A page must be able to read that its key is wrong.
        answer = http.get("/v1/models", headers={"Origin": "https://page.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://page.example")


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[bytes] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    layer = ApiKeys(lambda *_: None, keys=KEYS, open_paths=())  # type: ignore[arg-type]
    scope = {"type": "http", "path": "/x", "method": "GET", "headers": [(b"authorization", b"Bearer key-one-5123")]}
    assert layer._may_pass(scope)
    assert compared == [key.encode() for key in KEYS], "all keys are compared, also after one that fits"


@pytest.mark.parametrize("key", ["schlüssel", "ключ", "a\udcff"], ids=["latin", "cyrillic", "no-text"])
def test_keys_are_bytes_of_any_kind(key: str) -> None:
    layer = ApiKeys(lambda *_: None, keys=[key], open_paths=())  # type: ignore[arg-type]

    def may_pass(value: bytes) -> bool:
        return layer._may_pass({"type": "http", "path": "/x", "method": "GET", "headers": [(b"authorization", value)]})

    assert may_pass(b"Bearer " + os.fsencode(key))
    assert not may_pass(b"Bearer " + os.fsencode(key)[:-1])
    assert not may_pass(b"Bearer \xff\xfe")


def test_keys_are_in_no_log_and_no_error(keyed: Served) -> None:
    with httpx.Client(timeout=PATIENCE_S, base_url=keyed.url) as http:
        for key in (KEYS[0], "wrong-key-77"):
            http.get(f"/v1/models?key={key}", headers={"Authorization": f"Bearer {key}"})
    log = keyed.log.read_text()
    assert "/v1/models" in log
    assert not any(key in log for key in (*KEYS, "wrong-key-77"))


def _raw_status(served: Served, head: str) -> int:
    """The status of a request that no client would send."""
    address = urlsplit(served.url)
    assert address.hostname is not None
    assert address.port is not None
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n")
        line = connection.makefile("rb").readline()
    return int(line.split()[1])
