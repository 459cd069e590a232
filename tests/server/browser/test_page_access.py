"""Who can use the page: with a key, with a keyboard, on a small screen, in light and dark."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, expect

from tests.server.browser.conftest import KEY, Watched, answer_with, open_tab, token
from tests.server.conftest import Served


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser, keyed: Served) -> None:
    with browser.new_context() as context:
        tab = open_tab(context, keyed)
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
        page.click("#settings summary")
        page.fill("[name=max_tokens]", "30")
        tab.chat("Hello")
        assert tab.answer() or "ended" in page.inner_text("#status")
        page.reload()
        expect(page.locator("#engine-state")).to_have_text("live")
        assert not any(KEY in url for url in tab.requests)
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        # Another tab does not know it.
        other = open_tab(context, keyed).page
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
    shown = [token(f" t{i}", -0.01 - i * 0.6) for i in range(8)]
    answer_with(page, *({"delta": {"content": one["token"]}, "logprobs": {"content": [one]}} for one in shown))
    tab.chat("Hello")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 40
    assert {"p0", "p4"} <= {name for _, html in found for name in re.findall(r"\bp\d", html)}
    assert [entry for entry in found if entry[0] < 4.5] == []
