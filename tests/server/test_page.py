"""The page at `/`: its files, what the server sends with them, and the data of its live view."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvllm.async_llm import EngineSnapshot
from pyvllm.server.live_view import block_runs
from pyvllm.server.static_files import FOLDER, read_files
from tests.async_requests import PATIENCE_S
from tests.server.conftest import LONG_POOL, Served, serve

KEY = "page-key-31"
FILES = read_files(FOLDER)
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def keyed(long_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--api-key", KEY, "--root-path", "/llm", *LONG_POOL)
    with serve(long_llama, tmp_path_factory.mktemp("page"), *flags) as served:
        served.key = KEY
        yield served


def test_files_load_without_a_key_with_headers_that_keep_them_to_themselves(keyed: Served) -> None:
    assert {"/", "/web/main.js", "/web/style.css", "/web/icon.svg"} <= set(FILES)
    with httpx.Client(base_url=keyed.url, timeout=PATIENCE_S) as stranger:
        for path, file in FILES.items():
            response = stranger.get(path)
            assert (response.status_code, response.content) == (200, file.content)
            media_type = TYPES.get(path.rpartition(".")[2], "text/html")
            assert response.headers["content-type"].split(";")[0] == media_type
            policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
            assert policy.pop("require-trusted-types-for") == "'script'"
            assert policy["default-src"] == "'none'"
            assert set(policy.values()) == {"'none'", "'self'"}, "only this origin, and no inline code"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert stranger.head(path).status_code == 200
            assert stranger.post(path).status_code == 401


@pytest.mark.parametrize("path", ["/web/", "/web", "/web/nothing.js", "/web/../auth.py", "/web/%2e%2e/auth.py"])
def test_nothing_else_loads_beside_the_files(keyed: Served, path: str) -> None:
    with httpx.Client(base_url=keyed.url, timeout=PATIENCE_S) as stranger:
        assert stranger.get(path).status_code == 401
    with keyed.http() as http:
        assert http.get(path).status_code == 404


def test_files_name_no_other_origin_and_one_another_correctly() -> None:
    texts = {path: file.content.decode() for path, file in FILES.items()}
    for path, text in texts.items():
        assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", text.replace("http://www.w3.org/2000/svg", "")), (
            path
        )
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/web/{name}" in FILES
    index = texts["/"]
    named = re.findall(r'(?:href|src)="(web/[^"]+)"', index)
    assert named
    assert all(f"/{name}" in FILES for name in named)
    # The policy would not let these run.
    assert not re.search(r"<style|style=|<script(?![^>]*src=)|\son[a-z]+=|javascript:", index)
    scripts = "".join(text for path, text in texts.items() if path.endswith(".js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", scripts)


def test_the_page_can_be_turned_off(tiny_llama: Path, tmp_path: Path) -> None:
    with serve(tiny_llama, tmp_path, "--disable-page") as served, served.http() as http:
        assert [http.get(path).status_code for path in ("/", "/web/main.js", "/health")] == [404, 404, 200]


def test_the_live_view_needs_the_key_and_is_not_kept(keyed: Served) -> None:
    with httpx.Client(base_url=keyed.url, timeout=PATIENCE_S) as stranger:
        refused = stranger.get("/engine/snapshot")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert "blocks" not in refused.text
        assert stranger.get("/engine/snapshot", params={"key": KEY, "api_key": KEY}).status_code == 401
    with keyed.http() as http:
        response = http.get("/engine/snapshot")
    assert (response.status_code, response.headers["cache-control"]) == (200, "no-store")
    found = response.json()
    assert found["stats"]["num_gpu_blocks"] == sum(found["blocks"]["lengths"]) == 16_384
    # Keys and values, of 2 layers with 2 heads of 16 values, in float32.
    assert (found["block_size"], found["block_bytes"]) == (8, 8 * 2 * 2 * 2 * 16 * 4)


def test_the_live_view_shows_who_holds_which_block(keyed: Served) -> None:
    body: dict[str, Any] = {"prompt": "a b " * 40, "max_tokens": 30_000, "ignore_eos": True, "n": 2, "stream": True}
    body["request_id"] = "mine"
    begun, enough = threading.Event(), threading.Event()

    def read() -> None:
        client = httpx.Client(base_url=keyed.url, headers=keyed.headers, timeout=PATIENCE_S)
        with client, client.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                begun.set()
                if enough.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(PATIENCE_S)
    seen: dict[str, Any] = {"requests": []}
    with keyed.http() as http:
        while not seen["requests"]:  # The one before may be as old as a fifth of a second.
            seen = http.get("/engine/snapshot").json()
    enough.set()
    reader.join()

    (request,) = seen["requests"]
    assert request["request_id"].startswith("mine")
    assert (request["state"], request["num_sequences"]) == ("running", 2)
    blocks = _expanded(seen["blocks"])
    held = [(refs, owner) for refs, owner, _ in blocks if refs]
    assert {owner for _, owner in held} == {0}
    # The prompt's full blocks are held by both sequences.
    assert max(refs for refs, _ in held) == 2
    assert sum(refs == 2 for refs, _ in held) == request["num_prompt_tokens"] // 8
    assert all(owner == -1 for refs, owner, _ in blocks if not refs)


ROW = st.tuples(st.integers(0, 3), st.integers(-1, 2), st.booleans())


@given(st.lists(ROW, max_size=40))
def test_runs_of_blocks_are_as_few_as_can_be_and_lose_nothing(rows: list[tuple[int, int, bool]]) -> None:
    snapshot = EngineSnapshot(
        ref_counts=np.array([refs for refs, _, _ in rows], np.uint32),
        owners=np.array([owner for _, owner, _ in rows], np.int32),
        cached=np.array([cached for _, _, cached in rows], np.bool_),
        requests=[],
    )
    runs = orjson.loads(orjson.dumps(block_runs(snapshot), option=orjson.OPT_SERIALIZE_NUMPY))
    assert _expanded(runs) == [(refs, owner, int(cached)) for refs, owner, cached in rows]
    assert len(runs["lengths"]) == sum(i == 0 or rows[i] != rows[i - 1] for i in range(len(rows)))


def _expanded(runs: dict[str, list[int]]) -> list[tuple[int, int, int]]:
    """Reference count, owner and whether it is cached, of each block."""
    columns = zip(runs["lengths"], runs["ref_counts"], runs["owners"], runs["cached"], strict=True)
    return [(refs, owner, cached) for length, refs, owner, cached in columns for _ in range(length)]
