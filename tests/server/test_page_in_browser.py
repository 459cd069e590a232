"""The page as people use it: in a headless Chromium, against a real server, save for answers no model gives on demand.

Chromium is no Python package: Debian's is `chromium`; PYVLLM_CHROMIUM names another one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="the package playwright drives the browser")

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.conftest import TinyCheckpoint
from tests.server.conftest import Served, is_idle, serve, wait_until

KEY = "browser-key-77"
MARKUP = "<img src=x onerror=alert(1)><b>&amp;</b>"
SNAPSHOT = "**/engine/snapshot"


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

    def snapshots(self) -> int:
        return sum(url.endswith("/engine/snapshot") for url in self.requests)

    def chat(self, text: str) -> None:
        """Send a message and wait for the end of the answer."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        self.wait_for_end()

    def wait_for_end(self) -> None:
        expect(self.page.locator("#announcement")).not_to_be_empty(timeout=30_000)

    def answer(self) -> str:
        return self.page.locator(".message.assistant > div").last.text_content() or ""


def _watch(context: BrowserContext, served: Served) -> Watched:
    watched = Watched(page=context.new_page(), url=served.url)
    page = watched.page
    page.on("console", lambda message: watched.complaints.append(message.text))
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    page.on("request", lambda request: watched.requests.append(request.url))
    page.goto(served.url)
    return watched


@pytest.fixture
def tab(browser: Browser, server: Served, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A tab of a keyless server, which must have asked nobody else and have nothing to complain about."""
    options: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}} | getattr(request, "param", {})
    with browser.new_context(**options) as context:
        watched = _watch(context, server)
        yield watched
        assert watched.complaints == []
        assert watched.requests
        assert all(url.startswith(f"{server.url}/") for url in watched.requests)


@pytest.fixture(scope="module")
def keyed(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key, and a context so long that an answer does not end before it is looked at."""
    model = tiny_checkpoint("llama", {"max_position_embeddings": 8192})
    flags = ("--api-key", KEY, "--num-gpu-blocks-override", "1024")
    with serve(model, tmp_path_factory.mktemp("browser"), *flags) as served:
        served.key = KEY
        yield served


@pytest.fixture
def long_answer(browser: Browser, keyed: Served) -> Iterator[Watched]:
    """A tab in which a completion of thousands of tokens has begun."""
    with browser.new_context() as context:
        watched = _watch(context, keyed)
        page = watched.page
        page.fill("#key-input", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#engine-state")).to_have_text("live")
        # What the page does not offer, so that the answer does not end by itself.
        page.route("**/v1/completions", _with_fields(ignore_eos=True))
        page.click("text=Completion")
        page.click("#settings summary")
        page.fill("[name=max_tokens]", "8000")
        page.fill("#prompt", "b " * 20)
        page.press("#prompt", "Enter")
        page.wait_for_selector("#output .token")
        yield watched
    wait_until(lambda: is_idle(keyed))
    assert all("status of 401" in text for text in watched.complaints)


def _with_fields(**fields: object) -> Callable[[Route], None]:
    return lambda route: route.continue_(post_data=json.dumps((route.request.post_data_json or {}) | fields))


# ---- the playground ----


def test_a_chat_streams_what_the_api_answers(tab: Watched, server: Served) -> None:
    page = tab.page
    page.click("text=System prompt")
    page.fill("#system", "Be brief.")
    page.click("#settings summary")
    page.fill("[name=temperature]", "0")
    page.fill("[name=max_tokens]", "30")
    tab.chat("Hello?")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    for _ in range(2):
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 30}
        answer = server.post("/v1/chat/completions", body).json()
        text = answer["choices"][0]["message"]["content"]
        assert tab.answer() == text
        assert f"{answer['usage']['completion_tokens']} tokens" in page.inner_text("#status")
        assert re.search(r"[\d.]+ tokens/s, first after [\d.]+ s, ended", page.inner_text("#status"))
        # The second message goes with the first and its answer.
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More\nof it"}]
        page.fill("#message", "More")
        page.press("#message", "Shift+Enter")
        page.keyboard.type("of it")
        page.press("#message", "Enter")
        tab.wait_for_end()
    page.click("#new-chat")
    assert page.locator(".message").count() == 0


def test_sampling_parameters_are_sent_and_wrong_ones_are_named(tab: Watched) -> None:
    page = tab.page
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#settings summary")
    values = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 7, "seed": 3}
    for name, value in values.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("[name=stop]", "\\n\\n\n\nEND")
    page.uncheck("[name=logprobs]")
    page.select_option("#model", "tiny-alias")
    tab.chat("a")
    usage = {"include_usage": True, "continuous_usage_stats": True}
    expected = values | {"stop": ["\n\n", "END"], "stream": True, "stream_options": usage, "model": "tiny-alias"}
    assert sent == [expected | {"messages": [{"role": "user", "content": "a"}]}]
    assert page.locator(".token").count() == 0

    page.fill("[name=top_p]", "2")
    page.click("text=Send")  # An empty message is not sent.
    page.fill("#message", "b")
    page.press("#message", "Enter")
    expect(page.locator("#status")).to_contain_text("Top p")
    expect(page.locator("[name=top_p]")).to_be_focused()
    assert len(sent) == 1


