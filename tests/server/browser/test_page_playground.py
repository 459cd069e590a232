"""The playground, as people use it: against a real server, save for answers that no model gives on demand."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.server.browser.conftest import Watched, answer_with, token, with_fields
from tests.server.conftest import Served, wait_until

MARKUP = "<img src=x onerror=alert(1)><b>&amp;</b>"


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


def test_an_answer_may_be_as_long_as_there_is_room_for(tab: Watched) -> None:
    page = tab.page
    page.route("**/v1/**", with_fields(ignore_eos=True))
    tab.chat("x y z " * 60)  # which leaves less than 200 tokens of 512
    expect(page.locator("#status")).to_contain_text("ended at the token limit")
    expect(page.locator("#notice")).to_be_hidden()
    page.click("text=Completion")
    page.fill("#prompt", "x y z " * 60)
    page.press("#prompt", "Enter")
    expect(page.locator("#notice")).to_contain_text("max_tokens must be at most ")
    assert page.input_value("#prompt") == "x y z " * 60
    page.fill("#prompt", "x y z")
    page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_contain_text("256 tokens")
    expect(page.locator("#notice")).to_be_hidden()
    assert [body.get("max_tokens") for body in tab.posted] == [None, 256, 256]
    assert [text for text in tab.complaints if "status of 400" not in text] == []
    tab.complaints.clear()


def test_sampling_parameters_are_sent_and_wrong_ones_are_named(tab: Watched) -> None:
    page = tab.page
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
    assert tab.posted == [expected | {"messages": [{"role": "user", "content": "a"}]}]
    assert page.locator(".token").count() == 0

    page.fill("[name=top_p]", "2")
    page.click("text=Send")  # An empty message is not sent.
    page.fill("#message", "b")
    page.press("#message", "Enter")
    expect(page.locator("#status")).to_contain_text("Top p")
    expect(page.locator("[name=top_p]")).to_be_focused()
    assert len(tab.posted) == 1


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
    assert 0 < page.locator("#output .token").count() < 60_000
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


def test_what_a_model_writes_is_text_and_nothing_else(tab: Watched) -> None:
    answer_with(tab.page, {"delta": {"content": MARKUP}}, {"delta": {"content": "<script>alert(2)</script>"}})
    tab.chat(MARKUP)
    assert tab.answer() == MARKUP + "<script>alert(2)</script>"
    assert tab.page.locator("#transcript :is(img, b, script)").count() == 0


def test_tokens_tell_their_probability_by_pointer_and_by_keyboard(tab: Watched) -> None:
    tokens = [
        token("Hi", -0.1, Hi=-0.1, Yo=-2.5),
        token("\xf0\x9f", -1.0),  # "🙂" is two tokens
        token("\x99\x82", -2.0),
        token("<s>", -3.0),  # special: not in the text
        token(" you", -0.7),
    ]
    page = tab.page
    answer_with(
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
