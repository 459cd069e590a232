"""From the start of a process to the first token, with caches of compiled kernels empty and full."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from pyvllm.bench.models import bench_args
from pyvllm.bench.options import StartupOptions
from pyvllm.bench.report import Report, Row, say, show, table
from pyvllm.config import EngineArgs

_CACHES: Final = (
    *("PYVLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR"),
    *("VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME"),
)
"""Environment variables that say where compiled code is kept."""


class Startup:
    """Starts processes one after another and collects their times."""

    def __init__(self, args: EngineArgs, options: StartupOptions) -> None:
        """`args`: of the model."""
        self._args, self._options = args, options
        settings = {"engine_args": args, **dataclasses.asdict(options)}
        self.report = Report("startup", settings, Path(options.json) if options.json else None)

    def run(self) -> None:
        """One start with empty caches, then those with full ones, of each engine.

        Raises `RuntimeError` if a process fails; its own error is on stderr then.
        """
        from pyvllm.hub import find_model

        with bench_args(self._args) as args:
            files = find_model(args)
            # Found now, so that a download is not timed and no cache that holds models is emptied.
            args = dataclasses.replace(args, model=str(files.path))
            vocab_size = int((files.config | (args.hf_overrides or {}))["vocab_size"])
            for engine in self._options.engine_names:
                with tempfile.TemporaryDirectory(prefix="pyvllm-bench-") as caches:
                    for number in range(1 + self._options.warm_runs):
                        kind = "warm" if number else "cold"
                        result = _start(engine, args, vocab_size, Path(caches))
                        say(f"{engine}, {kind} caches: first token after {result['first_token_s']:.2f} s")
                        self.report.add({"engine": engine, "caches": kind, **result})

    def rows(self) -> list[Row]:
        """The table: a line for each start, in seconds."""
        names = {"import_s": "import", "load_s": "load", "generate_s": "generate", "first_token_s": "first token s"}
        kinds = ("engine", "caches")
        return [
            {name: result[name] for name in kinds} | {title: result[name] for name, title in names.items()}
            for result in self.report.results
        ]


def _start(engine: str, args: EngineArgs, vocab_size: int, caches: Path) -> dict[str, float]:
    """Seconds of the parts of one start. `caches`: a folder for all that is compiled."""
    environment = os.environ | {name: str(caches / name.lower()) for name in _CACHES}
    asked: dict[str, Any] = {"engine": engine, "args": dataclasses.asdict(args), "vocab_size": vocab_size}
    begin = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-m", "pyvllm.bench.first_token"],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{engine}: the process ended with status {process.returncode}; what it said is above")
    times: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return {
        "import_s": times["imported"] - begin,
        "load_s": times["loaded"] - times["imported"],
        "generate_s": times["first_token"] - times["loaded"],
        "first_token_s": times["first_token"] - begin,
    }


def run(engine_args: EngineArgs, options: StartupOptions) -> None:
    """Run what the options ask for and print the table, also if something failed."""
    startup = Startup(engine_args, options)
    try:
        startup.run()
    finally:
        if startup.report.results:
            show(table(startup.rows()))
            show(f"\n{startup.report.footer()}")
