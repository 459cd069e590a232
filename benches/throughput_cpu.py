"""Tokens per second of SmolLM2-135M beside transformers' `generate`, in turns: `pyvllm bench throughput` with settings.

Both hold the same dense weights, dequantised from one GGUF file, and get the same prompts of random token ids, greedy,
all requests in one batch of equal lengths, which is the best case for transformers. Further flags go after these.
"""

import sys

from pyvllm.cli import main

_SETTINGS = (
    *("--model", "smollm2-135m", "--engines", "pyvllm,transformers", "--take-turns", "--dtype", "bfloat16"),
    *("--num-prompts", "1,32", "--input-len", "128", "--output-len", "128", "--repeats", "3", "--max-model-len", "1k"),
)

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *_SETTINGS, *sys.argv[1:]]))
