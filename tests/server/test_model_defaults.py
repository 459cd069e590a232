"""What a request does not say comes from the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.answers import CHAT, COMPLETIONS, body_of, both, whole
from tests.server.conftest import OTHER_END, Served
from tests.server.test_errors import assert_error

PATHS = (COMPLETIONS, CHAT)


@pytest.mark.parametrize("path", PATHS)
def test_b066_defaults_of_generation_config(other_server: Served, path: str) -> None:
    def texts(**fields: Any) -> set[str]:
        """For several seeds."""
        bodies = [body_of(path, "the", max_tokens=8, seed=seed, ignore_eos=True, **fields) for seed in range(4)]
        return {answer.texts[0] for body in bodies for answer in both(other_server, path, body)}

    greedy = texts(temperature=0)
    assert len(greedy) == 1
    assert texts() == texts(temperature=None, top_k=None) == greedy
    # Each of the two defaults makes the draw greedy by itself.
    assert texts(temperature=1) == texts(top_k=-1) == greedy
    assert len(texts(temperature=1, top_k=-1)) == 4


@pytest.mark.parametrize("path", PATHS)
def test_b066_ends_of_generation_config(other_server: Served, path: str) -> None:
    for end, reason in ((257, None), (OTHER_END, OTHER_END)):
        body = body_of(path, "the", max_tokens=4, temperature=0, logit_bias={str(end): 100})
        for answer in both(other_server, path, body):
            assert (answer.choices[0].ending, answer.completion_tokens) == (("", "stop", reason), 1)
        assert whole(other_server, path, body | {"ignore_eos": True}).completion_tokens == 4


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": [""]}, {"prompt": None}, {}, {"prompt": ["a", ""]}])
def test_b110_nothing_is_no_prompt_without_a_token_to_begin_with(other_server: Served, body: dict[str, Any]) -> None:
    assert "prompt" in assert_error(other_server.post(COMPLETIONS, body), 400, "prompt")
