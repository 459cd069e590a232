"""The examples that embed an engine in other programs, as their users run them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pyvllm import LLM, SamplingParams
from tests.small_llm import generate

EXAMPLES = Path(__file__).parents[1] / "examples"
ON_CPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
"""What these tests compare with runs beside the example: two engines that want most of a GPU do not fit on it."""


def test_asyncio_worker(tiny_llama: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "embed_asyncio.py"), str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=ON_CPU)
    lines = done.stdout.splitlines()
    assert len(lines) == 24
    assert lines[0].startswith("The number 0 is ...")
    assert not any("too slow" in line for line in lines)


@pytest.fixture
def service(tiny_llama: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "embed_fastapi.py"), str(tiny_llama), str(port)], env=ON_CPU
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except urllib.error.URLError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    finally:
        process.kill()


def test_fastapi_service(service: str, tiny_llama: Path) -> None:
    def post(text: str) -> str:
        with urllib.request.urlopen(f"{service}/continue", data=text.encode()) as answer:
            body: bytes = answer.read()
        return body.decode()

    prompts = [f"Story {number}" for number in range(16)]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(post, prompts))
    with LLM(str(tiny_llama), device="cpu") as llm:
        alone = generate(llm, prompts, SamplingParams(temperature=0.0, max_tokens=48))
    assert found == [output.outputs[0].text for output in alone]
    with pytest.raises(urllib.error.HTTPError) as refused:
        post("far too long " * 500)
    assert refused.value.code == 400
    assert "max_model_len" in json.loads(refused.value.read())["detail"]
