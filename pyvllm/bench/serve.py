"""Load on a running server: requests that arrive at a rate, and how long their answers take."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import math
import os
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pyvllm.bench.client import Answer, Client
from pyvllm.bench.options import ServeOptions, parse_percentiles
from pyvllm.bench.report import Report, Row, say, show, summary, table
from pyvllm.bench.workloads import Request, fixed_workload, spread_workload

_RANDOM_PROMPTS: Final = 1000
_PROGRESS_S: Final = 5.0
_BUSY: Final = 0.8
"""Share of a core above which a client no longer keeps up at all times."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """All answers, and how long they took together."""

    answers: list[Answer]
    """In the order of the requests."""
    seconds: float
    """From the first request to the end of the last answer."""
    server: str
    """What the server calls itself: address and version."""
    client_cpu: float
    """Share of a core that this client was busy; near 1 it is the client that is measured."""


def run(options: ServeOptions) -> None:
    """Send what the options ask for, print the table, write report and plot.

    Raises `ValueError` if a library is missing, `RuntimeError` if the server cannot be used or requests failed.
    """
    _require("aiohttp", "pyvllm bench serve")
    if options.plot is not None:
        _require("matplotlib", "--plot")
    salt = secrets.randbits(16)
    requests = dataset(options, salt)
    settings = {**dataclasses.asdict(options), "salt": salt}
    report = Report("serve", settings, Path(options.json) if options.json else None)
    load = asyncio.run(send_all(options, requests))
    result = {"server": load.server, **results(options, load)}
    report.add(result)
    for rows in _tables(result):
        show(table(rows) + "\n")
    show(f"{report.footer()}")
    if options.plot is not None:
        from pyvllm.bench.serve_plot import draw

        draw(load, options.metric_names, Path(options.plot))
    if load.client_cpu > _BUSY:
        say(f"this client was busy {load.client_cpu:.0%} of the time: its own speed is part of these figures")
    failed = [answer.error for answer in load.answers if answer.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(load.answers)} requests failed, the first with: {failed[0]}")


def _require(module: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{what} needs {module}, which is not installed: pip install 'pyvllm[bench]'")


def dataset(options: ServeOptions, salt: int) -> list[Request]:
    """The requests to send. `salt` changes their tokens."""
    if options.dataset_name == "random":
        return spread_workload(
            salt,
            num_prompts=options.num_prompts or _RANDOM_PROMPTS,
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            ratio=options.random_range_ratio,
            seed=options.seed,
            vocab_size=options.vocab_size,
        ).requests
    requests = fixed_workload(options.dataset_name, salt, options.vocab_size).requests
    if options.num_prompts is not None and options.num_prompts > len(requests):
        raise ValueError(
            f"num_prompts must be at most {len(requests)} for {options.dataset_name}, got {options.num_prompts}"
        )
    return requests[: options.num_prompts]


def arrivals(count: int, options: ServeOptions) -> list[float]:
    """Seconds from the start at which requests arrive; the first is at 0."""
    rng = random.Random(options.seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        if math.isinf(options.request_rate):
            continue
        mean = 1 / options.request_rate
        even = math.isinf(options.burstiness)
        now += mean if even else rng.gammavariate(options.burstiness, mean / options.burstiness)
    return times


async def send_all(options: ServeOptions, requests: Sequence[Request]) -> Load:
    """Send all requests as they arrive and wait for all answers. Raises `RuntimeError` if the warm-up fails."""
    import aiohttp

    begin = time.perf_counter()
    key = os.environ.get("OPENAI_API_KEY")
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        read_bufsize=1 << 20,
    ) as session:
        client = Client(
            session=session,
            url=options.url,
            endpoint=options.endpoint,
            model=options.model or await _first_model(session, options.url),
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            now=lambda: time.perf_counter() - begin,
        )
        server = f"{options.url} {await _version(session, options.url)}"
        # Other tokens than those that count, which a cache would then have.
        await _warm_up(client, options, replace(requests[0], prompt=requests[0].prompt[::-1]))
        bodies = [await client.body(request) for request in requests]
        begin = time.perf_counter()
        cpu_begin = time.process_time()
        answers = await _send(client, options, requests, bodies)
        seconds = client.now()
        cpu = (time.process_time() - cpu_begin) / seconds
        return Load(answers=answers, seconds=seconds, server=server, client_cpu=cpu)


async def _first_model(session: Any, url: str) -> str:
    """Name of the first model that the server lists."""
    import aiohttp

    try:
        async with session.get(f"{url}/v1/models") as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(f"GET {url}/v1/models: HTTP {response.status}: {text[:300]}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        raise RuntimeError(f"no server answers at {url}: {error}") from error


async def _version(session: Any, url: str) -> str:
    """The server's version, if it tells: not all know this address."""
    import aiohttp

    with contextlib.suppress(aiohttp.ClientError, ValueError, LookupError, TypeError):
        async with session.get(f"{url}/version") as response:
            return str((await response.json())["version"])
    return "(version unknown)"


