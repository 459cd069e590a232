"""`pyvllm bench latency`, from a checkout: `python benches/latency.py --model llama3-8b --host-time 1,64,256,1024`."""

import sys

from pyvllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "latency", *sys.argv[1:]]))
