"""What reaches the Rust core from Python is checked there: of any size or shape, an exception and never a panic."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from pyvllm import SamplingParams, _core

SIZES: dict[str, Any] = {
    "num_gpu_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64,
    "vocab_size": 50,
}  # fmt: skip
HUGE = 1 << 62


def params(field: str, value: Any) -> SamplingParams:
    return SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_gpu_blocks", HUGE, r"num_gpu_blocks must be from 1 to 536870911, got \d+"),
        ("num_cpu_blocks", HUGE, r"num_cpu_blocks must be from 0 to 2147483647"),
        ("vocab_size", HUGE, r"vocab_size must be from 1 to 2147483647"),
        ("max_num_batched_tokens", 0, r"max_num_batched_tokens must be from 1 to 2147483647, got 0"),
        ("graph_sizes", [4, HUGE], r"graph_sizes must be from 1 to 2147483647"),
    ],
)
def test_sizes_that_do_not_fit_a_plan_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(_core.ParameterError, match=message):
        _core.Scheduler(**(SIZES | {field: value}))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_vocabulary_has_are_refused(field: str) -> None:
    scheduler = _core.Scheduler(**SIZES, max_logprobs=1000)
    with pytest.raises(_core.ParameterError, match=rf"{field} must be at most 50 \(the model's vocabulary\), got 51"):
        scheduler.add_request("a", [1, 2], params(field, 51))
    scheduler.add_request("a", [1, 2], params(field, 50))


@pytest.mark.parametrize(("rows", "width"), [(1, 3), (2, 4), (0, 4), (1, 0)])
@pytest.mark.parametrize("name", ["sample_table", "prompt_table"])
def test_tables_of_the_wrong_shape_are_refused_and_change_nothing(name: str, rows: int, width: int) -> None:
    scheduler = _core.Scheduler(**SIZES)
    scheduler.add_request("a", [1, 2], SamplingParams(logprobs=3, prompt_logprobs=3, max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None

    def table(rows: int, width: int) -> _core.LogprobTable:
        ids = np.zeros((rows, width), np.int32)
        return _core.LogprobTable(ids, ids.astype(np.float32), np.ones(rows, np.int32))

    token, logprob = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32)
    right = {"sample_table": table(1, 4), "prompt_table": table(1, 4)}
    with pytest.raises(RuntimeError, match=rf"{name} must be \[1, 4\], got \[{rows}, {width}\]"):
        scheduler.commit(plan.step, token, logprob, **(right | {name: table(rows, width)}))
    (output,) = scheduler.commit(plan.step, token, logprob, **right)
    assert output.finished


def test_many_stop_tokens_cost_no_time() -> None:
    scheduler = _core.Scheduler(**(SIZES | {"vocab_size": 1 << 20}))
    start = time.process_time()
    scheduler.add_request("a", [1, 2], SamplingParams(stop_token_ids=list(range(1 << 18))))
    assert time.process_time() - start < 5  # 0.03; quadratic, it would be 20


def test_a_request_is_added_while_python_code_of_another_runs() -> None:
    """Reading a request's fields may run Python code, which lets other threads use the scheduler."""
    scheduler = _core.Scheduler(**SIZES)

    class Params(SamplingParams):
        @property
        def top_k(self) -> int:
            if not scheduler.has_unfinished():
                scheduler.add_request("inner", [1], SamplingParams())
            return 0

        @top_k.setter
        def top_k(self, value: int) -> None:
            """As the dataclass sets it."""

    scheduler.add_request("outer", [1, 2], Params())
    assert scheduler.num_unfinished() == 2
