"""How what the core says becomes what users read."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from pyvllm import _core
from pyvllm.logprobs import Logprob, logprob_dicts
from pyvllm.outputs import beam_search_output, request_output


def table(ids: list[list[int]], values: list[list[float]], ranks: list[int]) -> _core.LogprobTable:
    return _core.LogprobTable(
        np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32), np.array(ranks, dtype=np.int32)
    )


def test_a_row_has_the_token_first_then_the_best() -> None:
    (row,) = logprob_dicts(table([[7, 3, 5]], [[-4.0, -0.5, -1.0]], [9]), lambda i: f"<{i}>")
    assert list(row.items()) == [
        (7, Logprob(logprob=-4.0, rank=9, decoded_token="<7>")),
        (3, Logprob(logprob=-0.5, rank=1, decoded_token="<3>")),
        (5, Logprob(logprob=-1.0, rank=2, decoded_token="<5>")),
    ]


def test_a_token_among_the_best_is_not_repeated() -> None:
    (row,) = logprob_dicts(table([[5, 3, 5]], [[-1.0, -0.5, -1.0]], [2]), None)
    assert {token: entry.rank for token, entry in row.items()} == {5: 2, 3: 1}
    assert row[5].decoded_token is None


def test_minus_infinity_stays() -> None:
    (row,) = logprob_dicts(table([[1]], [[-math.inf]], [4]), None)
    assert row[1].logprob == -math.inf


def fake_output(**fields: Any) -> Any:
    """What `request_output` reads of a `_core.Output`, which only the core can make."""
    completion = {
        "index": 0,
        "text": " b",
        "token_ids": [4, 5],
        "cumulative_logprob": -1.5,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": 5,
    }
    output = {
        "request_id": "r",
        "prompt": "a",
        "prompt_token_ids": [1, 2],
        "prompt_logprobs": None,
        "completions": [SimpleNamespace(**completion)],
        "finished": True,
        "num_cached_tokens": 1,
        "num_preemptions": 2,
        "arrival_time": 100.0,
        "queued_ts": 1.0,
        "scheduled_ts": 2.0,
        "first_token_ts": 3.5,
        "last_token_ts": 4.0,
        "error": None,
    }
    return SimpleNamespace(**(output | fields))


def test_all_of_an_output_arrives() -> None:
    output = request_output(fake_output(), None)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "a", [1, 2])
    assert (output.finished, output.num_cached_tokens, output.prompt_logprobs) == (True, 1, None)
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids, completion.cumulative_logprob) == (" b", [4, 5], -1.5)
    assert (completion.finish_reason, completion.stop_reason, completion.finished()) == ("stop", 5, True)
    assert output.metrics is not None
    assert output.metrics.first_token_latency == 2.5
    assert output.metrics.num_preemptions == 2


def test_no_latency_before_the_first_token() -> None:
    metrics = request_output(fake_output(first_token_ts=0.0), None).metrics
    assert metrics is not None
    assert metrics.first_token_latency == 0.0


def test_prompt_logprobs_begin_with_none() -> None:
    output = request_output(fake_output(prompt_logprobs=table([[2, 9]], [[-2.0, -0.1]], [3])), str)
    assert output.prompt_logprobs is not None
    first, second = output.prompt_logprobs
    assert first is None
    assert second == {
        2: Logprob(logprob=-2.0, rank=3, decoded_token="2"),
        9: Logprob(logprob=float(np.float32(-0.1)), rank=1, decoded_token="9"),
    }


def test_beams_hold_prompt_and_generated_part() -> None:
    (beam,) = beam_search_output(request_output(fake_output(), None), "a").sequences
    assert (beam.tokens, beam.text, beam.cum_logprob) == ([1, 2, 4, 5], "a b", -1.5)
    assert (beam.finish_reason, beam.stop_reason) == ("stop", 5)
