"""`python -m pyvllm.entrypoints.api_server`, which early programs call."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyvllm import LLM
from tests.async_requests import PATIENCE_S
from tests.server.conftest import LONG_POOL, PROCESSORS, Served, serve, wait_until
from tests.server.fields import PROMPT, ROWS, Row

MODULE = "pyvllm.entrypoints.api_server"
BODY: dict[str, Any] = {"prompt": "Hello", "temperature": 0, "max_tokens": 8}
DEMO_ROWS = [row for row in ROWS if row.demo]


@pytest.fixture(scope="module", params=["newline", "nul"])
def demo(
    long_llama: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("demo")
    flags = ("--stream-delimiter", request.param, *LONG_POOL, *PROCESSORS)
    with serve(long_llama, folder, *flags, module=MODULE) as served:
        yield served


def _stream(demo: Served, body: dict[str, Any]) -> list[list[str]]:
    content = demo.post("/generate", body | {"stream": True}).content
    delimiter = b"\n" if "newline" in str(demo.process.args) else b"\0"
    objects = content.split(delimiter)
    assert objects.pop() == b""
    return [json.loads(one)["text"] for one in objects]


def test_text_has_the_prompt_before_it(demo: Served) -> None:
    # As `curl -d` sends it: with no content type of JSON.
    with demo.http() as http:
        response = http.post("/generate", content=json.dumps(BODY), headers={"content-type": "x/y"})
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
    beams = BODY | {"use_beam_search": True, "n": 3, "best_of": 4, "logits_processors": ["settled"]}
    texts = demo.post("/generate", beams).json()["text"]
    assert len(set(texts)) == 3
    steps = _stream(demo, beams)
    assert len(steps) > 5
    assert all(after[i].startswith(before[i]) for before, after in itertools.pairwise(steps) for i in range(3))
    assert steps[-1] == texts
    assert len(demo.post("/generate", BODY | {"temperature": 1, "n": 2, "best_of": 4}).json()["text"]) == 2
    wrong = demo.post("/generate", BODY | {"use_beam_search": True, "n": 1, "best_of": 1})
    assert wrong.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("temperature", BODY | {"temperature": -1}),
        ("prompt", {"max_tokens": 4}),
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": "x" * 70_000}),
        ("max_token", BODY | {"max_token": 4}),
        *((row.name, {"prompt": PROMPT, row.name: value}) for row in DEMO_ROWS for value, _ in row.wrong[:1]),
    ],
)
def test_wrong_parameters_are_named(demo: Served, field: str, body: dict[str, Any]) -> None:
    response = demo.post("/generate", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("row", DEMO_ROWS, ids=lambda row: f"{row.name}-{row.good}"[:40])
def test_a_field_does_what_it_does_offline(demo: Served, llm: LLM, row: Row) -> None:
    body = {"prompt": PROMPT} | row.without | {row.name: row.good}
    (output,) = llm.generate(PROMPT, row.params, use_tqdm=False)
    expected = [PROMPT + one.text for one in output.outputs]
    assert demo.post("/generate", body).json()["text"] == expected
    assert _stream(demo, body)[-1] == expected


def test_clients_that_leave_are_aborted(demo: Served) -> None:
    body = BODY | {"max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{demo.url}/generate", json=body, timeout=PATIENCE_S) as response:
        next(response.iter_bytes())
    wait_until(lambda: " 499 in " in demo.log.read_text())
    assert demo.post("/generate", BODY).status_code == 200
    with demo.http() as http:
        assert http.get("/health").status_code == 200
