"""The flags of `pyvllm serve`, and what it does with them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pyvllm.config import EngineArgs
from pyvllm.server.config import ServerArgs

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from pyvllm.server.serving import Serving

SUMMARY: Final = "Serve a model over HTTP, as OpenAI's API does."


def add_flags(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """Flags of the server and the engine. `positional`: the model may be the first argument too."""
    if positional:
        parser.add_argument("model_name", metavar="MODEL", nargs="?", help="what to serve, see --model")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags, as in: port: 8000; flags given win")
    ServerArgs.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)


def parsed_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[EngineArgs, ServerArgs]:
    """What a command line, parsed by `parser`, says. Raises ValueError naming what is wrong."""
    name = getattr(args, "model_name", None)
    if name is not None:
        if getattr(args, "model", name) != name:
            raise ValueError(f"two models are given, {name!r} and {args.model!r}")
        args = argparse.Namespace(**(vars(args) | {"model": name}))
    if args.config is not None:
        from pyvllm.server.config_file import apply_config_file

        args = apply_config_file(parser, args, args.config)
    given: dict[str, Any] = dict(vars(args))
    if "model" not in given:
        raise ValueError("a model must be given, as in: pyvllm serve MODEL")
    # A server tells how it fares, unless it is told not to.
    given.setdefault("disable_log_stats", False)
    complete = argparse.Namespace(**given)
    return EngineArgs.from_cli_args(complete), ServerArgs.from_cli_args(complete)


def run(
    parser: argparse.ArgumentParser, args: argparse.Namespace, make_app: Callable[[Serving], ASGIApp] | None = None
) -> int:
    """Serve until told to stop; the exit status. `make_app`: another application than the OpenAI-compatible one."""
    from pyvllm.logging import configure_logging

    engine_args, server_args = parsed_args(parser, args)
    configure_logging()
    if engine_args.logits_processors or server_args.middleware:
        # A program that is installed does not look for modules here. Last, so that nothing is taken for another module.
        sys.path.append(os.getcwd())
    from pyvllm.server.app import build_app
    from pyvllm.server.life_cycle import serve

    return serve(engine_args, server_args, make_app or build_app)
