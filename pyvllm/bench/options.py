"""What users may ask of the benchmarks: dataclasses whose docstrings are the command line's help.

All raise `ValueError` naming the field, its value and the allowed range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from pyvllm.bench.engines import check_engines
from pyvllm.bench.workloads import FIXED_WORKLOADS

ENDPOINTS: Final = ("/v1/completions", "/v1/chat/completions")
SERVE_DATASETS: Final = ("random", *(name for name in FIXED_WORKLOADS if name != "sharegpt_n4"))
PLOT_ENDS: Final = (".png", ".svg", ".pdf")
METRICS: Final = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """What to run."""

    workloads: str = "random"
    """Comma-separated: nano, sharegpt, sharegpt_n4, decode1, isl1024osl512, prefill4k, prefix; all: these; random:
    --num-prompts of --input-len and --output-len tokens."""

    engines: str = "pyvllm"
    """Comma-separated: pyvllm, vllm, transformers (batches of 32). One runs after the other has ended."""

    take_turns: bool = False
    """Load all engines at once and let them take turns, run by run, so that what else the machine does hits all alike.
    Needs the memory of all of them."""

    num_prompts: str = "32"
    """Requests of the random workload; comma-separated: several such workloads."""

    input_len: int = 128
    """Tokens of each prompt of the random workload."""

    output_len: int = 128
    """Tokens to generate for each prompt of the random workload."""

    n: int = 1
    """Sequences of each request of the random workload."""

    temperature: float = 0.0
    """0: greedy."""

    repeats: int = 2
    """Timed runs of each workload, each with other tokens; the best counts."""

    warmup_runs: int = 0
    """Runs of each workload that are not timed. One run of short requests, which meets all sizes of batch, always comes
    first."""

    max_seconds: float | None = None
    """Start no workload, and no repeat that is likely to end later, once this much time has passed since the start."""

    json: str | None = None
    """Write settings, versions and results into this file, anew after each workload."""

    bandwidth_tb_s: float | None = None
    """Memory bandwidth of the device in TB/s; with --tflops: also print the share of the hardware's limit."""

    tflops: float | None = None
    """Arithmetic speed of the device in TFLOP/s."""

    def __post_init__(self) -> None:
        for name in self.workload_names:
            if name != "random" and name not in FIXED_WORKLOADS:
                raise ValueError(
                    f"workloads must be some of {', '.join(FIXED_WORKLOADS)}, random, or all, got {name!r}"
                )
        check_engines(self.engine_names)
        parse_numbers("num_prompts", self.num_prompts)
        check_at_least(self, input_len=1, output_len=1, n=1, temperature=0, repeats=1, warmup_runs=0)
        check_above_0(self, "max_seconds", "bandwidth_tb_s", "tflops")
        if (self.bandwidth_tb_s is None) != (self.tflops is None):
            raise ValueError("bandwidth_tb_s and tflops must be given both or neither")

    @property
    def workload_names(self) -> list[str]:
        """In the order given."""
        names = comma_separated(self.workloads)
        return list(dict.fromkeys(one for name in names for one in (FIXED_WORKLOADS if name == "all" else (name,))))

    @property
    def engine_names(self) -> list[str]:
        """In the order given."""
        return comma_separated(self.engines)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """What to run."""

    batch_size: str = "1,8,32"
    """Comma-separated numbers of requests that start together."""

    input_len: int = 32
    """Tokens of each prompt."""

    output_len: int = 128
    """Tokens to generate for each prompt."""

    temperature: float = 0.0
    """0: greedy."""

    num_iters_warmup: int = 1
    """Runs of each batch that do not count."""

    num_iters: int = 3
    """Runs of each batch that count, each with other tokens."""

    percentiles: str = "50,90,99"
    """Comma-separated, of the times to the first token, between tokens and of steps."""

    host_time: str | None = None
    """Comma-separated numbers of sequences, such as 1,64,256,1024: for each also time schedule, launch, wait and commit
    of decode steps of that many."""

    host_steps: int = 200
    """Steps that --host-time measures."""

    json: str | None = None
    """Write settings, versions and results into this file, anew after each measurement."""

    def __post_init__(self) -> None:
        check_at_least(self, input_len=1, output_len=1, temperature=0, num_iters_warmup=0, num_iters=1, host_steps=1)
        parse_percentiles("percentiles", self.percentiles)
        parse_numbers("batch_size", self.batch_size)
        parse_numbers("host_time", self.host_time)


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    """What to start."""

    engines: str = "pyvllm"
    """Comma-separated: pyvllm, vllm, transformers."""

    warm_runs: int = 1
    """Starts with full caches of compiled kernels, after one with empty ones. What the system keeps of files in memory
    stays there."""

    json: str | None = None
    """Write settings, versions and results into this file, anew after each start."""

    def __post_init__(self) -> None:
        check_engines(self.engine_names)
        check_at_least(self, warm_runs=0)

    @property
    def engine_names(self) -> list[str]:
        """In the order given."""
        return comma_separated(self.engines)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to send to a running server."""

    base_url: str | None = None
    """Where the server is, as in https://host:8000. None: at --host and --port."""

    host: str = "127.0.0.1"
    """Name or address of the server."""

    port: int = 8000
    """Port of the server."""

    endpoint: str = "/v1/completions"
    """What to call: /v1/completions or /v1/chat/completions."""

    model: str | None = None
    """Name that requests give. None: the first that the server lists."""

    dataset_name: str = "random"
    """random, or nano, sharegpt, decode1, isl1024osl512, prefill4k, prefix: workloads of bench throughput."""

    num_prompts: int | None = None
    """Requests to send. None: 1000, or all of the workload."""

    random_input_len: int = 1024
    """Tokens of a random prompt."""

    random_output_len: int = 128
    """Tokens to generate for a random prompt."""

    random_range_ratio: float = 0.0
    """Random lengths are spread evenly from (1 - this) to (1 + this) times the length; 0 to less than 1."""

    vocab_size: int = 32_000
    """Token ids of prompts are below this, which the model's vocabulary must have."""

    request_rate: float = math.inf
    """Requests that arrive in a second. inf: all at once."""

    burstiness: float = 1.0
    """How arrivals are spread. 1: at random (Poisson); above: more evenly; inf: evenly; below: in bursts."""

    max_concurrency: int | None = None
    """Most requests that are open at once; others wait, and are timed once they are sent."""

    num_warmups: int = 1
    """Requests that are sent before all others, one after another, and do not count."""

    temperature: float = 0.0
    """0: greedy."""

    ignore_eos: bool = True
    """Ask the server to generate as many tokens as the dataset says, which not all servers can."""

    seed: int = 0
    """Of lengths and arrivals. Tokens are new in each run, so that no cache of the server has them."""

    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Comma-separated: ttft, time to the first token; tpot, time per further token of a request; itl, time between two
    pieces of text; e2el, time to the last token."""

    metric_percentiles: str = "50,90,99"
    """Comma-separated percentiles of these."""

    goodput: list[str] | None = None
    """Also count the requests a second that keep all of these limits in milliseconds: ttft:200 tpot:50 e2el:3000."""

    json: str | None = None
    """Write settings, versions, results and all times of each request into this file."""

    plot: str | None = None
    """Draw distributions and the course of time into this file (.png, .svg or .pdf)."""

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint must be one of {', '.join(ENDPOINTS)}, got {self.endpoint!r}")
        if self.dataset_name not in SERVE_DATASETS:
            raise ValueError(f"dataset_name must be one of {', '.join(SERVE_DATASETS)}, got {self.dataset_name!r}")
        check_at_least(self, random_input_len=1, random_output_len=1, vocab_size=2, num_warmups=0, temperature=0)
        check_above_0(self, "num_prompts", "request_rate", "burstiness", "max_concurrency")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio must be at least 0 and below 1, got {self.random_range_ratio}")
        if self.plot is not None and not self.plot.endswith(PLOT_ENDS):
            raise ValueError(f"plot must end with {' or '.join(PLOT_ENDS)}, got {self.plot!r}")
        parse_percentiles("metric_percentiles", self.metric_percentiles)
        for name in self.metric_names:
            if name not in METRICS:
                raise ValueError(f"percentile_metrics must be some of {', '.join(METRICS)}, got {name!r}")
        _ = self.goodput_ms

    @property
    def url(self) -> str:
        """Where the server is, without a slash at the end."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def metric_names(self) -> list[str]:
        """Those whose percentiles are reported."""
        return comma_separated(self.percentile_metrics)

    @property
    def goodput_ms(self) -> dict[str, float]:
        """Metric -> most milliseconds of a good request."""
        limits = {}
        for item in self.goodput or []:
            name, _, value = item.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = math.nan
            if name not in METRICS or name == "itl" or not limits[name] > 0:
                raise ValueError(f"goodput must be ttft, tpot or e2el with milliseconds, as in ttft:200, got {item!r}")
        return limits


def comma_separated(text: str) -> list[str]:
    """The parts, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def check_at_least(options: object, **lowest: float) -> None:
    """Raise `ValueError` naming the field that is below its lowest value."""
    for name, low in lowest.items():
        value: Any = getattr(options, name)
        if not value >= low:
            raise ValueError(f"{name} must be at least {low}, got {value!r}")


def check_above_0(options: object, *names: str) -> None:
    """Raise `ValueError` naming the field that is 0, negative or no number. None is right."""
    for name in names:
        value: Any = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, got {value!r}")


def parse_numbers(name: str, text: str | None) -> list[int]:
    """Comma-separated numbers of at least 1; [] for None. Raises `ValueError` naming the field."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"{name} must be comma-separated numbers of at least 1, got {text!r}")
    return [int(part) for part in parts]


def parse_percentiles(name: str, text: str) -> list[float]:
    """Comma-separated numbers from 0 to 100. Raises `ValueError` naming the field."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        raise ValueError(f"{name} must be comma-separated numbers from 0 to 100, got {text!r}")
    return values
