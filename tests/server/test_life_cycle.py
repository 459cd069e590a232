"""The server's beginning and end, and the death of its engine."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyvllm.cli import main
from pyvllm.server.config import ServerArgs
from pyvllm.server.life_cycle import MAX_FILES, allow_reuse, listening, raise_file_limit
from tests.server.conftest import ENGINE_FLAGS, Served, is_idle, lives, serve, wait_until

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 480, "ignore_eos": True, "stream": True}


def _stream(served: Served, body: dict[str, Any], begun: threading.Event | None = None) -> str:
    """A whole stream's text, as far as it came."""
    text = ""
    with (
        contextlib.suppress(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response,
    ):
        for piece in response.iter_text():
            text += piece
            if begun is not None and "data: " in text:
                begun.set()
    return text


def _begin(pool: ThreadPoolExecutor, served: Served, count: int, body: dict[str, Any]) -> list[Any]:
    """Streams of which text has come."""
    events = [threading.Event() for _ in range(count)]
    streams = [pool.submit(_stream, served, body, event) for event in events]
    assert all(event.wait(20) for event in events)
    return streams


def test_sigterm_lets_streams_finish_and_refuses_new_requests(tiny_llama: Path, tmp_path: Path) -> None:
    with serve(tiny_llama, tmp_path) as served, ThreadPoolExecutor(16) as pool:
        (stream,) = _begin(pool, served, 1, LONG)
        served.process.send_signal(signal.SIGTERM)
        refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{served.url}/health").status_code == 503
        assert stream.result().endswith('"finish_reason":"length","stop_reason":null}]}\n\ndata: [DONE]\n\n')
        assert served.process.wait(10) == 0
        assert not served.engine_pids()


def test_sigterm_with_no_time_ends_streams_with_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    with serve(tiny_llama, tmp_path, "--shutdown-timeout", "0") as served, ThreadPoolExecutor(16) as pool:
        streams = _begin(pool, served, 3, LONG | {"n": 4})
        start = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        texts = [stream.result() for stream in streams]
        assert served.process.wait(10) == 0
        assert time.monotonic() - start < 5
    for text in texts:
        assert '"code":503' in text
        assert text.endswith("data: [DONE]\n\n")


def test_killed_engine_ends_all_requests_and_the_server(tiny_llama: Path, tmp_path: Path) -> None:
    with serve(tiny_llama, tmp_path) as served, ThreadPoolExecutor(16) as pool:
        streams = _begin(pool, served, 4, LONG)
        whole = pool.submit(httpx.post, f"{served.url}/v1/completions", json=LONG | {"stream": False}, timeout=60)
        time.sleep(0.05)
        (engine,) = served.engine_pids()
        start = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
        texts = [stream.result() for stream in streams]
        answer = whole.result()
        assert time.monotonic() - start < 5
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert served.process.wait(30) == 1
    for text in texts:
        assert '"error":' in text
        assert '"finish_reason":"stop"' not in text
        assert text.endswith("data: [DONE]\n\n")


def test_engine_that_hangs_is_as_good_as_dead(tiny_llama: Path, tmp_path: Path) -> None:
    with serve(tiny_llama, tmp_path) as served, ThreadPoolExecutor(16) as pool:
        (stream,) = _begin(pool, served, 1, LONG)
        (engine,) = served.engine_pids()
        start = time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
        assert '"error":' in stream.result()
        assert time.monotonic() - start < 5
        assert served.process.wait(30) == 1
        assert not lives(engine)


def test_port_in_use_is_said_before_a_model_is_loaded(tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "pyvllm", "serve", str(tiny_llama), "--host", "127.0.0.1", "--port", port]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("pyvllm: error: cannot listen on ('127.0.0.1'")
    assert result.stderr.count("\n") == 1


def test_a_port_is_one_servers_while_it_loads_and_another_can_follow_it() -> None:
    with listening(ServerArgs(host="127.0.0.1", port=0)) as first:
        args = ServerArgs(host="127.0.0.1", port=first.getsockname()[1])
        with pytest.raises(OSError, match="cannot listen on"), listening(args):
            pass
        allow_reuse(first)
        first.listen()
        client = socket.create_connection(first.getsockname())
        accepted, _ = first.accept()
    accepted.close()  # The server's end is closed first, so the system keeps the address for a minute.
    client.close()
    with listening(args) as second:
        allow_reuse(second)
        second.listen()
        with pytest.raises(OSError, match="cannot listen on"), listening(args):
            pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--middleware", "no.such.Thing"], "middleware 'no.such.Thing' cannot be imported"),
        (["--middleware", "os.path.join"], "middleware must be classes or coroutine functions"),
        (["--ssl-certfile", "pyproject.toml"], "TLS with ssl_certfile 'pyproject.toml' cannot be used"),
        (["--ssl-certfile", "/no/such/file"], "No such file"),
    ],
)
def test_files_that_cannot_be_used_are_said_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["serve", str(tmp_path), "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err


def test_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pyvllm", "serve", str(tmp_path / "none"), "--port", "0"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "pyvllm: error: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("when", ["streaming", "whole", "waiting"])
def test_clients_that_leave_are_aborted(server: Served, when: str) -> None:
    before = server.metric("pyvllm:request_success_total")
    body = LONG | {"stream": when == "streaming", "n": 4}
    count = 20 if when == "waiting" else 2
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            http = stack.enter_context(httpx.Client(timeout=httpx.Timeout(30, read=0.05)))
            if when == "streaming":
                response = stack.enter_context(http.stream("POST", f"{server.url}/v1/completions", json=body))
                next(response.iter_text())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(f"{server.url}/v1/completions", json=body)
    wait_until(lambda: is_idle(server), 2)
    assert server.metric("pyvllm:request_success_total") == before + count


def test_storm_of_clients_that_leave_at_once(server: Served) -> None:
    content = b'{"prompt":"Hello","max_tokens":400,"ignore_eos":true,"stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    port = int(server.url.rsplit(":", 1)[1])
    raise_file_limit()
    with contextlib.ExitStack() as stack:
        for _ in range(min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(head % len(content) + content)
    wait_until(lambda: is_idle(server), 30)
    assert "socket.send() raised" not in server.log.read_text(), "what nobody reads is not written"
    assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status_code == 200


def test_a_low_limit_of_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft in (MAX_FILES, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_slow_readers_hold_up_nobody(server: Served) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    content = b'{"prompt":"Hello","max_tokens":480,"ignore_eos":true,"stream":true,"n":4,"logprobs":20}'
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        slow.sendall(head % len(content) + content)
        slow.recv(100)
        start = time.monotonic()
        for _ in range(5):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 4}).status_code == 200
        assert time.monotonic() - start < 20
        slow.settimeout(30)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            piece = slow.recv(1 << 16)
            assert piece
            received = received[-100:] + piece
        assert b"[DONE]" in received


def test_unix_socket(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    argv = [sys.executable, "-m", "pyvllm", "serve", str(tiny_llama), "--uds", str(path), *ENGINE_FLAGS]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as http:
                wait_until(lambda: path.exists() and _is_up(http), 60)
                assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        finally:
            process.terminate()
        assert process.wait(20) == 0
    assert not path.exists()


def _is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
