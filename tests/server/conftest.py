"""A real server on a tiny random model, started once for all tests that do not end it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.async_requests import PATIENCE_S, is_gone

START_S = 120.0
ENGINE_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "256", "--block-size", "8"),
    *("--max-num-seqs", "64"),
)
LONG_POOL = ("--num-gpu-blocks-override", "16384")
"""What a server of `long_llama` needs, whose answers do not end while a test looks at them."""


@dataclass(kw_only=True)
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @cached_property
    def _http(self) -> httpx.Client:
        # One for all: making a client, which reads certificates, takes longer than most requests.
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=PATIENCE_S, verify=False)

    def http(self) -> AbstractContextManager[httpx.Client]:
        return nullcontext(self._http)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=PATIENCE_S)

    def post(self, path: str, body: Any) -> httpx.Response:
        with self.http() as http:
            return http.post(path, json=body)

    def send(self, path: str, body: Any = None) -> socket.socket:
        """A connection on which a request was sent, and nothing read."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n"
        port = int(self.url.rsplit(":", 1)[1])
        connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        return connection

    def engine_pids(self) -> list[int]:
        """Processes that the server has started."""
        found = subprocess.run(["ps", "--ppid", str(self.process.pid), "-o", "pid="], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        with self.http() as http:
            lines = http.get("/metrics").text.splitlines()
        found = [line for line in lines if re.match(rf"{re.escape(name)}(\{{|\s)", line)]
        assert found, f"there is no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@contextmanager
def serve(model: Path, folder: Path, *flags: str, module: str = "pyvllm", **variables: str) -> Iterator[Served]:
    """Start a server and wait until it answers; it is killed in the end, if it has not ended by then.

    A server that is killed must leave no engine behind.
    """
    log = folder / f"server-{time.monotonic_ns()}.log"
    command = ["serve"] if module == "pyvllm" else []
    argv = [sys.executable, "-m", module, *command, "--model", str(model), "--host", "127.0.0.1", "--port", "0"]
    env = os.environ | variables
    with log.open("wb") as file:
        process = subprocess.Popen([*argv, *ENGINE_FLAGS, *flags], stderr=file, stdout=file, env=env)
    engines: list[int] = []
    try:
        served = Served(process=process, url=_wait_for_url(process, log), log=log)
        yield served
        if process.poll() is None:
            engines = served.engine_pids()
            assert engines
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
    assert all(is_gone(pid) for pid in engines)


def stop(pid: int) -> None:
    """Have a process do nothing more until it gets SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r" on (https?)://127\.0\.0\.1:(\d+)", log.read_text())
        if found:
            url = f"{found[1]}://127.0.0.1:{found[2]}"
            try:
                if httpx.get(f"{url}/health", verify=False, timeout=PATIENCE_S).status_code == 200:
                    return url
            except httpx.TransportError:
                pass
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"the server did not start in {START_S} s: {log.read_text()}")


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.02)


def is_idle(served: Served) -> bool:
    """Whether nothing of any request is left."""
    with served.http() as http:
        text = http.get("/metrics").text
    names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc")
    return all(re.search(rf"^pyvllm:{name}{{[^}}]*}} 0.0$", text, re.MULTILINE) for name in names)


PROCESSORS = (
    *(
        "--logits-processors",
        "say=tests.some_processors:saying",
        "--logits-processors",
        "even=tests.some_processors:even",
    ),
    *("--logits-processors", json.dumps({name: f"tests.some_processors:{name}" for name in ("settled", "failing")})),
)
SAY: dict[str, Any] = {"logits_processors": ["say"], "temperature": 0}
"""Have the model say its prompt again, or the last message of a chat, and then end."""
OTHER_END = 5
"""Id that ends texts of `other_server` too."""


@pytest.fixture(scope="session")
def session_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    names = ("--served-model-name", "tiny", "tiny-alias")
    with serve(tiny_llama, folder, *names, *PROCESSORS, "--enable-request-id-headers") as served:
        yield served


@pytest.fixture(scope="session")
def other_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same model with defaults and ends of its own, no BOS token, and processed log-probabilities without limit."""
    folder = tmp_path_factory.mktemp("other")
    model = shutil.copytree(tiny_llama, folder / "model")
    defaults = {"temperature": 0.0001, "top_k": 1, "eos_token_id": [257, OTHER_END]}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["bos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    modes = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")
    with serve(model, folder, *modes) as served:
        yield served


@pytest.fixture
def server(session_server: Served) -> Iterator[Served]:
    """An idle server, which must be idle afterwards."""
    assert session_server.process.poll() is None, session_server.log.read_text()
    yield session_server
    wait_until(lambda: is_idle(session_server))


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found
