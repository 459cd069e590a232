"""How long a batch takes: to the first token, between tokens, in all; and where the host's time goes in a step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pyvllm.bench.models import bench_args
from pyvllm.bench.options import LatencyOptions, parse_numbers, parse_percentiles
from pyvllm.bench.report import Report, Row, say, show, summary, table
from pyvllm.bench.step_clock import PARTS, StepClock
from pyvllm.bench.workloads import Workload, random_workload
from pyvllm.config import DEVICE_DEFAULTS, EngineArgs

_HOST_WARM_UP: Final = 16
"""Decode steps before those that count."""


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """One run of a batch, in seconds."""

    total: float
    """From the first request's arrival to the last token."""
    first: list[float]
    """Of each request, until its first token."""
    gaps: list[float]
    """Between two tokens of a request, of all requests."""
    steps: list[float]
    """Of the engine."""


class Driver:
    """Gives one engine requests and steps it."""

    def __init__(self, args: EngineArgs, temperature: float) -> None:
        """Load the model. Its prefix cache is off."""
        from pyvllm.loading import build_engine

        self._temperature = temperature
        self._salt = 0
        with bench_args(dataclasses.replace(args, enable_prefix_caching=False)) as args:
            self.engine = build_engine(args)

    def workload(self, size: int, input_len: int, output_len: int) -> Workload:
        """`size` equal requests, each time of other tokens."""
        self._salt += 1
        return random_workload(
            self._salt,
            num_prompts=size,
            input_len=input_len,
            output_len=output_len,
            n=1,
            seed=0,
            vocab_size=self.engine.info.vocab_size,
        )

    def add(self, workload: Workload, *, final_only: bool) -> list[str]:
        """Queue all requests and return their ids. `final_only`: outputs only at the end, not after each step."""
        from pyvllm.inputs import ParsedPrompt
        from pyvllm.sampling_params import RequestOutputKind, SamplingParams

        ids = []
        for number, request in enumerate(workload.requests):
            params = SamplingParams(
                temperature=self._temperature,
                max_tokens=request.output_len,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY if final_only else RequestOutputKind.DELTA,
            )
            ids.append(f"{self._salt}-{number}")
            self.engine.add_request(ids[-1], ParsedPrompt(token_ids=request.prompt), request.prompt, params)
        return ids

    def run(self, workload: Workload) -> BatchRun:
        """Run a batch to its end. Raises `RuntimeError` if it has not as many tokens as were asked for."""
        begin = before = time.perf_counter()
        latest = dict.fromkeys(self.add(workload, final_only=False), 0.0)
        first: list[float] = []
        gaps: list[float] = []
        steps: list[float] = []
        tokens = 0
        while self.engine.has_unfinished():
            outputs = self.engine.step()
            now = time.perf_counter()
            steps.append(now - before)
            before = now
            for output in outputs:
                tokens += len(output.completions[0].token_ids)
                if latest[output.request_id]:
                    gaps.append(now - latest[output.request_id])
                else:
                    first.append(now - begin)
                latest[output.request_id] = now
        if tokens != workload.output_tokens:
            raise RuntimeError(f"{tokens} tokens were generated, {workload.output_tokens} were asked for")
        return BatchRun(total=before - begin, first=first, gaps=gaps, steps=steps)


@dataclass(kw_only=True)
class HostTimes:
    """Seconds of the parts of steps."""

    parts: dict[str, list[float]]
    steps: list[float] = field(default_factory=list)
    """All of each step."""


