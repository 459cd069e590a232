"""Every sampling parameter over HTTP: what it does, that it does the same offline, and what is said of wrong values."""

from __future__ import annotations

from typing import Any

import pytest

from pyvllm import LLM, SamplingParams
from pyvllm.server.protocol import SAMPLING_FIELDS
from tests.server.answers import CHAT, COMPLETIONS, body_of, both, whole
from tests.server.conftest import Served
from tests.server.fields import PROMPT, ROWS, Row
from tests.server.test_errors import assert_error

PATHS = (COMPLETIONS, CHAT)
LOGPROBS = ("logprobs", "prompt_logprobs")
"""Fields that leave the text as it is."""


def test_every_sampling_parameter_has_a_row() -> None:
    assert set(SAMPLING_FIELDS) - {row.name for row in ROWS} == set(LOGPROBS)


def offline(llm: LLM, path: str, params: SamplingParams) -> list[tuple[Any, ...]]:
    """What a program gets that has the engine in its own process."""
    if path == COMPLETIONS:
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    else:
        (output,) = llm.chat([{"role": "user", "content": PROMPT}], params, use_tqdm=False)
    return [(one.text, one.finish_reason, one.stop_reason, list(one.token_ids)) for one in output.outputs]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.good}"[:40])
@pytest.mark.parametrize("path", PATHS)
def test_a_field_does_what_it_does_offline(server: Served, llm: LLM, path: str, row: Row) -> None:
    without = body_of(path, PROMPT, **row.without, return_token_ids=True)
    body = without | {row.name: row.good}
    expected = offline(llm, path, row.params)
    answers = [whole(server, path, body)] if row.name == "best_of" else both(server, path, body)
    for answer in answers:
        assert [(*choice.ending, choice.token_ids) for choice in answer.choices] == expected
        assert row.says in (None, answer.texts[0])
    plain = whole(server, path, without)
    assert row.changes == ([choice.ending for choice in plain.choices] != [ending[:3] for ending in expected])


@pytest.mark.parametrize("row", [row for row in ROWS if row.wrong], ids=lambda row: row.name)
@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_value_is_named_with_what_is_allowed(server: Served, path: str, row: Row) -> None:
    for value, message in row.wrong:
        body = body_of(path, PROMPT, **row.without) | {row.name: value}
        said = assert_error(server.post(path, body), 400, row.name)
        assert said.startswith(row.name)
        assert message in said
