"""Tokens per second of SmolLM2-135M on a CPU, beside transformers' `generate`, in one run.

Both engines hold the same dense weights (dequantised from one GGUF file) and get the same prompts of random token ids,
greedy, without an end before `--output-len`. After a warm-up each, they take turns `--repeats` times, every time with
new prompts, so that no cache can serve them; the best time of each counts. Generated tokens are compared too: in
float32 they should be equal, in bfloat16 rounding makes some sequences diverge.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from pyvllm import LLM, SamplingParams
from pyvllm.hub import resolve_model

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts as token ids, tokens to generate) -> generated token ids, prompt by prompt."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload on both engines; rates in generated tokens per second, the best of all repeats."""

    num_requests: int
    pyvllm_rate: float
    transformers_rate: float
    equal_tokens: float
    """Share of generated tokens that agree, position by position."""

    @property
    def ratio(self) -> float:
        """How many times as fast pyvllm is."""
        return self.pyvllm_rate / self.transformers_rate


def pyvllm_engine(path: Path, dtype: str, max_requests: int, max_len: int) -> Generate:
    """Our engine, all requests given at once."""
    llm = LLM(str(path), dtype=dtype, max_model_len=max_len, max_num_seqs=max_requests)

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def transformers_engine(path: Path, dtype: str) -> Generate:
    """transformers with its defaults (SDPA attention, dynamic cache), all requests in one batch of equal lengths."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=getattr(torch, dtype),
        quantization_config=transformers.GgufConfig(dequantize=True),
    )

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
        )
        generated: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return generated

    return generate


def compare(ours: Generate, theirs: Generate, num_requests: int, arguments: argparse.Namespace) -> Result:
    """Warm both up, then let them take turns."""
    engines = {"pyvllm": ours, "transformers": theirs}
    best = dict.fromkeys(engines, float("inf"))
    equal = total = 0
    for repeat in range(-1, arguments.repeats):  # -1: the warm-up, not timed
        rng = random.Random(f"{arguments.seed} {num_requests} {repeat}")
        prompts = [[rng.randrange(1000, 49_000) for _ in range(arguments.input_len)] for _ in range(num_requests)]
        tokens = {}
        for name, generate in engines.items():
            start = time.perf_counter()
            tokens[name] = generate(prompts, arguments.output_len)
            seconds = time.perf_counter() - start
            print(f"{num_requests} at once, run {repeat + 1}: {name} {seconds:.2f} s", file=sys.stderr)
            if repeat >= 0:
                best[name] = min(best[name], seconds)
        for mine, other in zip(tokens["pyvllm"], tokens["transformers"], strict=True):
            assert len(mine) == len(other) == arguments.output_len
            equal += sum(a == b for a, b in zip(mine, other, strict=True))
            total += len(mine)
    generated = num_requests * arguments.output_len
    return Result(
        num_requests=num_requests,
        pyvllm_rate=generated / best["pyvllm"],
        transformers_rate=generated / best["transformers"],
        equal_tokens=equal / total,
    )


def settings(arguments: argparse.Namespace) -> dict[str, object]:
    """What the figures depend on."""
    return {
        "model": "SmolLM2-135M-Instruct",
        **{name: value for name, value in vars(arguments).items() if name not in ("output_json", "model")},
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("pyvllm", "torch", "transformers")},
    }


def table(results: list[Result]) -> str:
    """A Markdown table, one workload a line."""
    lines = ["| requests at once | pyvllm tok/s | transformers tok/s | ratio | equal tokens |", "| --: " * 5 + "|"]
    for r in results:
        rates = f"{r.pyvllm_rate:.1f} | {r.transformers_rate:.1f} | {r.ratio:.2f} | {r.equal_tokens:.0%}"
        lines.append(f"| {r.num_requests} | {rates} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="the alias, or the path of SmolLM2's .gguf file")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 32], help="requests at once, by workload")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate for each prompt")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each engine, after one warm-up")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--output-json", type=Path, help="also write settings and results here")
    return parser.parse_args()


def main() -> None:
    """Run all workloads and print the table."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = resolve_model(arguments.model).path
    longest = arguments.input_len + arguments.output_len
    ours = pyvllm_engine(path, arguments.dtype, max(arguments.num_requests), longest)
    theirs = transformers_engine(path, arguments.dtype)

    results = [compare(ours, theirs, count, arguments) for count in arguments.num_requests]
    used = settings(arguments)
    print(table(results))
    print("\n" + ", ".join(f"{name} {value}" for name, value in used.items()))
    if arguments.output_json is not None:
        report = {"settings": used, "results": [asdict(result) | {"ratio": result.ratio} for result in results]}
        arguments.output_json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