def test_the_servers_errors_are_shown_and_what_was_typed_comes_back(tab: Watched) -> None:
    page = tab.page
    too_long = "x y z " * 200
    tab.chat(too_long)
    expect(page.locator("#notice")).to_contain_text("512")
    assert page.input_value("#message") == too_long
    assert page.locator(".message").count() == 0
    tab.chat("Please answer")
    expect(page.locator("#notice")).to_be_hidden()
    # Chromium itself writes a line for each status of 400 and more.
    assert [text for text in tab.complaints if "status of 400" not in text] == []
    tab.complaints.clear()


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stopping_ends_the_request_in_the_engine(long_answer: Watched, keyed: Served, way: str) -> None:
    page = long_answer.page
    assert keyed.metric("pyvllm:num_requests_running") == 1
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.locator("#completion .stop").click()
        expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#status")).to_contain_text("stopped by you")
    expect(page.locator("#completion .stop")).to_be_disabled()
    expect(page.locator("#completion .start")).to_be_enabled()
    assert 0 < page.locator("#output .token").count() < 8000
    wait_until(lambda: keyed.metric("pyvllm:num_requests_running") == 0)


def test_a_completion_follows_its_prompt(tab: Watched, server: Served) -> None:
    page = tab.page
    page.click("text=Completion")
    page.click("#settings summary")
    page.fill("[name=temperature]", "0")
    page.fill("[name=max_tokens]", "20")
    page.fill("#prompt", MARKUP)
    page.press("#prompt", "Enter")
    tab.wait_for_end()
    body = {"model": "tiny", "prompt": MARKUP, "temperature": 0, "max_tokens": 20}
    assert page.text_content("#output") == MARKUP + server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert page.locator("#output img, #output b").count() == 0


def _answer(page: Page, *chunks: dict[str, Any]) -> None:
    """Have the next chats answered with these choices."""

    end = {"delta": {}, "finish_reason": "stop", "stop_reason": None}

    def fulfil(route: Route) -> None:
        events = [json.dumps({"choices": [{"index": 0} | chunk]}) for chunk in (*chunks, end)]
        route.fulfill(
            body="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]), content_type="text/event-stream"
        )

    page.route("**/v1/chat/completions", fulfil)


def _token(text: str, logprob: float, **others: float) -> dict[str, Any]:
    data = text.encode("latin-1")
    top = [{"token": token, "logprob": value, "bytes": list(token.encode())} for token, value in others.items()]
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data), "top_logprobs": top}


def test_what_a_model_writes_is_text_and_nothing_else(tab: Watched) -> None:
    _answer(tab.page, {"delta": {"content": MARKUP}}, {"delta": {"content": "<script>alert(2)</script>"}})
    tab.chat(MARKUP)
    assert tab.answer() == MARKUP + "<script>alert(2)</script>"
    assert tab.page.locator("#transcript :is(img, b, script)").count() == 0


def test_tokens_tell_their_probability_by_pointer_and_by_keyboard(tab: Watched) -> None:
    tokens = [
        _token("Hi", -0.1, Hi=-0.1, Yo=-2.5),
        _token("\xf0\x9f", -1.0),  # "🙂" is two tokens
        _token("\x99\x82", -2.0),
        _token("<s>", -3.0),  # special: not in the text
        _token(" you", -0.7),
    ]
    page = tab.page
    _answer(
        page,
        {"delta": {"content": "Hi"}, "logprobs": {"content": tokens[:2]}},
        {"delta": {"content": "🙂"}, "logprobs": {"content": tokens[2:4]}},
        {"delta": {"content": " you"}, "logprobs": {"content": tokens[4:]}},
        {"delta": {"content": "!"}},
    )
    tab.chat("Hello")
    assert tab.answer() == "Hi🙂 you!"
    assert page.locator(".token").all_text_contents() == ["Hi", "🙂", " you"]
    tip = page.locator("#token-tip")
    page.locator(".token").nth(0).hover()
    assert tip.locator("tr").all_inner_texts() == ['"Hi"\t90.5 %\t-0.100', '"Yo"\t8.2 %\t-2.500']
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    page.locator(".token").nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    assert tip.locator("tr").count() == 2, "both tokens of the character"
    assert page.locator(".token").nth(1).get_attribute("aria-describedby") == "token-tip"
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("49.7 %")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


