"""The engine's own process: killed, stopped, stuck, failing."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLM, AsyncLLM, EngineArgs, EngineDeadError, EngineGenerateError, SamplingParams
from pyvllm.engine_client import HEARTBEAT_TIMEOUT_S
from tests.async_requests import ENDLESS, GREEDY, OPTIONS, PATIENCE_S, collect, is_gone, open_streams, wait_until_idle

Start = Callable[..., AsyncLLM]


@pytest.fixture
def start(long_llama: Path) -> Iterator[Start]:
    """Start an engine that ends with the test."""
    started: list[AsyncLLM] = []

    def make(**timeouts: float) -> AsyncLLM:
        args = EngineArgs(model=str(long_llama), **OPTIONS)
        started.append(AsyncLLM.from_engine_args(args, **timeouts))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for llm in started:
        llm.shutdown()
        assert is_gone(llm.pid)


async def all_fail(llm: AsyncLLM, tasks: list[asyncio.Task[Any]], reason: str) -> None:
    """All streams end with an error, and so does whatever is asked later."""
    done, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
    assert not pending
    assert {type(task.exception()) for task in done} == {EngineDeadError}
    assert all(reason in str(task.exception()) for task in done)
    for use in (llm.check_health(), collect(llm, "x", GREEDY), llm.snapshot(), llm.reset_prefix_cache()):
        with pytest.raises(EngineDeadError, match=reason):
            await asyncio.wait_for(use, PATIENCE_S)
    assert llm.errored
    assert not llm.is_running
    assert is_gone(llm.pid)


def test_r001_killed(start: Start) -> None:
    async def scenario() -> None:
        llm = start()
        tasks = await open_streams(llm, 8)
        os.kill(llm.pid, signal.SIGKILL)
        await all_fail(llm, tasks, "was killed by SIGKILL")

    asyncio.run(scenario())


def test_r002_stopped(start: Start) -> None:
    async def scenario() -> None:
        llm = start()
        tasks = await open_streams(llm, 8)
        os.kill(llm.pid, signal.SIGSTOP)
        await all_fail(llm, tasks, "gave no sign of life for")
        silence = re.search(r"for ([\d.]+) s", str(llm.dead_error))
        assert silence is not None
        assert HEARTBEAT_TIMEOUT_S <= float(silence[1]) < 5

    asyncio.run(scenario())


def test_killed_while_idle_and_between_two_loops(start: Start) -> None:
    llm = start()
    asyncio.run(collect(llm, "x", GREEDY))
    os.kill(llm.pid, signal.SIGKILL)
    assert is_gone(llm.pid)
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        asyncio.run(llm.check_health())
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        asyncio.run(collect(llm, "x", GREEDY))


@pytest.mark.parametrize("reads_first", [False, True])
def test_time_in_which_a_loop_or_the_machine_is_held_up_does_not_count(
    start: Start, monkeypatch: pytest.MonkeyPatch, reads_first: bool
) -> None:
    async def scenario() -> None:
        llm = start()
        (task,) = await open_streams(llm, 1)
        for _ in range(3):
            clock = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda clock=clock: clock() + 1000)
            if not reads_first:
                llm._client._watch()  # Some loops (uvloop) call what is due before what has come is read.
            await asyncio.sleep(0.1)
            await llm.check_health()
        task.cancel()
        await asyncio.wait([task])
        await wait_until_idle(llm)

    asyncio.run(scenario())


FAULTS = """
import os, time
from pathlib import Path
from pyvllm import runner

launch = runner.Runner.launch

def faulty(self, buffer):
    for name in os.listdir(os.environ["TEST_FAULTS"]):
        path = Path(os.environ["TEST_FAULTS"], name)
        if name == "once":
            path.unlink()
            raise RuntimeError("planted")
        if name == "slowly":
            path.unlink()
            time.sleep(1)
            raise RuntimeError("planted")
        if name == "always":
            raise RuntimeError("planted")
        if name == "exit":
            os._exit(7)
        if name == "hang":
            time.sleep(3600)
    return launch(self, buffer)

