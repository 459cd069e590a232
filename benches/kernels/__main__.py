"""Each kernel against the hardware's limit, on one GPU: `python -m benches.kernels [--only glue,gemv] [--json FILE]`.

Runs `cases()` of the modules beside this one, each of which is also a program of its own, with more to choose.
"""

from __future__ import annotations

import argparse
import importlib
import traceback
from pathlib import Path
from typing import Final

import torch

from pyvllm.bench.report import Report, say, show, table

MODULES: Final = ("attention", "cuda_decode", "glue", "sampling", "gemv", "gated_linear")


def main() -> int:
    """Run what was asked for; the exit status is 1 if a module failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(MODULES)}")
    parser.add_argument("--json", type=Path, help="write versions and results into this file, anew after each module")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(MODULES)
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        parser.error(f"--only must be some of {', '.join(MODULES)}, got {unknown[0]!r}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU (torch.cuda.is_available() is False)")
    report = Report("kernels", {"modules": names}, args.json)
    failed = [name for name in names if not _run(name, report)]
    show(report.footer())
    return 1 if failed else 0


def _run(name: str, report: Report) -> bool:
    """Run one module's cases and print them; whether that worked."""
    say(f"{name} ...")
    try:
        rows = importlib.import_module(f"benches.kernels.{name}").cases()
    except Exception:
        say(traceback.format_exc())
        report.add({"module": name, "error": traceback.format_exc(limit=-1)})
        return False
    report.add({"module": name, "cases": rows})
    show(f"{name}\n\n{table(rows)}\n")
    return True


if __name__ == "__main__":
    raise SystemExit(main())
