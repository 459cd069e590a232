"""The OpenAI-compatible server under vLLM's old module path; `pyvllm serve` is the same."""

from __future__ import annotations

import sys

from pyvllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
