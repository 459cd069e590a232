"""The server's beginning and end, and the death of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyvllm.cli import main
from pyvllm.server.config import ServerArgs
from pyvllm.server.life_cycle import MAX_FILES, allow_reuse, listening, raise_file_limit
from tests.async_requests import PATIENCE_S, is_gone
from tests.server.conftest import ENGINE_FLAGS, LONG_POOL, Served, is_idle, serve, stop, wait_until

SHORT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 480, "ignore_eos": True, "stream": True}
LONG = SHORT | {"max_tokens": 30_000}


def _stream(served: Served, body: dict[str, Any], begun: threading.Event | None = None) -> str:
    """A whole stream's text, as far as it came."""
    text = ""
    with (
        contextlib.suppress(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S) as response,
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
    assert all(event.wait(PATIENCE_S) for event in events)
    return streams


def test_sigterm_lets_streams_finish_and_refuses_new_requests(tiny_llama: Path, tmp_path: Path) -> None:
    patience = ("--engine-heartbeat-timeout", str(PATIENCE_S), "--shutdown-timeout", str(PATIENCE_S))
    with serve(tiny_llama, tmp_path, "--enable-log-requests", *patience) as served, ThreadPoolExecutor(16) as pool:
        (engine,) = served.engine_pids()
        stop(engine)  # The stream is not to end before it has been looked at.
        stream = pool.submit(_stream, served, SHORT)
        wait_until(lambda: "1 prompts" in served.log.read_text())
        served.process.send_signal(signal.SIGTERM)
        refused = served.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        with served.http() as http:
            assert http.get("/health").status_code == 503
        os.kill(engine, signal.SIGCONT)
        assert stream.result().endswith('"finish_reason":"length","stop_reason":null}]}\n\ndata: [DONE]\n\n')
        assert served.process.wait(PATIENCE_S) == 0
        assert not served.engine_pids()


def test_sigterm_with_no_time_ends_streams_with_an_error(long_llama: Path, tmp_path: Path) -> None:
    flags = (*LONG_POOL, "--shutdown-timeout", "0")
    with serve(long_llama, tmp_path, *flags) as served, ThreadPoolExecutor(16) as pool:
        streams = _begin(pool, served, 3, LONG | {"n": 4})
        served.process.send_signal(signal.SIGTERM)
        texts = [stream.result() for stream in streams]
        assert served.process.wait(PATIENCE_S) == 0
    for text in texts:
        assert '"code":503' in text
        assert text.endswith("data: [DONE]\n\n")


def test_killed_engine_ends_all_requests_and_the_server(long_llama: Path, tmp_path: Path) -> None:
    with serve(long_llama, tmp_path, *LONG_POOL) as served, ThreadPoolExecutor(16) as pool:
        streams = _begin(pool, served, 4, LONG)
        whole = pool.submit(served.post, "/v1/completions", LONG | {"stream": False})
        wait_until(lambda: served.metric("pyvllm:num_requests_running") == 5)
        (engine,) = served.engine_pids()
        # /health is asked while the server is stopped, so that it is before the server ends, however soon that is.
        stop(served.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert is_gone(engine)
        with served.send("/health") as asked:
            served.process.send_signal(signal.SIGCONT)
            assert b" 503 " in asked.makefile("rb").readline()
        texts = [stream.result() for stream in streams]
        answer = whole.result()
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert served.process.wait(PATIENCE_S) == 1
    for text in texts:
        assert '"error":' in text
        assert '"finish_reason":"stop"' not in text
        assert text.endswith("data: [DONE]\n\n")


def test_engine_that_hangs_is_as_good_as_dead(long_llama: Path, tmp_path: Path) -> None:
    with serve(long_llama, tmp_path, *LONG_POOL) as served, ThreadPoolExecutor(16) as pool:
        (stream,) = _begin(pool, served, 1, LONG)
        (engine,) = served.engine_pids()
        stop(engine)
        assert '"error":' in stream.result()
        assert served.process.wait(PATIENCE_S) == 1
        assert is_gone(engine)
        silence = re.search(r"gave no sign of life for ([\d.]+) s", served.log.read_text())
        assert silence is not None
        assert float(silence[1]) < 5


def test_port_in_use_is_said_before_a_model_is_loaded(tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "pyvllm", "serve", str(tiny_llama), "--host", "127.0.0.1", "--port", port]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
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


def test_answers_are_not_held_back() -> None:
    """Nagle's algorithm would hold the second packet of an answer until the client's delayed acknowledgement, 40 ms."""

    async def accepted_without_delay() -> bool:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listening(ServerArgs(host="127.0.0.1", port=0)) as listener:
            async with await asyncio.start_server(accepted, sock=listener):
                with socket.create_connection(listener.getsockname()):
                    return bool(await found)

    assert asyncio.run(accepted_without_delay())


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
    result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 2
    assert "pyvllm: error: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def endless(long_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(long_llama, tmp_path_factory.mktemp("endless"), *LONG_POOL) as served:
        yield served


@pytest.mark.parametrize(
    ("stream", "count", "running", "waiting"), [(True, 2, 8, 0), (False, 2, 8, 0), (False, 20, 64, 4)]
)
def test_clients_that_leave_are_aborted(endless: Served, stream: bool, count: int, running: int, waiting: int) -> None:
    before = endless.metric("pyvllm:request_success_total")
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = endless.send("/v1/completions", LONG | {"stream": stream, "n": 4})
            stack.enter_context(connection)
            if stream:
                answer = stack.enter_context(connection.makefile("rb"))
                while not answer.readline().startswith(b"data: "):
                    pass
        names = ("pyvllm:num_requests_running", "pyvllm:num_requests_waiting")
        wait_until(lambda: [endless.metric(name) for name in names] == [running, waiting])
    wait_until(lambda: is_idle(endless))
    wait_until(lambda: endless.metric("pyvllm:request_success_total") == before + count)


def test_storm_of_clients_that_leave_at_once(server: Served) -> None:
    raise_file_limit()
    with contextlib.ExitStack() as stack:
        for _ in range(min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)):
            stack.enter_context(server.send("/v1/completions", SHORT | {"max_tokens": 400}))
    wait_until(lambda: is_idle(server))
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
        slow.settimeout(PATIENCE_S)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        slow.sendall(head % len(content) + content)
        slow.recv(100)
        for _ in range(5):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 4}).status_code == 200
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
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://x", timeout=PATIENCE_S) as http:
                wait_until(lambda: path.exists() and _is_up(http))
                assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        finally:
            process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert not path.exists()


def _is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
