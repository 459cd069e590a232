"""`pyvllm bench`: its commands and their flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from pyvllm.arguments import add_field_arguments, field_docs
from pyvllm.bench.models import BENCH_MODELS
from pyvllm.bench.options import LatencyOptions, ServeOptions, StartupOptions, ThroughputOptions
from pyvllm.config import EngineArgs

_Options = TypeVar("_Options")


def add_bench_command(commands: Any) -> None:
    """Add `bench` to the commands of `pyvllm`."""
    summary = "Measure speed: throughput, latency, startup, and load on a server."
    bench = commands.add_parser("bench", help=summary, description=summary, allow_abbrev=False)
    benchmarks = bench.add_subparsers(required=True, metavar="BENCHMARK")
    _add(benchmarks, "throughput", "Tokens per second of whole workloads.", ThroughputOptions, _throughput)
    latency = "How long batches take, to the first token and between tokens; where the host's time goes in a step."
    _add(benchmarks, "latency", latency, LatencyOptions, _latency)
    _add(benchmarks, "startup", "From the start of a process to the first token.", StartupOptions, _startup)
    _add_serve(benchmarks)


def _throughput(args: EngineArgs, options: ThroughputOptions) -> None:
    from pyvllm.bench.throughput import run

    run(args, options)


def _latency(args: EngineArgs, options: LatencyOptions) -> None:
    from pyvllm.bench.latency import run

    run(args, options)


def _startup(args: EngineArgs, options: StartupOptions) -> None:
    from pyvllm.bench.startup import run

    run(args, options)


def _add(
    benchmarks: Any, name: str, summary: str, options: type[_Options], run: Callable[[EngineArgs, _Options], None]
) -> None:
    """A benchmark that loads a model itself, with its own flags and those of the engine."""
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        name,
        help=summary,
        description=f"{summary} MODEL may also be {' or '.join(BENCH_MODELS)}: that model with random weights.",
        usage=f"pyvllm bench {name} MODEL [options]",
        allow_abbrev=False,
    )
    parser.add_argument("model_name", metavar="MODEL", nargs="?", help="what to run, see --model")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    _add_fields(parser.add_argument_group(name), options)
    EngineArgs.add_cli_args(parser)

    def start(args: argparse.Namespace) -> None:
        from pyvllm.logging import configure_logging

        chosen = _options_of(options, args)
        if args.model_name is not None:
            if hasattr(args, "model"):
                raise ValueError(f"two models are given, {args.model_name!r} and {args.model!r}")
            args.model = args.model_name
        if not hasattr(args, "model"):
            raise ValueError(f"a model must be given, as in: pyvllm bench {name} MODEL")
        configure_logging()
        run(EngineArgs.from_cli_args(args), chosen)

    parser.set_defaults(run=start)


def _add_serve(benchmarks: Any) -> None:
    """The benchmark of a server that runs already."""
    summary = "Load on a running server: rates, and how long its answers take."
    parser = benchmarks.add_parser("serve", help=summary, description=summary, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    # Several values after one flag, as vLLM has it.
    text = field_docs(ServeOptions)["goodput"]
    parser.add_argument("--goodput", nargs="+", default=argparse.SUPPRESS, metavar="METRIC:MS", help=text)
    _add_fields(parser, ServeOptions, skip=("goodput",))

    def start(args: argparse.Namespace) -> None:
        from pyvllm.bench.serve import run

        run(_options_of(ServeOptions, args))

    parser.set_defaults(run=start)


def _add_fields(parser: Any, options: type, skip: Collection[str] = ()) -> None:
    """The flags of a dataclass of options."""
    add_field_arguments(parser, options, skip)
    parser.add_argument("--output-json", dest="json", default=argparse.SUPPRESS, metavar="VALUE", help="as --json")


def _options_of(cls: type[_Options], args: argparse.Namespace) -> _Options:
    """The options from those flags that are their fields and were given."""
    names = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in vars(args).items() if name in names})
