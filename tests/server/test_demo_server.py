"""`python -m pyvllm.entrypoints.api_server`, which early programs call."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Served, serve, wait_until

MODULE = "pyvllm.entrypoints.api_server"
BODY: dict[str, Any] = {"prompt": "Hello", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module", params=["newline", "nul"])
def demo(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("demo")
    with serve(tiny_llama, folder, "--stream-delimiter", request.param, module=MODULE) as served:
        yield served


def _stream(demo: Served, body: dict[str, Any]) -> list[list[str]]:
    content = demo.post("/generate", body | {"stream": True}).content
    delimiter = b"\n" if "newline" in str(demo.process.args) else b"\0"
    objects = content.split(delimiter)
    assert objects.pop() == b""
    return [json.loads(one)["text"] for one in objects]


def test_text_has_the_prompt_before_it(demo: Served) -> None:
    # As `curl -d` sends it: with no content type of JSON.
    response = httpx.post(f"{demo.url}/generate", content=json.dumps(BODY), headers={"content-type": "x/y"})
    (text,) = response.json()["text"]
    assert text.startswith("Hello")
    assert len(text) > len("Hello")


def test_stream_grows_to_the_same_text(demo: Served) -> None:
    body = BODY | {"n": 2, "temperature": 1, "seed": 3}
    steps = _stream(demo, body)
    assert len(steps) > 1
    assert all(after[i].startswith(before[i]) for before, after in itertools.pairwise(steps) for i in (0, 1))
    assert steps[-1] == demo.post("/generate", body).json()["text"]


def test_beams_and_best_of(demo: Served) -> None:
    beams = BODY | {"use_beam_search": True, "n": 3, "best_of": 3}
    texts = demo.post("/generate", beams).json()["text"]
    assert len(set(texts)) == 3
    assert _stream(demo, beams)[-1] == texts
    assert len(demo.post("/generate", BODY | {"temperature": 1, "n": 2, "best_of": 4}).json()["text"]) == 2
    wrong = demo.post("/generate", BODY | {"use_beam_search": True, "n": 1, "best_of": 1})
    assert wrong.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("temperature", BODY | {"temperature": -1}),
        ("prompt", {"max_tokens": 4}),
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": "x" * 600}),
        ("max_token", BODY | {"max_token": 4}),
    ],
)
def test_wrong_parameters_are_named(demo: Served, field: str, body: dict[str, Any]) -> None:
    response = demo.post("/generate", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_clients_that_leave_are_aborted(demo: Served) -> None:
    body = BODY | {"max_tokens": 480, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{demo.url}/generate", json=body) as response:
        next(response.iter_bytes())
    wait_until(lambda: " 499 in " in demo.log.read_text())
    assert demo.post("/generate", BODY).status_code == 200
    assert httpx.get(f"{demo.url}/health").status_code == 200
