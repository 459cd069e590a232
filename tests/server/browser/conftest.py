"""A headless Chromium for the page, and servers for it.

Chromium is no Python package: Debian's is `chromium`; PYVLLM_CHROMIUM names another one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, Route, expect, sync_playwright

from tests.async_requests import PATIENCE_S
from tests.server.conftest import LONG_POOL, Served, is_idle, serve, wait_until

KEY = "browser-key-77"
expect.set_options(timeout=1000 * PATIENCE_S)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = (os.environ.get("PYVLLM_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium; or name one in PYVLLM_CHROMIUM)")
    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that root in a container has not.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield browser
        browser.close()


@dataclass(kw_only=True)
class Watched:
    """A tab, and all it complained about or asked for."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    posted: list[Any] = field(default_factory=list)

    def snapshots(self) -> int:
        return sum(url.endswith("/engine/snapshot") for url in self.requests)

    def chat(self, text: str) -> None:
        """Send a message and wait for the end of the answer."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        self.wait_for_end()

    def wait_for_end(self) -> None:
        expect(self.page.locator("#announcement")).not_to_be_empty()

    def answer(self) -> str:
        return self.page.locator(".message.assistant > div").last.text_content() or ""


def open_tab(context: BrowserContext, served: Served) -> Watched:
    watched = Watched(page=context.new_page(), url=served.url)
    page = watched.page
    page.set_default_timeout(1000 * PATIENCE_S)
    page.on("console", lambda message: watched.complaints.append(message.text))
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))

    def note(request: Request) -> None:
        watched.requests.append(request.url)
        if request.method == "POST":
            watched.posted.append(request.post_data_json)

    page.on("request", note)
    page.goto(served.url)
    return watched


@pytest.fixture
def tab(browser: Browser, server: Served, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A tab of a keyless server, which must have asked nobody else and have nothing to complain about."""
    options: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}} | getattr(request, "param", {})
    with browser.new_context(**options) as context:
        watched = open_tab(context, server)
        yield watched
        assert watched.complaints == []
        assert watched.requests
        assert all(url.startswith(f"{server.url}/") for url in watched.requests)


@pytest.fixture(scope="session")
def keyed(long_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key, and a context so long that an answer does not end before it is looked at."""
    with serve(long_llama, tmp_path_factory.mktemp("browser"), "--api-key", KEY, *LONG_POOL) as served:
        served.key = KEY
        yield served


@pytest.fixture
def long_answer(browser: Browser, keyed: Served) -> Iterator[Watched]:
    """A tab in which a completion of thousands of tokens has begun."""
    with browser.new_context() as context:
        watched = open_tab(context, keyed)
        page = watched.page
        page.fill("#key-input", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#engine-state")).to_have_text("live")
        # What the page does not offer, so that the answer does not end by itself.
        page.route("**/v1/completions", with_fields(ignore_eos=True))
        page.click("text=Completion")
        page.click("#settings summary")
        page.fill("[name=max_tokens]", "60000")
        page.fill("#prompt", "b " * 20)
        page.press("#prompt", "Enter")
        page.wait_for_selector("#output .token")
        yield watched
    wait_until(lambda: is_idle(keyed))
    assert all("status of 401" in text for text in watched.complaints)


def with_fields(**fields: object) -> Callable[[Route], None]:
    return lambda route: route.continue_(post_data=json.dumps((route.request.post_data_json or {}) | fields))


def answer_with(page: Page, *chunks: dict[str, Any]) -> None:
    """Have the next chats answered with these choices."""

    end: dict[str, Any] = {"delta": {}, "finish_reason": "stop", "stop_reason": None}

    def fulfil(route: Route) -> None:
        events = [json.dumps({"choices": [{"index": 0} | chunk]}) for chunk in (*chunks, end)]
        route.fulfill(
            body="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]), content_type="text/event-stream"
        )

    page.route("**/v1/chat/completions", fulfil)


def token(text: str, logprob: float, **others: float) -> dict[str, Any]:
    data = text.encode("latin-1")
    top = [{"token": token, "logprob": value, "bytes": list(token.encode())} for token, value in others.items()]
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data), "top_logprobs": top}
