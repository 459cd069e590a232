"""`pyvllm bench throughput`, from a checkout: `python benches/throughput.py --model llama3-8b --workloads all`."""

import sys

from pyvllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
