"""`pyvllm generate`, `pyvllm chat` and `pyvllm serve`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pyvllm.arguments import add_field_arguments
from pyvllm.bench.cli import add_bench_command
from pyvllm.config import EngineArgs
from pyvllm.sampling_params import RequestOutputKind, SamplingParams
from pyvllm.server import command

if TYPE_CHECKING:
    from pyvllm.llm import LLM, Message

EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
GENERATE_MAX_TOKENS = 256
# Fields of SamplingParams without a flag: one seed is enough, the engine's, and what is printed is the text alone.
_HIDDEN = (
    *("max_tokens", "seed", "output_kind", "detokenize", "logprobs", "prompt_logprobs"),
    *("logits_processors", "guided_decoding"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 0, 2 for bad input, 130 for Ctrl-C, 1 for other failures."""
    args = _parser().parse_args(argv)
    return run_command(args.run, args)


def run_command(run: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> int:
    """Run a command; the exit status as `main` gives it. What goes wrong is told in one line on stderr."""
    if sys.stdout is None:
        print("pyvllm: error: standard output is closed", file=sys.stderr)
        return EXIT_ERROR
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # Text of a model may not fit the terminal's encoding.
    try:
        return run(args) or 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except Exception as error:
        if args.debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"pyvllm: error: {text}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ValueError | OSError) else EXIT_ERROR


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    from pyvllm import __version__

    parser = _Parser(prog="pyvllm", description="Run large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pyvllm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = _add_command(commands, "generate", "Complete prompts.", _generate, GENERATE_MAX_TOKENS)
    source = generate.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    source.add_argument("-f", "--file", type=Path, help="a file with one prompt a line; without either: stdin is one")
    chat = _add_command(commands, "chat", "Talk with a model.", _chat, None)
    chat.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer, and leave")
    chat.add_argument("--system-prompt", metavar="TEXT", help="how the model is to behave")
    serve = commands.add_parser(
        "serve",
        help=command.SUMMARY,
        description=command.SUMMARY,
        usage="pyvllm serve MODEL [options]",
        allow_abbrev=False,
    )
    command.add_flags(serve)
    serve.set_defaults(run=partial(command.run, serve))
    add_bench_command(commands)
    return parser


def _add_command(
    commands: Any, name: str, summary: str, run: Callable[[argparse.Namespace], None], max_tokens: int | None
) -> argparse.ArgumentParser:
    """A command that runs a model, with the flags of the engine and of sampling."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, usage=f"pyvllm {name} MODEL [options]", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.add_argument("model_name", metavar="MODEL", nargs="?", help="what to run, see --model")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    EngineArgs.add_cli_args(parser)
    group = parser.add_argument_group("sampling (what is not given comes from the model's generation_config.json)")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        help=f"most tokens to generate [default: {max_tokens or 'what the context has room for'}]",
    )
    add_field_arguments(group, SamplingParams, skip=_HIDDEN)
    return parser


@contextlib.contextmanager
def _open_llm(args: argparse.Namespace) -> Iterator[tuple[LLM, SamplingParams]]:
    """The model, and how to sample from it: its own defaults, over which go the flags that were given."""
    from pyvllm.logging import configure_logging

    names = {item.name for item in dataclasses.fields(SamplingParams)} - {"seed"}
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
    if "logits_processors" in given:  # of the engine, name -> function: who names functions here wants them used
        given["logits_processors"] = list(given["logits_processors"])
    SamplingParams(**given)  # Bad flags are found before the model is loaded.
    if args.model_name is not None:
        if hasattr(args, "model"):
            raise ValueError(f"two models are given, {args.model_name!r} and {args.model!r}")
        args.model = args.model_name
    if not hasattr(args, "model"):
        raise ValueError("a model must be given, as in: pyvllm generate MODEL -p TEXT")
    engine_args = EngineArgs.from_cli_args(args)
    configure_logging("WARNING")
    from pyvllm.llm import LLM

    with LLM.from_engine_args(engine_args) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), **given)
        ranked = params.best_of is not None and params.best_of > params.n
        params.output_kind = RequestOutputKind.FINAL_ONLY if ranked else RequestOutputKind.DELTA
        yield llm, params


def _generate(args: argparse.Namespace) -> None:
    prompts = _prompts(args)
    with _open_llm(args) as (llm, params):
        printer = _OrderedPrinter(prompts, params.n)
        for output in llm.stream(prompts, params):
            # The model is new, so its first request is number 0.
            prompt = int(output.request_id)
            for completion in output.outputs:
                printer.add(prompt, completion.index, completion.text, ended=completion.finished())


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        return list(args.prompt)
    if args.file:
        try:
            lines = args.file.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.file} is not UTF-8: {error}") from error
        prompts = [line for line in lines if line]
        if not prompts:
            raise ValueError(f"{args.file} holds no prompt")
        return prompts
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("a prompt must be given: -p TEXT, -f FILE, or on stdin")
    # `echo` ends what it writes with a line break that nobody means.
    return [sys.stdin.read().removesuffix("\n")]


class _OrderedPrinter:
    """Prints texts that grow side by side one after the other, each as soon as it is its turn."""

    def __init__(self, prompts: Sequence[str], n: int) -> None:
        """`n`: texts for each prompt. A lone text is printed without a heading."""
        self._waiting = [""] * (len(prompts) * n)
        self._ended = [False] * len(self._waiting)
        self._prompts, self._n = prompts, n
        self._now = 0
        self._write(self._heading())

    def add(self, prompt: int, index: int, text: str, *, ended: bool) -> None:
        """More of text `index` of a prompt."""
        place = prompt * self._n + index
        self._waiting[place] += text
        self._ended[place] = self._ended[place] or ended
        while self._now < len(self._waiting):
            self._write(self._waiting[self._now])
            self._waiting[self._now] = ""
            if not self._ended[self._now]:
                return
            self._now += 1
            self._write("\n" + self._heading())

    def _heading(self) -> str:
        total = len(self._waiting)
        if total == 1 or self._now == total:
            return ""
        prompt = self._prompts[self._now // self._n]
        return f"{'' if self._now == 0 else chr(10)}[{self._now + 1}/{total}] {prompt}\n"

    @staticmethod
    def _write(text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


def _chat(args: argparse.Namespace) -> None:
    history: list[Message] = []
    if args.system_prompt is not None:
        history.append({"role": "system", "content": args.system_prompt})
    with _open_llm(args) as (llm, params):
        if args.quick is not None:
            _answer(llm, [*history, {"role": "user", "content": args.quick}], params)
            return
        _converse(llm, history, params)


def _converse(llm: LLM, history: list[Message], params: SamplingParams) -> None:
    """Question and answer until /exit or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # Line editing in `input`.
    if sys.stdin is None:
        return
    terminal = sys.stdin.isatty()
    if terminal:
        print("Ctrl-C stops an answer, /exit or Ctrl-D leaves.", file=sys.stderr)
    while True:
        try:
            question = input("> " if terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if question in ("/exit", "/quit"):
            return
        if question:
            history.append({"role": "user", "content": question})
            _take_turn(llm, history, params)


def _take_turn(llm: LLM, history: list[Message], params: SamplingParams) -> None:
    """Answer the last message; a question that cannot be answered is taken out of the history again."""
    said: list[str] = []
    try:
        _answer(llm, history, params, said)
    except KeyboardInterrupt:
        print(" [stopped]")
    except ValueError as error:
        history.pop()
        print(f"pyvllm: error: {error}", file=sys.stderr)
        return
    history.append({"role": "assistant", "content": "".join(said)})


def _answer(llm: LLM, messages: list[Message], params: SamplingParams, said: list[str] | None = None) -> None:
    """Print the answer as it is made, adding its pieces to `said`."""
    for output in llm.stream(llm.render_chat(messages), params):
        for completion in output.outputs[:1]:
            sys.stdout.write(completion.text)
            sys.stdout.flush()
            if said is not None:
                said.append(completion.text)
    print()
