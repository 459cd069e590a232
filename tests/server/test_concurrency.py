"""Many clients at once: each gets what it would get alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.answers import chunks_of
from tests.server.conftest import Served

CLIENTS = 256


def _body(i: int) -> dict[str, Any]:
    words = "the inner song on a hot stone in the rain"
    text = f"{words[i % len(words) :]} {i % 32}"
    return {"prompt": text, "max_tokens": 4 + i % 29, "temperature": 0, "ignore_eos": True, "n": 1 + i % 2}


def _whole_texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def _streamed_texts(content: str, n: int) -> list[str]:
    texts = [""] * n
    for chunk in chunks_of(content):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def test_answers_equal_those_of_requests_alone(server: Served) -> None:
    # Of equal bodies one is enough.
    alone = {str(_body(i)): _whole_texts(server.post("/v1/completions", _body(i)).json()) for i in range(CLIENTS)}

    async def ask(http: httpx.AsyncClient, i: int) -> list[str]:
        body = _body(i)
        response = await http.post("/v1/completions", json=body | {"stream": i % 3 > 0})
        assert response.status_code == 200, response.text
        return _streamed_texts(response.text, body["n"]) if i % 3 else _whole_texts(response.json())

    async def ask_all() -> list[list[str]]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, verify=False) as http:
            return await asyncio.gather(*(ask(http, i) for i in range(CLIENTS)))

    together = asyncio.run(ask_all())
    assert [i for i in range(CLIENTS) if together[i] != alone[str(_body(i))]] == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks the system what a process has loaded")
def test_the_servers_own_process_has_no_torch(server: Served) -> None:
    """It starts sooner and takes a fifth of the memory; only the engine's process computes."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True, "n": 2}
    assert server.post("/v1/chat/completions", chat).status_code == 200
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, *server.engine_pids())}
    assert ["libtorch" in text for text in maps.values()] == [False, True]