async def _warm_up(client: Client, options: ServeOptions, request: Request) -> None:
    for _ in range(options.num_warmups):
        answer = await client.send(request, await client.body(request))
        if answer.error is not None:
            raise RuntimeError(f"the first request to {options.url}{options.endpoint} failed: {answer.error}")


async def _send(
    client: Client, options: ServeOptions, requests: Sequence[Request], bodies: Sequence[bytes]
) -> list[Answer]:
    free = asyncio.Semaphore(options.max_concurrency or len(requests))
    done = 0

    async def send(request: Request, body: bytes) -> Answer:
        nonlocal done
        async with free:
            answer = await client.send(request, body)
        done += 1
        return answer

    async def tell() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            say(f"{done} of {len(requests)} requests answered after {client.now():.0f} s")

    teller = asyncio.create_task(tell())
    tasks = []
    for arrival, request, body in zip(arrivals(len(requests), options), requests, bodies, strict=True):
        await asyncio.sleep(arrival - client.now())
        tasks.append(asyncio.create_task(send(request, body)))
    answers = await asyncio.gather(*tasks)
    teller.cancel()
    return answers


def results(options: ServeOptions, load: Load) -> dict[str, Any]:
    """What the report holds: rates, percentiles in milliseconds, and all times of each request in seconds."""
    good = [answer for answer in load.answers if answer.error is None]
    percentiles = parse_percentiles("metric_percentiles", options.metric_percentiles)
    output_tokens = sum(answer.output_tokens for answer in good)
    input_tokens = sum(answer.input_tokens for answer in good)
    found: dict[str, Any] = {
        "completed": len(good),
        "failed": len(load.answers) - len(good),
        "seconds": load.seconds,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "wanted_output_tokens": sum(answer.wanted_tokens for answer in good),
        "requests_per_s": len(good) / load.seconds,
        "input_tokens_per_s": input_tokens / load.seconds,
        "output_tokens_per_s": output_tokens / load.seconds,
        "max_concurrent_requests": max_open(load.answers),
        "client_cpu": load.client_cpu,
    }
    if options.goodput:
        kept = sum(_keeps(answer, options.goodput_ms) for answer in good)
        found["goodput_requests_per_s"] = kept / load.seconds
    for name in options.metric_names:
        found[f"{name}_ms"] = summary(list(metric_values(good, name)), percentiles)
    return found | {"requests": [dataclasses.asdict(answer) for answer in load.answers]}


def metric_values(answers: Sequence[Answer], name: str) -> Iterator[float]:
    """All values of a metric, in seconds."""
    for answer in answers:
        value = getattr(answer, name)
        if isinstance(value, list):
            yield from value
        elif value is not None:
            yield value


def _keeps(answer: Answer, limits_ms: dict[str, float]) -> bool:
    return all(1e3 * (getattr(answer, name) or 0.0) <= limit for name, limit in limits_ms.items())


def max_open(answers: Sequence[Answer]) -> int:
    """Most requests that were open at once."""
    changes = [change for answer in answers if answer.pieces for change in ((answer.sent, 1), (answer.pieces[-1], -1))]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _tables(result: dict[str, Any]) -> list[list[Row]]:
    """Totals, and metrics in milliseconds."""
    totals: list[Row] = []
    metrics: list[Row] = []
    for name, value in result.items():
        if isinstance(value, dict):
            metrics.append({"ms": name.removesuffix("_ms"), **value})
        elif not isinstance(value, list):
            totals.append({"total": name.replace("_per_s", "/s").replace("_", " "), "value": value})
    return [totals, metrics]
