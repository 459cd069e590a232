"""A request with a seed has the same text however it is asked for, and whatever else runs."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.async_requests import PATIENCE_S
from tests.server.answers import CHAT, COMPLETIONS, Answer, body_of, both, chunks_of, joined
from tests.server.conftest import Served

OTHERS = 16
FIELDS: dict[str, Any] = {"seed": 7, "temperature": 1, "top_p": 0.95, "max_tokens": 32, "n": 2, "ignore_eos": True}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_texts_are_the_same_streamed_and_among_others(server: Served, path: str) -> None:
    body = body_of(path, "the rain in", **FIELDS)
    alone, streamed = both(server, path, body)
    assert alone.texts == streamed.texts
    assert alone.texts[0] != alone.texts[1]

    async def ask(http: httpx.AsyncClient, one: dict[str, Any]) -> Answer:
        response = await http.post(path, json=one)
        assert response.status_code == 200, response.text
        return joined(chunks_of(response.text) if one.get("stream") else [response.json()])

    async def among_others() -> list[Answer]:
        others = [
            body_of(path, "the " * i, max_tokens=10 + 2 * i, stream=i % 2 > 0, seed=7 if i % 3 else None)
            for i in range(1, OTHERS + 1)
        ]
        half = OTHERS // 2
        bodies = [*others[:half], body, body | {"stream": True}, *others[half:]]
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, verify=False) as http:
            answers = await asyncio.gather(*(ask(http, one) for one in bodies))
        return answers[half : half + 2]

    for answer in asyncio.run(among_others()):
        assert answer.texts == alone.texts