def time_host(driver: Driver, size: int, input_len: int, steps: int) -> HostTimes:
    """Time the parts of `steps` decode steps of `size` sequences whose outputs come at the end, as those of
    `LLM.generate` do. The driver's engine stays as it was.

    Raises `ValueError` with the numbers if so many sequences do not fit into the KV pool or a request.
    """
    engine = driver.engine
    output_len = engine.info.max_model_len - input_len
    if output_len < steps + 2 * _HOST_WARM_UP:
        raise ValueError(
            f"host_steps must be at most {output_len - 2 * _HOST_WARM_UP} with input_len {input_len} and max_model_len "
            f"{engine.info.max_model_len}, got {steps}"
        )
    ids = driver.add(driver.workload(size, input_len, output_len), final_only=True)
    try:
        while engine.stats().num_waiting:
            engine.step()
        for _ in range(_HOST_WARM_UP):
            engine.step()
        totals = []
        with StepClock(engine) as clock:
            for _ in range(steps):
                begin = time.perf_counter()
                engine.step()
                totals.append(time.perf_counter() - begin)
        stats = engine.stats()
    finally:
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_unfinished():
            engine.step()
    if stats.num_running != size:
        pool = f"the KV pool has {stats.num_gpu_blocks} blocks"
        raise ValueError(f"host_time: of {size} sequences only {stats.num_running} ran at the end; {pool}")
    return HostTimes(parts=clock.seconds(), steps=totals)


class Latency:
    """Measures batches and steps, and collects the results."""

    def __init__(self, args: EngineArgs, options: LatencyOptions) -> None:
        """`args`: of the model; its number of sequences is raised to what the options need, unless it is set."""
        self._args, self._options = args, options
        self._sizes = parse_numbers("batch_size", options.batch_size)
        self._host_sizes = parse_numbers("host_time", options.host_time)
        self._percentiles = parse_percentiles("percentiles", options.percentiles)
        settings = {"engine_args": args, **dataclasses.asdict(options)}
        self.report = Report("latency", settings, Path(options.json) if options.json else None)

    def run(self) -> None:
        """All batches, then the parts of steps."""
        from pyvllm.loading import choose_device

        args = self._args
        if args.max_num_seqs is None:
            default = DEVICE_DEFAULTS[choose_device(args).type].max_num_seqs
            args = dataclasses.replace(args, max_num_seqs=max(default, *self._sizes, *self._host_sizes))
        driver = Driver(args, self._options.temperature)
        for size in self._sizes:
            self._measure_batch(driver, size)
        for size in self._host_sizes:
            say(f"parts of steps of {size}")
            times = time_host(driver, size, self._options.input_len, self._options.host_steps)
            parts = {"step": times.steps, **times.parts}
            found = {f"{name}_us": summary(values, self._percentiles, 1e6) for name, values in parts.items()}
            self.report.add({"kind": "host", "sequences": size, **found})

    def _measure_batch(self, driver: Driver, size: int) -> None:
        options = self._options
        runs = []
        for number in range(-options.num_iters_warmup, options.num_iters):
            run = driver.run(driver.workload(size, options.input_len, options.output_len))
            say(f"batch of {size}, {'warm-up' if number < 0 else f'run {number + 1}'}: {run.total:.3f} s")
            if number >= 0:
                runs.append(run)
        totals = [run.total for run in runs]
        self.report.add(
            {
                "kind": "batch",
                "batch_size": size,
                "seconds": totals,
                "output_tokens_per_s": size * options.output_len / min(totals),
                "latency_ms": self._summary([totals]),
                "ttft_ms": self._summary([run.first for run in runs]),
                "itl_ms": self._summary([run.gaps for run in runs]),
                "step_ms": self._summary([run.steps for run in runs]),
            }
        )

    def _summary(self, runs: Sequence[Sequence[float]]) -> dict[str, float]:
        return summary([value for run in runs for value in run], self._percentiles)

    def tables(self) -> list[list[Row]]:
        """One of batches, in milliseconds, and one of the parts of steps, in microseconds; without those not run."""
        batches: list[Row] = []
        hosts: list[Row] = []
        for result in self.report.results:
            if result["kind"] == "batch":
                size = {"batch": result["batch_size"]}
                batches += [{**size, "ms": name, **result[f"{name}_ms"]} for name in ("latency", "ttft", "itl", "step")]
            else:
                size = {"sequences": result["sequences"]}
                hosts += [{**size, "µs": name, **result[f"{name}_us"]} for name in ("step", *PARTS)]
        return [rows for rows in (batches, hosts) if rows]


def run(engine_args: EngineArgs, options: LatencyOptions) -> None:
    """Run what the options ask for and print the tables, also if something failed."""
    latency = Latency(engine_args, options)
    try:
        latency.run()
    finally:
        for rows in latency.tables():
            show(table(rows) + "\n")
        show(latency.report.footer())
