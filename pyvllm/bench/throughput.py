"""Tokens per second of whole workloads, given to an engine all at once, on one or several engines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from pyvllm.bench.engines import ENGINES, BenchEngine, Sequences
from pyvllm.bench.models import bench_args
from pyvllm.bench.options import ThroughputOptions, parse_numbers
from pyvllm.bench.report import Report, Row, say, show, table
from pyvllm.bench.workloads import Workload, fixed_workload, ramp, random_workload
from pyvllm.config import EngineArgs

logger = logging.getLogger("pyvllm")

_RAMP_REQUESTS: Final = 1024

Maker: TypeAlias = Callable[[int], Workload]
"""Salt -> workload."""


class Throughput:
    """Runs workloads on engines and collects what they took."""

    def __init__(self, args: EngineArgs, options: ThroughputOptions) -> None:
        """`args`: of the model, the same for all engines but for the prefix cache, which the workload decides on."""
        self._args = args
        self._options = options
        self._start = time.perf_counter()
        settings = {"engine_args": args, **dataclasses.asdict(options)}
        self.report = Report("throughput", settings, Path(options.json) if options.json else None)
        self._tokens: dict[str, Sequences] = {}
        """What the first engine generated, by workload, in the first timed run."""
        self._equal: dict[tuple[str, str], float] = {}
        """Share of these tokens that another engine, the second of the key, generated too."""

    def run(self) -> None:
        """All engines on all workloads. Raises `RuntimeError` at the end if a run failed."""
        names = self._options.engine_names
        with bench_args(self._args) as args:
            self._vocab_size = _vocab_size(args)
            workloads = self._workloads()
            self._ideal = _ideal(args, self._options)
            for together in [names] if self._options.take_turns else [[name] for name in names]:
                # Those that share an engine follow one another, first those without prefix cache.
                for caching in (False, True):
                    makers = {name: make for name, make in workloads.items() if (name == "prefix") == caching}
                    if makers:
                        self._run_engines(together, dataclasses.replace(args, enable_prefix_caching=caching), makers)
        failed = [f"{row['workload']} on {row['engine']}" for row in self.report.results if "error" in row]
        if failed:
            raise RuntimeError(f"failed: {', '.join(failed)} (the errors are above)")

    def _workloads(self) -> dict[str, Maker]:
        """Those that were asked for, by name."""
        options, makers = self._options, dict[str, Maker]()
        for name in options.workload_names:
            if name != "random":
                makers[name] = functools.partial(fixed_workload, name, vocab_size=self._vocab_size)
                continue
            for count in parse_numbers("num_prompts", options.num_prompts):
                makers[f"random{count}"] = functools.partial(
                    random_workload,
                    num_prompts=count,
                    input_len=options.input_len,
                    output_len=options.output_len,
                    n=options.n,
                    seed=self._args.seed or 0,
                    vocab_size=self._vocab_size,
                )
        return makers

    def _run_engines(self, names: Sequence[str], args: EngineArgs, makers: Mapping[str, Maker]) -> None:
        """Load engines at once and run workloads on them."""
        with contextlib.ExitStack() as stack:
            engines: list[BenchEngine] = []
            for name in [] if self._time_is_up() else names:
                begin = time.perf_counter()
                engines.append(ENGINES[name](args))
                stack.callback(engines[-1].close)
                say(f"{name}: loaded in {time.perf_counter() - begin:.1f} s")
                self._warm_up(engines[-1], [make(0) for make in makers.values()])
            for workload, make in makers.items():
                if self._time_is_up():
                    for name in names:
                        say(f"{name}: {workload} is skipped, max_seconds have passed")
                        self.report.add({"workload": workload, "engine": name, "skipped": "max_seconds"})
                else:
                    self._run_workload(engines, workload, make)

    def _warm_up(self, engine: BenchEngine, works: Sequence[Workload]) -> None:
        """One run that meets all sizes of batch that will come."""
        sequences = min(_RAMP_REQUESTS, max(len(work.requests) * work.n for work in works))
        warm_up = ramp(sequences, max(work.longest for work in works), self._vocab_size)
        begin = time.perf_counter()
        engine.job(warm_up, self._options.temperature)()
        say(f"{engine.name}: warm-up took {time.perf_counter() - begin:.1f} s")

    def _run_workload(self, engines: Sequence[BenchEngine], name: str, make: Maker) -> None:
        """All runs of a workload. An engine that fails makes no further one."""
        seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        errors: dict[str, str] = {}
        for run in range(1 - self._options.warmup_runs, self._options.repeats + 1):
            longest = max((max(values, default=0.0) for values in seconds.values()), default=0.0)
            if run > 1 and self._time_is_up(longest * len(engines)):
                break
            for engine in engines:
                if engine.name in errors:
                    continue
                try:
                    took = self._time_run(engine, make(run + self._options.warmup_runs), run)
                except Exception as error:
                    errors[engine.name] = f"{type(error).__name__}: {error}"
                    say(f"{engine.name}: {name} failed: {errors[engine.name]}")
                    logger.debug("%s failed", name, exc_info=True)
                else:
                    if run > 0:
                        seconds[engine.name].append(took)
        for engine in engines:
            if engine.name in errors:
                self.report.add({"workload": name, "engine": engine.name, "error": errors[engine.name]})
            else:
                self.report.add(self._result(make(0), engine.name, seconds[engine.name]))

    def _time_run(self, engine: BenchEngine, work: Workload, run: int) -> float:
        """Seconds of one run. Numbers below 1 are warm-ups."""
        job = engine.job(work, self._options.temperature)
        begin = time.perf_counter()
        made = job()
        took = time.perf_counter() - begin
        _check_counts(work, made)
        label = f"run {run}" if run > 0 else "warm-up"
        say(f"{engine.name}: {work.name} {label}: {took:.2f} s, {work.output_tokens / took:,.0f} output tok/s")
        if run == 1 and engine.name == self._options.engine_names[0]:
            self._tokens[work.name] = made
        elif run == 1 and self._args.load_format != "dummy" and work.name in self._tokens:
            self._equal[work.name, engine.name] = _equal_share(self._tokens[work.name], made)
        return took

    def _result(self, work: Workload, engine: str, seconds: list[float]) -> dict[str, Any]:
        best = min(seconds)
        ideal = self._ideal(work) if self._ideal is not None else None
        return {
            "workload": work.name,
            "engine": engine,
            "requests": len(work.requests),
            "n": work.n,
            "input_tokens": work.input_tokens,
            "output_tokens": work.output_tokens,
            "seconds": seconds,
            "output_tokens_per_s": work.output_tokens / best,
            "input_tokens_per_s": work.input_tokens / best,
            "requests_per_s": len(work.requests) / best,
            "ideal_seconds": ideal,
            "share_of_limit": ideal / best if ideal is not None else None,
            "equal_tokens": self._equal.get((work.name, engine)),
        }

    def _time_is_up(self, needed: float = 0.0) -> bool:
        limit = self._options.max_seconds
        return limit is not None and time.perf_counter() - self._start + needed > limit

    def rows(self) -> list[Row]:
        """The table: a line for each workload on each engine."""
        results = self.report.results
        peers = [name for name in self._options.engine_names if name != "pyvllm"]
        rates = {(row["workload"], row["engine"]): row.get("output_tokens_per_s") for row in results}
        rows: list[Row] = []
        for result in results:
            row: dict[str, Any] = {
                "workload": result["workload"],
                "engine": result["engine"],
                "seconds": min(result["seconds"]) if "seconds" in result else result.get("skipped", "failed"),
                "output tok/s": result.get("output_tokens_per_s"),
                "input tok/s": result.get("input_tokens_per_s"),
            }
            if self._options.tflops is not None:
                share = result.get("share_of_limit")
                row["% of limit"] = 100 * share if share is not None else None
            for peer in peers:
                ours, theirs = row["output tok/s"], rates.get((result["workload"], peer))
                known = ours and theirs and result["engine"] == "pyvllm"
                row[f"ratio to {peer}"] = ours / theirs if known else None
            if self._equal:
                row["equal tokens"] = result.get("equal_tokens")
            rows.append(row)
        return rows


def run(engine_args: EngineArgs, options: ThroughputOptions) -> None:
    """Run what the options ask for and print the table, also if something failed."""
    throughput = Throughput(engine_args, options)
    try:
        throughput.run()
    finally:
        if throughput.report.results:
            show(table(throughput.rows()))
            show(f"\n{throughput.report.footer()}")


def _vocab_size(args: EngineArgs) -> int:
    from pyvllm.hub import find_model

    return int((find_model(args).config | (args.hf_overrides or {}))["vocab_size"])


def _ideal(args: EngineArgs, options: ThroughputOptions) -> Callable[[Workload], float] | None:
    """Least seconds of a workload; None if the hardware's speeds are not given or the formulas do not fit the model."""
    if options.bandwidth_tb_s is None or options.tflops is None:
        return None
    from pyvllm.bench.roofline import Hardware, ideal_seconds, model_cost, step_limits
    from pyvllm.hub import find_model
    from pyvllm.loading import choose_device, resolve_dtype
    from pyvllm.models import build_spec

    files, device = find_model(args), choose_device(args)
    config = files.config | (args.hf_overrides or {})
    cost = model_cost(build_spec(config), resolve_dtype(args, config, files, device))
    if cost is None:
        say("no limit of the hardware is known for models with experts or sliding windows")
        return None
    hardware = Hardware(bandwidth=options.bandwidth_tb_s * 1e12, flops=options.tflops * 1e12)
    return functools.partial(ideal_seconds, cost, hardware, step_limits(args, cost, device))


def _check_counts(work: Workload, made: Sequences) -> None:
    """Raise `RuntimeError` unless each sequence has the length that the workload says."""
    wanted = [request.output_len for request in work.requests for _ in range(work.n)]
    lengths = [len(ids) for ids in made]
    if lengths != wanted:
        wrong = sum(a != b for a, b in zip(lengths, wanted, strict=False)) + abs(len(lengths) - len(wanted))
        raise RuntimeError(
            f"{wrong} of {len(wanted)} sequences of {work.name} have another length than asked for; its longest "
            f"request has {work.longest} tokens (see --max-model-len)"
        )


def _equal_share(first: Sequences, second: Sequences) -> float:
    """Share of tokens that agree, position by position, in sequences of equal lengths."""
    pairs = [pair for one, other in zip(first, second, strict=True) for pair in zip(one, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)
