"""The examples that embed an engine in other programs, as their users run them."""

import json
import os
import re
import signal
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
from tests.async_requests import PATIENCE_S
from tests.small_llm import generate

EXAMPLES = Path(__file__).parents[1] / "examples"
ON_CPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
"""What these tests compare with runs beside the example: two engines that want most of a GPU do not fit on it."""


def test_asyncio_worker(tiny_llama: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "embed_asyncio.py"), str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=ON_CPU)
    lines = done.stdout.splitlines()
    assert len(lines) == 24
    assert lines[0].startswith("The number 0 is ...")
    assert not any("too slow" in line for line in lines)


@pytest.fixture
def service(tiny_llama: Path, tmp_path: Path) -> Iterator[str]:
    log = tmp_path / "log"
    command = [sys.executable, str(EXAMPLES / "embed_fastapi.py"), str(tiny_llama), "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=ON_CPU, stderr=file)
    try:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while (found := re.search(r"running on (http://[\d.:]+)", log.read_text())) is None:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        urllib.request.urlopen(f"{found[1]}/health").close()
        yield found[1]
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
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