# ---- the live view ----


def _number(page: Page, name: str) -> str:
    return page.locator(f"#numbers div:has(dt:text-is('{name}')) dd").inner_text()


def _pixels(page: Page) -> str:
    found: str = page.evaluate("document.getElementById('block-map').toDataURL()")
    return found


def test_the_block_map_changes_with_what_runs(long_answer: Watched) -> None:
    page = long_answer.page
    expect(page.locator("#requests tr")).to_have_count(1)
    assert page.locator("#requests td").nth(1).inner_text() == "running"
    expect(page.locator("#legend li").first).not_to_contain_text("0 held")
    assert _number(page, "Running") == "1"
    before = _pixels(page)
    page.wait_for_timeout(1500)
    during = _pixels(page)
    assert during != before, "the answer has grown"
    page.keyboard.press("Escape")
    expect(page.locator("#requests tr")).to_have_count(0)
    expect(page.locator("#more-requests")).to_have_text("None now.")
    assert _pixels(page) != during
    assert (_number(page, "Running"), _number(page, "KV in use")) == ("0", "0.0 %")


def test_nobody_looking_asks_for_nothing(tab: Watched) -> None:
    page = tab.page
    expect(page.locator("#engine-state")).to_have_text("live")
    page.wait_for_timeout(1600)
    assert 2 <= tab.snapshots() <= 6, "about twice a second"
    page.click("#pause")
    expect(page.locator("#engine-state")).to_have_text("paused")
    before = tab.snapshots()
    page.wait_for_timeout(1200)
    assert tab.snapshots() == before
    page.click("#pause")
    expect(page.locator("#engine-state")).to_have_text("live")


@pytest.mark.parametrize("tab", [{"viewport": {"width": 320, "height": 400}}], indirect=True)
def test_a_view_that_is_scrolled_away_asks_for_nothing(tab: Watched) -> None:
    page = tab.page
    expect(page.locator("#model option")).to_have_count(2)
    page.wait_for_timeout(700)
    assert tab.snapshots() == 0
    page.click("nav >> text=Engine")
    expect(page.locator("#engine-state")).to_have_text("live")
    assert tab.snapshots() > 0


def _snapshot(num_blocks: int, time: float) -> dict[str, Any]:
    """A pool of blocks that go, in turn, to two requests, to both of them, to the cache, and to nobody."""
    names = ("num_running", "num_waiting", "num_swapped", "num_swap_outs", "num_cpu_blocks", "num_free_cpu_blocks")
    stats = dict.fromkeys(names, 0) | {
        "num_gpu_blocks": num_blocks,
        "num_free_gpu_blocks": num_blocks * 2 // 5,
        "num_recomputations": 1234,
        "prefix_queries": 80,
        "prefix_hits": 20,
        "prompt_tokens": 0,
        "generation_tokens": round(1000 * time),
    }
    counts = {"num_prompt_tokens": 5, "num_output_tokens": 6}
    requests = [{"request_id": name, "state": "running", "num_sequences": 1, **counts} for name in ("one", "two")]
    turns = num_blocks // 5
    columns = {"ref_counts": [1, 1, 2, 0, 0], "owners": [0, 1, 0, -1, -1], "cached": [0, 1, 1, 1, 0]}
    runs = {"lengths": [1] * 5 * turns, **{name: column * turns for name, column in columns.items()}}
    return {"time": time, "stats": stats, "requests": requests, "blocks": runs}


@pytest.mark.parametrize("num_blocks", [100, 15_000, 400_000])
def test_the_map_shows_pools_of_any_size(tab: Watched, num_blocks: int) -> None:
    page = tab.page
    times = iter(range(1, 1000))
    page.route(SNAPSHOT, lambda route: route.fulfill(json=_snapshot(num_blocks, next(times))))
    expect(page.locator("#legend")).to_contain_text(f"{num_blocks // 5:,} shared", timeout=15_000)
    expect(page.locator("#requests")).to_contain_text(f"{num_blocks * 2 // 5:,}")
    expect(page.locator("#numbers")).to_contain_text("1,000")  # tokens a second
    assert _number(page, "Preemptions") == "1,234"
    assert _number(page, "Cache hits") == "25.0 %"
    label = page.locator("#block-map").get_attribute("aria-label") or ""
    assert f"{num_blocks * 3 // 5} in use" in label
    box = page.locator("#block-map").bounding_box()
    assert box is not None
    assert box["height"] <= 420
    page.focus("#block-map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#block-tip")).to_contain_text("held 2 times, by one among others, in the prefix cache")


