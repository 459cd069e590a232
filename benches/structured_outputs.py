"""What the form of an output costs a token: the Rust core's time for a step, with forms and without.

The scheduler has a real vocabulary and no model: every step is told the next tokens of texts that have the form, once
of requests that ask for it and once of requests that do not. The difference is what grammars cost: masks, made by
`schedule`, and following the texts, in `commit`. It is wall-clock time: run it on an idle machine.

    python benches/structured_outputs.py [--model smollm2-135m] [--num-seqs 1,64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from pyvllm import EngineArgs, SamplingParams, _core
from pyvllm.bench.report import Report, show, table
from pyvllm.hub import find_model
from pyvllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from pyvllm.step import HEADER_LEN, StepView
from pyvllm.tokenizer import Tokenizer, find_tokenizer

_MAX_TOKENS: Final = 64
_SPREAD: Final = 128
_WORDS: Final = ("quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards", "mix", "zinc", "quartz")
_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 12},
        "at": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "age", "kind", "tags", "at"],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A form, and a text that has it for each of the requests."""

    name: str
    form: StructuredOutputsParams
    texts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of steps. The mean has the masks that are made for the first time, which take longer."""

    median_us: float
    mean_us: float


def sentence(rng: np.random.Generator, num_words: int) -> str:
    """Words in no order."""
    return " ".join(rng.choice(_WORDS, num_words))


def record(rng: np.random.Generator) -> str:
    """JSON that fits `_SCHEMA`."""
    entry = {
        "name": sentence(rng, 8),
        "age": int(rng.integers(100)),
        "kind": str(rng.choice(["person", "place", "thing"])),
        "tags": [sentence(rng, 2) for _ in range(10)],
        "at": {"x": float(rng.normal()), "y": float(rng.normal())},
    }
    return json.dumps(entry)


def make_cases(num_seqs: int) -> list[Case]:
    """The forms that are measured."""
    rng = np.random.default_rng(0)
    records = [record(rng) for _ in range(num_seqs)]
    prose = [sentence(rng, 80) for _ in range(num_seqs)]
    choices = [sentence(rng, 80) for _ in range(max(16, num_seqs))]
    return [
        Case(name="JSON schema", form=StructuredOutputsParams(json=_SCHEMA), texts=records),
        Case(name="any JSON object", form=StructuredOutputsParams(json_object=True), texts=records),
        Case(name="regex: words", form=StructuredOutputsParams(regex="[a-z]+( [a-z]+)*"), texts=prose),
        Case(name="regex: anything", form=StructuredOutputsParams(regex="(?s:.*)"), texts=prose),
        Case(name="choice", form=StructuredOutputsParams(choice=choices), texts=choices[:num_seqs]),
    ]


class Core:
    """Schedulers with a model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = tokenizer.vocabulary
        self._vocabulary = _core.Vocabulary(words.token_bytes, special_token_ids=words.special_token_ids)
        self._end_token_ids = tokenizer.end_token_ids
        self._tokenizer = tokenizer

    def start(self, num_seqs: int) -> _core.Scheduler:
        """An empty scheduler; grammars it compiles are kept, and the first takes it longer."""
        return _core.Scheduler(
            num_gpu_blocks=num_seqs * (num_seqs + 1),
            block_size=_SPREAD,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=_SPREAD * num_seqs * (num_seqs + 1),
            max_model_len=_SPREAD * (num_seqs + 1),
            vocab_size=len(self._vocabulary),
            eos_token_ids=self._end_token_ids,
            enable_prefix_caching=False,
            vocabulary=self._vocabulary,
        )

    def step_s(self, scheduler: _core.Scheduler, case: Case, form: StructuredOutputsParams | None) -> Times:
        """What steps take in which each text goes on by a token."""
        texts = [self._tokenizer.encode(text, add_special_tokens=False)[:_MAX_TOKENS] for text in case.texts]
        params = SamplingParams(
            temperature=0, max_tokens=_MAX_TOKENS, structured_outputs=form, output_kind=RequestOutputKind.FINAL_ONLY
        )
        for number in range(len(texts)):  # Prompts of lengths that tell requests apart by their tokens' positions.
            scheduler.add_request(str(number), [0] * (1 + _SPREAD * number), params)
        times = []
        while scheduler.has_unfinished():
            start = time.perf_counter()
            plan = scheduler.schedule()
            taken = time.perf_counter() - start
            if plan is None:
                time.sleep(0.001)
                continue
            buffer = plan.buffer
            step = StepView(torch.from_numpy(buffer), buffer[:HEADER_LEN].tolist())
            places = step.positions[step.row_token.long()].tolist()
            tokens = np.array([[texts[place // _SPREAD][place % _SPREAD]] for place in places], np.int32)
            start = time.perf_counter()
            outputs = scheduler.commit(plan.step, tokens, np.zeros(tokens.shape, np.float32))
            taken += time.perf_counter() - start
            if len(places) == len(texts) and not outputs:
                times.append(taken)
            for output in [*outputs, *scheduler.take_failed()]:
                if output.error is not None:
                    raise RuntimeError(f"{case.name}: {output.error}")
        return Times(median_us=1e6 * statistics.median(times), mean_us=1e6 * statistics.mean(times))

    def compile_s(self, scheduler: _core.Scheduler, form: StructuredOutputsParams) -> float:
        """From a request's arrival until its first step."""
        start = time.perf_counter()
        scheduler.add_request("one", [0], SamplingParams(temperature=0, structured_outputs=form))
        while (plan := scheduler.schedule()) is None:
            time.sleep(0.0001)
        taken = time.perf_counter() - start
        scheduler.abort("one")
        scheduler.commit(plan.step, np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32))
        return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is taken")
    parser.add_argument("--num-seqs", default="1,64", help="requests at once, several numbers")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    args = EngineArgs(model=options.model)
    tokenizer = find_tokenizer(args, find_model(args))
    assert tokenizer is not None
    core, report = Core(tokenizer), Report("structured_outputs", vars(options), options.json)
    for num_seqs in map(int, options.num_seqs.split(",")):
        for case in make_cases(num_seqs):
            scheduler = core.start(num_seqs)
            free = core.step_s(scheduler, case, None)
            scheduler = core.start(num_seqs)
            first = core.compile_s(scheduler, StructuredOutputsParams(json={"type": "null"}))
            compiled = core.compile_s(scheduler, case.form)
            formed = core.step_s(scheduler, case, case.form)
            report.add(
                {
                    "form": case.name,
                    "sequences": num_seqs,
                    "step without, µs": free.median_us,
                    "with, µs": formed.median_us,
                    "a token's form, µs": (formed.median_us - free.median_us) / num_seqs,
                    "its mean, µs": (formed.mean_us - free.mean_us) / num_seqs,
                    "compiling it, ms": 1e3 * compiled,
                    "first of an engine, ms": 1e3 * first,
                }
            )
    show(f"{table(report.results)}\n{report.footer()}")


if __name__ == "__main__":
    main()
