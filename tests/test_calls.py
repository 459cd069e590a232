"""Ctrl-C at every line of `calls.py` leaves an engine that works, and nobody waiting."""

import linecache
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from pyvllm import LLM, SamplingParams, calls
from tests.async_requests import PATIENCE_S
from tests.conftest import TinyCheckpoint
from tests.idle import assert_idle, engine_of

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_gpu_blocks_override": 32,
    "block_size": 8,
    "max_model_len": 128,
}
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: TinyCheckpoint) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint("llama")), **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, prompt: str) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


class Interrupt:
    """Raises KeyboardInterrupt before the line number `place` that is run in calls.py, and once only.

    Lines that begin a `with` block come up again as it ends, between its last line and the release of its lock, where
    the interpreter takes no signal: they do not count.
    """

    def __init__(self, place: int) -> None:
        self.left = place

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != calls.__file__:
            return None
        if event != "line" or linecache.getline(calls.__file__, frame.f_lineno).lstrip().startswith("with "):
            return self.trace
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.trace


def interrupted(place: int, llm: LLM) -> bool:
    """Run two prompts with an interrupt; False if they end before the place is reached."""
    before = sys.gettrace()
    sys.settrace(Interrupt(place).trace)
    try:
        llm.generate(["the", "in"], GREEDY, use_tqdm=False)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_anywhere_leaves_an_engine_that_works(llm: LLM) -> None:
    expected = tokens(llm, "the")
    results: list[Any] = []
    place = 1
    while interrupted(place, llm):
        # In a thread, so that waiting for ever is a failure of this test and not its own end.
        thread = threading.Thread(target=lambda: results.append(tokens(llm, "the")), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert results == [expected], f"after an interrupt at place {place}"
        assert_idle(engine_of(llm))
        results.clear()
        place += 1
    assert place > 50


def test_a_fork_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm, "the")
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="made before a fork"):
            tokens(llm, "the")
    assert tokens(llm, "the") == expected


def test_a_failure_reaches_all_that_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = llm.stream("in", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine_of(llm), "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokens(llm, "the")
    with pytest.raises(RuntimeError, match="failed while these requests were in it"):
        next(other)
    assert_idle(engine_of(llm))
