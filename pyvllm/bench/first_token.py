"""The process that `pyvllm bench startup` times: it loads a model, generates one token and says when.

It reads {"engine": name, "args": fields of EngineArgs} from stdin and writes times of the monotonic clock, which all
processes share, to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pyvllm.bench.engines import ENGINES
from pyvllm.bench.workloads import random_workload
from pyvllm.config import EngineArgs


def measure(engine_name: str, args: EngineArgs, vocab_size: int) -> dict[str, float]:
    """Seconds on the monotonic clock when the libraries were imported, the model loaded, the token there."""
    import torch  # noqa: F401  # the largest part of all imports

    imported = time.monotonic()
    engine = ENGINES[engine_name](args)
    loaded = time.monotonic()
    work = random_workload(0, num_prompts=1, input_len=16, output_len=1, n=1, seed=0, vocab_size=vocab_size)
    engine.job(work, temperature=0.0)()
    first_token = time.monotonic()
    engine.close()
    return {"imported": imported, "loaded": loaded, "first_token": first_token}


if __name__ == "__main__":
    asked: dict[str, Any] = json.load(sys.stdin)
    try:
        times = measure(asked["engine"], EngineArgs(**asked["args"]), asked["vocab_size"])
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write(json.dumps(times) + "\n")
