"""The live view of the engine, in a browser."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.server.browser.conftest import Watched
from tests.server.conftest import wait_until

SNAPSHOT = "**/engine/snapshot"
ASKED_AT = """
() => performance.getEntriesByType("resource").filter((e) => e.name.endsWith("/snapshot")).map((e) => e.startTime)
"""
"""Milliseconds at which the page has asked for what it then got, by its own clock."""


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
    page.wait_for_function("before => document.getElementById('block-map').toDataURL() !== before", arg=before)
    during = _pixels(page)
    page.keyboard.press("Escape")
    expect(page.locator("#requests tr")).to_have_count(0)
    expect(page.locator("#more-requests")).to_have_text("None now.")
    assert _pixels(page) != during
    assert (_number(page, "Running"), _number(page, "KV in use")) == ("0", "0.0 %")


def test_nobody_looking_asks_for_nothing(tab: Watched) -> None:
    page = tab.page
    expect(page.locator("#engine-state")).to_have_text("live")
    wait_until(lambda: len(page.evaluate(ASKED_AT)) > 4)
    asked_at = page.evaluate(ASKED_AT)[-3:]
    assert all(after - before > 400 for before, after in itertools.pairwise(asked_at)), "about twice a second"
    page.click("#pause")
    expect(page.locator("#engine-state")).to_have_text("paused")
    page.wait_for_timeout(500)
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
    assert len(page.evaluate(ASKED_AT)) > 0


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
    pool = {"block_size": 16, "block_bytes": 3 << 19}
    return {"time": time, "stats": stats, "requests": requests, "blocks": runs} | pool


@pytest.mark.parametrize("num_blocks", [100, 15_000, 400_000])
def test_the_map_shows_pools_of_any_size(tab: Watched, num_blocks: int) -> None:
    page = tab.page
    times = iter(range(1, 1000))
    page.route(SNAPSHOT, lambda route: route.fulfill(json=_snapshot(num_blocks, next(times))))
    expect(page.locator("#legend")).to_contain_text(f"{num_blocks // 5:,} shared")
    expect(page.locator("#requests")).to_contain_text(f"{num_blocks * 2 // 5:,}")
    expect(page.locator("#numbers")).to_contain_text("1,000")  # tokens a second
    assert _number(page, "Preemptions") == "1,234"
    assert _number(page, "Cache hits") == "25.0 %"
    in_use = {100: "90.0 MiB of 150.0 MiB", 15_000: "13.2 GiB of 22.0 GiB", 400_000: "351.6 GiB of 585.9 GiB"}
    assert page.locator("#pool").inner_text() == f"{in_use[num_blocks]} in use; a block holds 16 tokens"
    label = page.locator("#block-map").get_attribute("aria-label") or ""
    assert f"{num_blocks * 3 // 5} in use" in label
    box = page.locator("#block-map").bounding_box()
    assert box is not None
    assert box["height"] <= 420
    page.focus("#block-map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#block-tip")).to_contain_text("held 2 times, by one among others, in the prefix cache")
