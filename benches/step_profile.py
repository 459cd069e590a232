"""Where the device's time goes in a step of the running engine: each kernel's share, and what lies between kernels.

`python benches/step_profile.py llama3-8b --sequences 64,256 [--input-len 512] [--prompts] [--json FILE]`

Decode steps as `LLM.generate` runs them, graphs and run-ahead included, under torch's profiler; with `--prompts` the
steps that compute the prompts instead. Profiling makes the gaps between kernels longer. A kernel that begins before the
one before it has ended waits for it, and that counts as its time: shares of such kernels add up to more than 100 %.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pyvllm.bench.latency import Driver
from pyvllm.bench.options import check_at_least, parse_numbers
from pyvllm.bench.report import Report, Row, say, show, table
from pyvllm.config import EngineArgs

_WARM_UP: Final = 12
_PROFILER_WARM_UP: Final = 2
"""Its own start takes tenths of a second."""
_STEPS: Final = 6
_NAME_LEN: Final = 72


def profile_steps(driver: Driver, size: int, input_len: int, *, prompts: bool) -> list[dict[str, Any]]:
    """A row for each kernel, the longest first, times in µs a step; the first row is all of the step."""
    engine = driver.engine
    driver.run(driver.workload(size, input_len, 2))  # memory of the largest steps is taken, all is compiled
    ids = driver.add(driver.workload(size, input_len, engine.info.max_model_len - input_len), final_only=True)
    try:
        if not prompts:
            while engine.stats().num_waiting:
                engine.step()
            for _ in range(_WARM_UP):
                engine.step()
        torch.cuda.synchronize()
        phases = schedule(wait=0, warmup=_PROFILER_WARM_UP, active=_STEPS, repeat=1)
        steps = -_PROFILER_WARM_UP
        with profile(activities=[ProfilerActivity.CUDA], schedule=phases) as profiler:
            while steps < _STEPS and (not prompts or engine.stats().num_waiting):
                engine.step()
                if steps == -1:
                    torch.cuda.synchronize()  # kernels launched by now do not count
                profiler.step()
                steps += 1
            torch.cuda.synchronize()
        if steps < 1:
            raise ValueError(f"{size} prompts of {input_len} tokens are done after {steps + _PROFILER_WARM_UP} steps")
    finally:
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_unfinished():
            engine.step()
    return _rows(profiler.events(), steps)


def _rows(events: Iterable[Any], steps: int) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in events:
        if event.device_type.name == "CUDA":
            times[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    if not spans:
        raise ValueError("the profiler saw no kernel")
    busy, reach = 0.0, 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    whole = reach - min(begin for begin, _ in spans)

    def row(kernel: str, launches: int, us: float) -> dict[str, Any]:
        return {"kernel": kernel, "launches": launches / steps, "us": us / steps, "share": us / whole}

    longest = sorted(times.items(), key=lambda item: -sum(item[1]))
    rows = [row("all", len(spans), whole), row("(no kernel runs)", 0, whole - busy)]
    return rows + [row(name, len(each), sum(each)) for name, each in longest]


def _shown(rows: list[dict[str, Any]], top: int) -> list[Row]:
    return [
        {
            "µs a step": f"{row['us']:.1f}",
            "share": f"{row['share']:.1%}",
            "launches": f"{row['launches']:.1f}",
            "µs each": f"{row['us'] / row['launches']:.1f}" if row["launches"] else "",
            "kernel": row["kernel"][:_NAME_LEN],
        }
        for row in rows[:top]
    ]


def main() -> None:
    """Profile each number of sequences and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", default="256", help="comma-separated")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--prompts", action="store_true", help="the steps that compute the prompts")
    parser.add_argument("--top", type=int, default=24, help="kernels to show")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        sizes = parse_numbers("sequences", args.sequences)
        check_at_least(args, input_len=1, top=1)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("there is no GPU (torch.cuda.is_available() is False)")
    report = Report("step_profile", vars(args), args.json)
    driver = Driver(EngineArgs(model=args.model, max_num_seqs=max(*sizes, 1024)), 0.0)
    for size in sizes:
        say(f"{size} sequences")
        rows = profile_steps(driver, size, args.input_len, prompts=args.prompts)
        report.add({"sequences": size, "kernels": rows})
        show(f"{args.model}, {size} sequences\n\n{table(_shown(rows, args.top))}\n")
    show(report.footer())


if __name__ == "__main__":
    main()
