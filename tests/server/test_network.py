"""TLS, middleware, limits of the queue, and other flags of one server."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.async_requests import PATIENCE_S
from tests.server.answers import streamed
from tests.server.conftest import Served, serve, wait_until

MODULE = "tests.server.test_network"
TLS = Path(__file__).parent / "tls"
BODY: dict[str, Any] = {"prompt": "Hello", "temperature": 0, "max_tokens": 4}


class AddHeader:
    """ASGI middleware, named on the server's command line."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-class", b"1")]
            await send(message)

        await self.app(scope, receive, send_more)


async def add_header(request: Request, call_next: Any) -> Any:
    """HTTP middleware, likewise."""
    response = await call_next(request)
    response.headers["x-function"] = "1"
    return response


@pytest.fixture(scope="module")
def secure(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("secure")
    for name in ("key", "pem"):
        shutil.copy(TLS / f"first.{name}", folder / f"now.{name}")
    flags = ["--ssl-keyfile", str(folder / "now.key"), "--ssl-certfile", str(folder / "now.pem")]
    flags += ["--enable-ssl-refresh", "--disable-fastapi-docs", "--unknown-fields", "warn", "--vllm-metrics"]
    flags += ["--middleware", f"{MODULE}.AddHeader", f"{MODULE}.add_header"]
    flags += ["--max-num-queued-reqs", "2", "--max-num-seqs", "2", "--enable-prompt-tokens-details"]
    flags += ["--trust-request-chat-template", "--enable-force-include-usage", "--response-role", "bot"]
    flags += ["--enable-log-requests", "--max-log-len", "4", "--return-tokens-as-token-ids"]
    with serve(tiny_llama, folder, *flags, PYVLLM_LOGGING_LEVEL="DEBUG", PYTHONPATH=str(TLS.parents[2])) as served:
        yield served


def test_middleware_is_put_around(secure: Served) -> None:
    headers = secure.post("/v1/completions", BODY).headers
    assert (headers["x-class"], headers["x-function"]) == ("1", "1")
    assert "x-request-id" not in headers


def test_streams_pass_through_middleware(secure: Served) -> None:
    whole = secure.post("/v1/completions", BODY).json()["choices"][0]["text"]
    chunks = streamed(secure, "/v1/completions", BODY)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_unknown_fields_may_be_a_warning(secure: Served) -> None:
    response = secure.post("/v1/completions", BODY | {"xyzzy": 1, 'a"\n': 2})
    assert response.status_code == 200
    assert response.headers["warning"] == '299 - "unknown fields ignored: xyzzy, a??"'


def test_usage_tells_what_was_cached(secure: Served) -> None:
    body = BODY | {"prompt": "x" * 40}
    secure.post("/v1/completions", body)
    usage = secure.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}


def test_clients_may_bring_templates_if_trusted(secure: Served) -> None:
    body = BODY | {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ messages[0].content }}!"}
    del body["prompt"]
    answer = secure.post("/v1/chat/completions", body).json()
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["message"]["role"] == "bot"
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{% if",
        "{{ 1 / 0 }}",
    ):
        response = secure.post("/v1/chat/completions", body | {"chat_template": template})
        if response.status_code == 200:  # the sandbox made nothing of it
            assert response.json()["usage"]["prompt_tokens"] <= 1
        else:
            assert response.status_code == 400


def test_full_queue_is_503_and_health_stays(secure: Served) -> None:
    long = BODY | {"max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        answers = [answer.result() for answer in [pool.submit(secure.post, "/v1/completions", long) for _ in range(12)]]
        with secure.http() as http:
            assert http.get("/health").status_code == 200
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 1 <= len(refused) < 12
    assert all(answer.status_code == 503 and int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert secure.post("/v1/completions", long | {"n": 2}).status_code == 200


def test_docs_may_be_off(secure: Served) -> None:
    with secure.http() as http:
        assert [http.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3


def test_metrics_come_under_the_old_prefix_too(secure: Served) -> None:
    assert secure.metric("vllm:prompt_tokens_total") == secure.metric("pyvllm:prompt_tokens_total") > 0


def test_requests_are_logged_with_what_fits(secure: Served) -> None:
    secure.post("/v1/completions", BODY | {"prompt": "abcdefgh", "request_id": "shown-1"})
    log = secure.log.read_text()
    assert "request shown-1: prompt 'abcd'" in log
    assert "abcdefgh" not in log


def test_new_certificates_are_taken(secure: Served) -> None:
    port = int(secure.url.rsplit(":", 1)[1])

    def certificate() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port))

    assert certificate().split() == (TLS / "first.pem").read_text().split()
    trusting = ssl.create_default_context(cafile=str(TLS / "first.pem"))
    assert httpx.get(f"{secure.url}/health", verify=trusting, timeout=PATIENCE_S).status_code == 200
    shutil.copy(TLS / "second.pem", secure.log.parent / "now.pem")
    wait_until(lambda: "the new TLS files cannot be used, the old ones stay" in secure.log.read_text())
    assert certificate().split() == (TLS / "first.pem").read_text().split()
    shutil.copy(TLS / "second.key", secure.log.parent / "now.key")
    wait_until(lambda: certificate().split() == (TLS / "second.pem").read_text().split())


def test_clients_that_speak_no_tls_hold_up_nobody(secure: Served) -> None:
    port = int(secure.url.rsplit(":", 1)[1])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    try:
        done = threading.Event()
        with ThreadPoolExecutor() as pool:
            pool.submit(secure.post, "/v1/completions", BODY).add_done_callback(lambda _: done.set())
            assert done.wait(PATIENCE_S)
    finally:
        for connection in silent:
            connection.close()