runner.Runner.launch = faulty
"""


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where a file named `once`, `slowly`, `always`, `exit` or `hang` makes the engine's next step do so."""
    modules, folder = tmp_path / "modules", tmp_path / "faults"
    modules.mkdir()
    folder.mkdir()
    (modules / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("TEST_FAULTS", str(folder))
    return folder


def test_a_failed_step_loses_its_requests_and_no_more(start: Start, faults: Path) -> None:
    async def scenario() -> None:
        llm = start()
        expected = (await collect(llm, "x", GREEDY))[-1].outputs
        for _ in range(2):
            tasks = await open_streams(
                llm, 3
            )  # None of them ends by itself, so each has a part in the step that fails.
            (faults / "once").touch()
            await asyncio.wait(tasks, timeout=PATIENCE_S)
            assert {type(task.exception()) for task in tasks} == {EngineGenerateError}
            assert "planted" in str(tasks[0].exception())
            await llm.check_health()
            assert (await collect(llm, "x", GREEDY, request_id="generate-0"))[-1].outputs == expected
            await wait_until_idle(llm)

    asyncio.run(scenario())


def test_requests_that_come_while_a_step_fails_are_not_lost(start: Start, faults: Path) -> None:
    async def scenario() -> None:
        llm = start()
        expected = (await collect(llm, "x", GREEDY))[-1].outputs
        (faults / "slowly").touch()
        # One: the engine's step may begin before it has read a second.
        early = asyncio.create_task(collect(llm, "x", GREEDY))
        while (faults / "slowly").exists():  # until the engine is in the step that fails
            await asyncio.sleep(0.01)
        late = [asyncio.create_task(collect(llm, "x", GREEDY)) for _ in range(3)]
        await asyncio.wait([early, *late], timeout=PATIENCE_S)
        assert type(early.exception()) is EngineGenerateError
        assert [(await task)[-1].outputs for task in late] == [expected] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "reason"), [("always", "cannot go on: RuntimeError.*planted"), ("exit", "ended with exit status 7")]
)
def test_r003_an_engine_that_cannot_go_on_ends_all_streams(start: Start, faults: Path, fault: str, reason: str) -> None:
    async def scenario() -> None:
        llm = start()
        tasks = await open_streams(llm, 4)
        (faults / fault).touch()
        done, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert not pending
        # A step that fails ends its requests before it is known whether the engine can go on.
        assert {type(task.exception()) for task in done} <= {EngineDeadError, EngineGenerateError}
        assert is_gone(llm.pid)
        with pytest.raises(EngineDeadError, match=reason):
            await llm.check_health()

    asyncio.run(scenario())


def test_r002_stuck_in_a_step(start: Start, faults: Path) -> None:
    async def scenario() -> None:
        llm = start(heartbeat_timeout_s=PATIENCE_S, stall_timeout_s=1.0)
        await llm.check_health()
        await asyncio.sleep(1.7)  # Idle is not stuck.
        await llm.check_health()
        (faults / "hang").touch()
        tasks = [asyncio.create_task(collect(llm, f"endless {i}", ENDLESS)) for i in range(4)]
        await all_fail(llm, tasks, "has been in one step for")

    asyncio.run(scenario())


def same_error(options: dict[str, Any], kind: type[Exception]) -> None:
    """An engine in its own process refuses these arguments as one in this process does."""
    before = children()
    with pytest.raises(kind) as alone:
        LLM(**options)
    model = options.pop("model")
    with pytest.raises(kind) as found:
        AsyncLLM.from_engine_args(EngineArgs.from_options(model, options))
    assert (type(found.value), str(found.value)) == (type(alone.value), str(alone.value))
    assert children() <= before


def children() -> set[int]:
    """Processes that this one has started."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listing.split()}


def test_r006_loading_errors_arrive_as_they_are(tiny_llama: Path, tmp_path: Path) -> None:
    model = str(tiny_llama)
    same_error({"model": str(tmp_path / "nothing")}, FileNotFoundError)
    same_error({"model": model, "device": "cpu", "num_gpu_blocks_override": 1}, ValueError)
    same_error({"model": model, "hf_overrides": {"architectures": ["UnknownForCausalLM"]}}, ValueError)


def test_arguments_stay_out_of_sight(start: Start) -> None:
    """Keys of hubs and the like are in neither the command line nor the environment."""
    llm = start()
    command = Path(f"/proc/{llm.pid}/cmdline").read_bytes().split(b"\0")
    assert command[1:3] == [b"-m", b"pyvllm.engine_process"]
    assert len(command) == 7
    assert str(OPTIONS["num_gpu_blocks_override"]).encode() not in command
    environment = Path(f"/proc/{llm.pid}/environ").read_bytes()
    assert json.dumps(llm.info.model).encode() not in environment


def test_a_new_engine_has_done_nothing_yet_and_does_not_poll(start: Start) -> None:
    llm = start()
    stats = llm.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.prefix_queries) == (0, 0, 0)
    assert stats.num_free_gpu_blocks == stats.num_gpu_blocks == OPTIONS["num_gpu_blocks_override"]
    asyncio.run(collect(llm, "x", SamplingParams(max_tokens=2)))

    def ticks() -> int:
        fields = Path(f"/proc/{llm.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def spent() -> int:
        before = ticks()
        time.sleep(1.5)
        return ticks() - before

    assert any(spent() <= 5 for _ in range(5))  # of 150
