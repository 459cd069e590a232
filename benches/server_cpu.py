"""What a token costs the HTTP server in CPU time.

256 clients read at once, in a process of their own. The engine's process has a scheduler, but no model: each step takes
a fixed time and makes one token for each request. Counted is the CPU time of the server's process alone, system calls
included:

    python benches/server_cpu.py            # both figures
    python benches/server_cpu.py --profile  # where the time of a stream goes
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import multiprocessing
import os
import pstats
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray

from pyvllm import AsyncLLM, EngineArgs, _core, engine_process
from pyvllm.engine import Engine
from pyvllm.engine_client import EngineClient
from pyvllm.engine_spawn import EngineProcess
from pyvllm.logits_processors import ProcessedRow
from pyvllm.server.app import build_app
from pyvllm.server.config import ServerArgs
from pyvllm.server.life_cycle import Server, listening, uvicorn_config
from pyvllm.server.serving import Serving
from pyvllm.step import Header, StepResult
from pyvllm.tokenizer import load_tokenizer

LETTERS: Final = 256
BLOCK_SIZE: Final = 16
ENGINE_FLAG: Final = "--engine"
TIMEOUT_S: Final = 120
STEP_S: Final = 0.012
MAX_LEN: Final = 1024
CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": LETTERS,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One round."""

    seconds_per_token: float
    tokens_per_chunk: float
    """Above 1 if the server did not keep up with the engine, so that tokens came together."""


def write_model(folder: Path) -> None:
    """A model without weights, which are made at random, whose tokens are words of five letters."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {f"▁w{i:03}": i for i in range(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="▁w000"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass(frozen=True, kw_only=True)
class SameToken:
    """A step that samples token 7 in every row, once its time has passed."""

    step: int
    shape: tuple[int, int]
    ends_at: float
    failures: dict[str, Exception] = field(default_factory=dict)

    def wait(self) -> StepResult:
        """What it sampled."""
        time.sleep(max(0.0, self.ends_at - time.monotonic()))
        return np.full(self.shape, 7, np.int32), np.zeros(self.shape, np.float32), None, None, None


class NoModel:
    """Runs steps that compute nothing."""

    def launch(self, buffer: NDArray[np.int32], processed_rows: Sequence[ProcessedRow] = ()) -> SameToken:
        """Start a step."""
        shape = (int(buffer[Header.NUM_ROWS]), int(buffer[Header.NUM_CANDIDATES]))
        return SameToken(step=int(buffer[Header.STEP]), shape=shape, ends_at=time.monotonic() + STEP_S)


def serve_engine(argv: list[str]) -> None:
    """The engine's process: pyvllm's own, with `NoModel` in place of the model."""
    load = engine_process._load

    def load_without_model(start: dict[str, Any]) -> Engine:
        engine = load(start)
        engine._runner = NoModel()
        return engine

    engine_process._load = load_without_model
    engine_process.main(argv)


class NoModelProcess(EngineProcess):
    """Starts this file as the engine's process."""

    def __init__(self) -> None:
        """As `EngineProcess`."""
        self.connection, theirs = socket.socketpair()
        self._maker = os.getpid()
        arguments = [ENGINE_FLAG, theirs.fileno(), os.getpid(), 1]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            )


def start_engine(args: EngineArgs) -> AsyncLLM:
    """As `AsyncLLM.from_engine_args`."""
    process = NoModelProcess()
    process.send_arguments(args)
    facts = process.wait_loaded()
    front = _core.FrontEnd(facts.limits)
    front.receive(facts.stats)
    client = EngineClient(process, front, heartbeat_timeout_s=10, stall_timeout_s=10)
    return AsyncLLM(process, facts, load_tokenizer(Path(args.model)), client)


def read_all(port: int, body: dict[str, object], clients: int, chunks: Connection) -> None:
    """Send the request from `clients` connections at once, read all answers, tell how many chunks there were."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    selector = selectors.DefaultSelector()
    for _ in range(clients):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    total = 0
    while selector.get_map():
        for key, _ in selector.select():
            data = cast(socket.socket, key.fileobj).recv(1 << 16)
            key.data.extend(data)
            if not data:
                assert b'"finish_reason":"length"' in key.data, bytes(key.data[-300:])
                total += key.data.count(b'"finish_reason":null')
                selector.unregister(key.fileobj)
    chunks.send(total)


async def measure(llm: AsyncLLM, *, stream: bool, clients: int, tokens: int) -> Cost:
    """One round."""
    args = ServerArgs(host="127.0.0.1", port=0, disable_uvicorn_access_log=True)
    serving = Serving(llm, args)
    with listening(args) as listener:
        return await _measure(listener, serving, stream=stream, clients=clients, tokens=tokens)


async def _measure(listener: socket.socket, serving: Serving, *, stream: bool, clients: int, tokens: int) -> Cost:
    server = Server(uvicorn_config(build_app(serving), serving.args), serving)
    serving_task = asyncio.create_task(server.serve(sockets=[listener]))
    body: dict[str, object] = {"prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, "stream": stream}
    ours, theirs = multiprocessing.Pipe()
    arguments = (listener.getsockname()[1], body, clients, theirs)
    reader = multiprocessing.get_context("spawn").Process(target=read_all, args=arguments)
    reader.start()
    begun = time.process_time()
    async with asyncio.timeout(TIMEOUT_S):
        while not ours.poll():
            assert reader.is_alive(), "the clients failed"
            await asyncio.sleep(0.05)
    seconds = time.process_time() - begun
    server.should_exit = True
    await serving_task
    reader.join()
    return Cost(
        seconds_per_token=seconds / (clients * tokens),
        tokens_per_chunk=clients * tokens / max(1, ours.recv()) if stream else 1.0,
    )


def main() -> None:
    """Print the figures."""
    if sys.argv[1:2] == [ENGINE_FLAG]:
        serve_engine(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256, help="requests at once [default: 256]")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each [default: 256]")
    parser.add_argument("--rounds", type=int, default=5, help="the best of so many is taken [default: 5]")
    parser.add_argument("--profile", action="store_true", help="profile one round of streams instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        blocks = args.clients * (args.tokens // BLOCK_SIZE + 2) + MAX_LEN // BLOCK_SIZE
        engine_args = EngineArgs(
            model=folder,
            load_format="dummy",
            max_num_seqs=args.clients,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=blocks,
        )
        llm = start_engine(engine_args)
    gc.collect()
    gc.freeze()  # as the server does
    try:
        run(llm, args)
    finally:
        llm.shutdown()


def run(llm: AsyncLLM, args: argparse.Namespace) -> None:
    """All rounds."""

    async def rounds(stream: bool) -> Cost:
        costs = [
            await measure(llm, stream=stream, clients=args.clients, tokens=args.tokens)
            for _ in range(1 if args.profile else args.rounds)
        ]
        return min(costs, key=lambda cost: cost.seconds_per_token)

    if args.profile:
        with cProfile.Profile(time.process_time) as profile:
            asyncio.run(rounds(stream=True))
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    print(f"{args.clients} requests at once of {args.tokens} tokens: CPU time of the server's process for each token")
    for stream in (True, False):
        cost = asyncio.run(rounds(stream=stream))
        note = f" ({cost.tokens_per_chunk:.2f} tokens in a chunk)" if stream else ""
        print(f"{'streamed' if stream else 'whole'}: {1e6 * cost.seconds_per_token:.1f} µs{note}")


if __name__ == "__main__":
    main()
