"""The engine's own process: killed, stopped, stuck, failing."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLM, AsyncLLM, EngineArgs, EngineDeadError, EngineGenerateError, SamplingParams
from tests.async_requests import ENDLESS, GREEDY, OPTIONS, collect, is_gone, wait_until_idle

Start = Callable[..., AsyncLLM]


@pytest.fixture
def start(tiny_llama: Path) -> Iterator[Start]:
    """Start an engine that ends with the test."""
    started: list[AsyncLLM] = []

    def make(**timeouts: float) -> AsyncLLM:
        args = EngineArgs(model=str(tiny_llama), **OPTIONS)
        started.append(AsyncLLM.from_engine_args(args, **timeouts))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for llm in started:
        llm.shutdown()
        assert is_gone(llm.pid, 0)


async def open_streams(llm: AsyncLLM, count: int) -> list[asyncio.Task[Any]]:
    """Tasks that read streams without an end in sight, each of which has given something."""
    started = asyncio.Semaphore(0)

    async def read(i: int) -> None:
        while True:
            async for _ in llm.generate(f"endless {i}", ENDLESS):
                started.release()

    tasks = [asyncio.create_task(read(i)) for i in range(count)]
    for _ in range(count):
        await started.acquire()
    return tasks


async def all_fail(llm: AsyncLLM, tasks: list[asyncio.Task[Any]], timeout_s: float, reason: str) -> None:
    """All streams end with an error in time, and so does whatever is asked later."""
    done, pending = await asyncio.wait(tasks, timeout=timeout_s)
    assert not pending
    assert {type(task.exception()) for task in done} == {EngineDeadError}
    assert all(reason in str(task.exception()) for task in done)
    for use in (llm.check_health(), collect(llm, "x", GREEDY), llm.snapshot(), llm.reset_prefix_cache()):
        with pytest.raises(EngineDeadError, match=reason):
            await asyncio.wait_for(use, 1)
    assert llm.errored
    assert not llm.is_running
    assert is_gone(llm.pid, 2)


def test_r001_killed(start: Start) -> None:
    async def scenario() -> None:
        llm = start()
        tasks = await open_streams(llm, 8)
        os.kill(llm.pid, signal.SIGKILL)
        await all_fail(llm, tasks, 5, "was killed by SIGKILL")

    asyncio.run(scenario())


def test_r002_stopped(start: Start) -> None:
    async def scenario() -> None:
        llm = start()
        tasks = await open_streams(llm, 8)
        os.kill(llm.pid, signal.SIGSTOP)
        await all_fail(llm, tasks, 5, "gave no sign of life for")

    asyncio.run(scenario())


def test_killed_while_idle_and_between_two_loops(start: Start) -> None:
    llm = start()
    asyncio.run(collect(llm, "x", GREEDY))
    os.kill(llm.pid, signal.SIGKILL)
    assert is_gone(llm.pid, 5)
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        asyncio.run(llm.check_health())
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        asyncio.run(collect(llm, "x", GREEDY))


def test_a_loop_that_is_held_up_takes_nobody_for_dead(start: Start) -> None:
    async def scenario() -> None:
        llm = start(heartbeat_timeout_s=1.5)
        (task,) = await open_streams(llm, 1)
        time.sleep(3)  # what a careless program does
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
            tasks = await open_streams(llm, 3)
            (faults / "once").touch()
            await asyncio.wait(tasks, timeout=10)
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
        await asyncio.wait([early, *late], timeout=10)
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
        done, pending = await asyncio.wait(tasks, timeout=5)
        assert not pending
        # A step that fails ends its requests before it is known whether the engine can go on.
        assert {type(task.exception()) for task in done} <= {EngineDeadError, EngineGenerateError}
        assert is_gone(llm.pid, 5)
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError, match=reason):
            await llm.check_health()

    asyncio.run(scenario())


def test_r002_stuck_in_a_step(start: Start, faults: Path) -> None:
    async def scenario() -> None:
        llm = start(stall_timeout_s=1.5)
        await asyncio.sleep(2.5)  # Idle is not stuck.
        await llm.check_health()
        tasks = await open_streams(llm, 4)
        (faults / "hang").touch()
        await all_fail(llm, tasks, 6, "has been in one step for")

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

    before = ticks()
    time.sleep(1.5)
    assert ticks() - before <= 5  # of 150
