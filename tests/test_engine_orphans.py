"""The engine's own process ends with the program that made it, however that ends, and not before."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.async_requests import PATIENCE_S, is_gone

PARENT = """
import asyncio, os, sys, threading
from pyvllm import AsyncLLM, EngineArgs, SamplingParams
from tests.async_requests import ENDLESS, OPTIONS

def make():
    global llm
    llm = AsyncLLM.from_engine_args(EngineArgs(model=sys.argv[1], **OPTIONS))

async def stream():
    while True:
        async for _ in llm.generate("endless", ENDLESS):
            if not told:
                told.append(1)
                print(llm.pid, flush=True)

told = []
"""


def parent(tiny_llama: Path, code: str, **options: Any) -> tuple[subprocess.Popen[str], int]:
    """A program with an engine that streams, and the engine's process. It prints that as its first line."""
    command = [sys.executable, "-c", PARENT + textwrap.dedent(code), str(tiny_llama)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


IN_A_THREAD = "t = threading.Thread(target=make); t.start(); t.join()"
KILLED = {
    "main-thread": "make(); asyncio.run(stream())",
    # The thread that made it ends at once, the engine does not.
    "other-thread": f"{IN_A_THREAD}; asyncio.run(stream())",
    # A process forked from the program keeps the program's end of the connection open.
    "forked": f"""
    {IN_A_THREAD}
    if os.fork() == 0:
        os.close(1)
        os.read(0, 1)  # until the test ends
        os._exit(0)
    asyncio.run(stream())
    """,
}


@pytest.mark.parametrize("code", KILLED.values(), ids=KILLED)
def test_no_orphan_when_the_parent_is_killed(tiny_llama: Path, code: str) -> None:
    process, pid = parent(tiny_llama, code)
    assert not is_gone(pid, 0.5)
    process.kill()
    process.wait()
    assert is_gone(pid)


def test_no_orphan_while_loading(tiny_llama: Path) -> None:
    code = """
    import pyvllm.engine_spawn as spawn
    process = spawn.EngineProcess()
    print(process.pid, flush=True)
    threading.Event().wait()
    """
    process, pid = parent(tiny_llama, code)
    process.kill()
    process.wait()
    assert is_gone(pid)


@pytest.mark.parametrize("how", ["raise SystemExit(3)", "del llm"])
def test_no_orphan_when_the_program_ends(tiny_llama: Path, how: str) -> None:
    code = f"""
    make()
    async def some():
        async for _ in llm.generate("endless", ENDLESS):
            print(llm.pid, flush=True)
            break
    asyncio.run(some())
    {how}
    """
    process, pid = parent(tiny_llama, code)
    assert process.wait(PATIENCE_S) == (3 if "3" in how else 0)
    assert is_gone(pid)


def test_a_forked_process_does_not_end_the_engine_of_its_parent(tiny_llama: Path) -> None:
    code = """
    make()
    async def some():
        async for _ in llm.generate("endless", ENDLESS):
            pass
    if (child := os.fork()) == 0:
        llm.shutdown()
        sys.exit(0)
    os.waitpid(child, 0)
    print(llm.pid, flush=True)
    asyncio.run(some())
    print("alive", flush=True)
    """
    process, _ = parent(tiny_llama, code)
    assert process.communicate(timeout=PATIENCE_S)[0] == "alive\n"
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_engine_only_through_its_parent(tiny_llama: Path, number: signal.Signals) -> None:
    code = """
    import signal
    make()
    async def main():
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        task = asyncio.create_task(stream())
        await stop.wait()
        count = 0
        async for output in llm.generate("endless", SamplingParams(max_tokens=50, ignore_eos=True)):
            count += 1
        print("drained", len(output.outputs[0].token_ids), flush=True)
    asyncio.run(main())
    """
    process, pid = parent(tiny_llama, code, start_new_session=True)
    os.kill(pid, number)
    os.killpg(process.pid, number)
    assert process.communicate(timeout=PATIENCE_S)[0] == "drained 50\n"
    assert is_gone(pid)