# ---- keys, keyboard, small screens, colors ----


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser, keyed: Served) -> None:
    with browser.new_context() as context:
        tab = _watch(context, keyed)
        page = tab.page
        expect(page.locator("#key-dialog")).to_be_visible()
        expect(page.locator("#key-input")).to_be_focused()
        expect(page.locator("#engine-state")).to_have_text("needs a key")
        assert page.locator("#numbers dd").count() == 0, "nothing is shown without a key"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("did not accept")
        page.fill("#key-input", "schlüssel")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("ASCII")
        page.fill("#key-input", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#engine-state")).to_have_text("live")
        expect(page.locator("#key-dialog")).to_be_hidden()
        tab.chat("Hello")
        assert tab.answer() or "ended" in page.inner_text("#status")
        page.reload()
        expect(page.locator("#engine-state")).to_have_text("live")
        assert not any(KEY in url for url in tab.requests)
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        # Another tab does not know it.
        other = _watch(context, keyed).page
        expect(other.locator("#key-dialog")).to_be_visible()
        assert all("status of 401" in text for text in tab.complaints)


def test_the_keyboard_reaches_everything_in_order_and_everything_has_a_name(tab: Watched) -> None:
    page = tab.page
    expect(page.locator("#engine-state")).to_have_text("live")
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                """() => {
                    const e = document.activeElement;
                    return e.id || e.name || e.className || (e.tagName === "SUMMARY" && e.textContent) || e.tagName;
                }"""
            )
        )
        if seen[-1] == "table":
            break
    order = ["model", "key-button", "mode", "Sampling", "System prompt", "transcript", "message", "start", "new-chat"]
    assert seen == [*order, "pause", "block-map", "table"]
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, textarea, select, button, canvas, [role], section")]
            .filter((e) => !e.labels?.length && !e.ariaLabel && !e.getAttribute("aria-labelledby")
                && !e.textContent.trim() && !["status", "alert", "tooltip"].includes(e.role))
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize("tab", [{"viewport": {"width": 320, "height": 640}, "has_touch": True}], indirect=True)
def test_a_small_screen_shows_all_without_scrolling_sideways(tab: Watched) -> None:
    page = tab.page
    width = "document.documentElement.scrollWidth"
    page.click("#settings summary")
    tab.chat("Hello" * 30)
    assert page.evaluate(width) <= 320
    page.locator(".token").first.tap()
    expect(page.locator("#token-tip")).to_be_visible()
    box = page.locator("#token-tip").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
    page.click("text=Completion")
    assert page.evaluate(width) <= 320
    page.click("nav >> text=Engine")
    expect(page.locator("#engine-state")).to_have_text("live")
    assert page.evaluate(width) <= 320
    page.click("#key-button")
    expect(page.locator("#key-dialog")).to_be_in_viewport(ratio=1)


CONTRASTS = """() => {
    const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
        .getContext("2d", {willReadFrequently: true});
    // Any notation of a color over a ground -> sRGB.
    const over = (ground, color) => {
        context.fillStyle = `rgb(${ground})`;
        context.fillRect(0, 0, 1, 1);
        context.fillStyle = color;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    };
    const ground = (e) => over(e.parentElement ? ground(e.parentElement) : [255, 255, 255],
        getComputedStyle(e).backgroundColor);
    const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    return [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && !e.matches(":disabled, option")
        && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => {
        const behind = ground(e);
        const [a, b] = [light(behind), light(over(behind, getComputedStyle(e).color))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 120)];
    });
}"""


@pytest.mark.parametrize("tab", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True)
def test_text_has_contrast_in_light_and_dark(tab: Watched) -> None:
    page = tab.page
    page.click("#settings summary")
    expect(page.locator("#engine-state")).to_have_text("live")
    shown = [_token(f" t{i}", -0.01 - i * 0.6) for i in range(8)]
    _answer(page, *({"delta": {"content": one["token"]}, "logprobs": {"content": [one]}} for one in shown))
    tab.chat("Hello")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 40
    assert {"p0", "p4"} <= {name for _, html in found for name in re.findall(r"\bp\d", html)}
    assert [entry for entry in found if entry[0] < 4.5] == []
