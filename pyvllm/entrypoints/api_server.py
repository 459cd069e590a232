"""The demo server: `python -m pyvllm.entrypoints.api_server --model MODEL` serves POST /generate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from pyvllm.server import command

PROGRAM = "python -m pyvllm.entrypoints.api_server"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server. The exit status is that of `pyvllm serve`."""
    from pyvllm.cli import run_command

    parser = argparse.ArgumentParser(prog=PROGRAM, description="Serve a model at POST /generate.", allow_abbrev=False)
    command.add_flags(parser, positional=False)
    parser.add_argument(
        "--stream-delimiter",
        choices=("newline", "nul"),
        default="newline",
        help="what ends each object of a stream; nul as in the oldest releases of vLLM [default: newline]",
    )
    args = parser.parse_args(argv)
    return run_command(partial(_serve, parser), args)


def _serve(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from pyvllm.server.demo import build_demo_app

    return command.run(parser, args, partial(build_demo_app, delimiter=args.stream_delimiter))


if __name__ == "__main__":
    sys.exit(main())
