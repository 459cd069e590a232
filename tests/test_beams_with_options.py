"""Beam search together with everything else that a request may ask: random requests, many at once, roomy or crowded,
against a plain search over the logits of `transformers`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm import LLM, BeamSearchParams, EngineArgs, LLMEngine, ParameterError, SamplingParams
from pyvllm.inputs import bad_word_ids
from pyvllm.outputs import CompletionOutput
from pyvllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from tests.beam_oracle import Beam, Oracle
from tests.conftest import TinyCheckpoint
from tests.idle import assert_idle, engine_of
from tests.small_llm import OPTIONS, generate
from tests.test_equals_transformers import reference

VOCAB_SIZE = 320
MAX_LEN = 64
ENDS = [257, 30, 77, 140]
SPECIAL = range(256, 260)
ROOMY: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": MAX_LEN}
CROWDED: dict[str, Any] = ROOMY | {"num_gpu_blocks_override": 66, "max_num_batched_tokens": 48}
TIE = 1e-5
"""Candidates closer than this may change places: rounding differs between the two."""


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    fields: dict[str, Any]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.fields)

    @property
    def tokens(self) -> list[int]:
        """The prompt as far as `truncate_prompt_tokens` leaves it."""
        most = self.fields.get("truncate_prompt_tokens")
        if most == -1:
            wanted = self.fields["max_tokens"] or MAX_LEN
            most = MAX_LEN - (wanted if wanted < MAX_LEN else max(1, self.fields.get("min_tokens", 0)))
        return self.prompt if most is None else self.prompt[-most:]


def favouring(step: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A function on logits that makes two tokens much more probable; which ones depends on the tokens before."""

    def process(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[(step * len(token_ids) + 7) % 250] += 8
        logits[step * sum(token_ids) % 250] += 6
        return logits

    return process


def random_request(rng: random.Random) -> Asked:
    width = rng.choice([2, 2, 3, 4, 4, 5, 8, 24])
    max_tokens = rng.choice([1, 2, 9, 14, None, None] if width < 5 else [1, 4, 9] if width < 24 else [1, 3])
    fields: dict[str, Any] = {
        "use_beam_search": True,
        "temperature": 0,
        "best_of": width,
        "n": rng.randint(1, width),
        "max_tokens": max_tokens,
        "length_penalty": rng.choice([-1.0, 0.0, 0.6, 1.0, 2.0]),
        "early_stopping": rng.choice([False, True, "never"]),
    }
    length = rng.choice([1, 2, 7, 8, 9, 30, MAX_LEN - 1])
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFG 0123"
    tokens = range(VOCAB_SIZE)
    options: dict[str, Callable[[], Any]] = {
        "stop": lambda: rng.sample(letters, rng.choice([1, 5])),
        "stop_regex": lambda: rng.sample(["[a-m][n-z]", "[0-9]", "[A-Z][^A-Z]", "[!-/][!-/]"], rng.choice([1, 2])),
        "stop_token_ids": lambda: rng.sample(tokens, rng.choice([1, 10])),
        "include_stop_str_in_output": lambda: True,
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.choice([0, 1, 3]),
        "prompt_logprobs": lambda: rng.choice([0, 2]),
        "min_tokens": lambda: rng.randint(0, min(max_tokens or 9, 6, MAX_LEN - length)),
        "bad_words": lambda: rng.sample(["the", "a", "in", " s", "th", "x", "q", "7"], 3),
        "presence_penalty": lambda: rng.choice([-1.5, 0.5, 2.0]),
        "frequency_penalty": lambda: rng.choice([-1.5, 0.5, 2.0]),
        "repetition_penalty": lambda: rng.choice([0.7, 1.2, 2.0]),
        "logit_bias": lambda: {i: rng.choice([-100.0, -3.0, 2.0, 100.0]) for i in rng.sample(tokens, 3)},
        "allowed_token_ids": lambda: rng.sample(tokens, rng.choice([1, 3, 20, 200])),
        "logits_processors": lambda: [favouring(rng.randint(1, 8))],
        "truncate_prompt_tokens": lambda: rng.choice([1, 3, -1]),
    }
    fields |= {name: make() for name, make in options.items() if rng.random() < 0.2}
    if rng.random() < 0.1:
        fields = {name: value for name, value in fields.items() if name not in ("stop", "stop_regex")}
        fields["detokenize"] = False
    some = [(11 * i + 3) % 250 for i in range(length)]  # beginnings that others have too
    return Asked(some if rng.random() < 0.5 else rng.choices(range(250), k=length), fields)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("llama", {"eos_token_id": ENDS})


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    with reference(folder) as model:
        yield model.cpu()


def oracle_of(llm: LLM, model: Any, eos: list[int]) -> Oracle:
    tokenizer = llm.get_tokenizer()
    known = tokenizer.vocabulary.token_bytes
    pieces = [b"" if i in SPECIAL or i >= len(known) else known[i] for i in range(VOCAB_SIZE)]
    words = lambda words: bad_word_ids(tokenizer, words)  # noqa: E731
    return Oracle(model=model, pieces=pieces, eos=eos, max_model_len=MAX_LEN, bad_word_ids=words)


def told(completion: CompletionOutput) -> list[dict[int, tuple[float, int]]]:
    return [{i: (one.logprob, one.rank or 0) for i, one in entry.items()} for entry in completion.logprobs or ()]


def assert_equal(found: list[CompletionOutput], expected: list[Beam], params: SamplingParams) -> None:
    assert [completion.token_ids for completion in found] == [beam.tokens for beam in expected]
    for completion, beam in zip(found, expected, strict=True):
        assert completion.text == (beam.text if params.detokenize else "")
        assert (completion.finish_reason, completion.stop_reason) == beam.finish
        assert completion.cumulative_logprob == pytest.approx(beam.cumulative.item(), abs=1e-4, rel=1e-5)
        for mine, other in zip(told(completion), beam.logprobs, strict=params.logprobs is not None):
            assert mine.keys() == other.keys()
            for token, (logprob, rank) in mine.items():
                assert logprob == pytest.approx(other[token][0], abs=1e-4)
                assert rank == other[token][1]


PLAIN = [
    Asked([5, 6, 7], {"temperature": 0, "max_tokens": 20, "ignore_eos": True}),
    Asked([3, 4], {"n": 4, "seed": 5, "max_tokens": 40, "ignore_eos": True}),
]


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, ROOMY | {"num_gpu_blocks_override": 1024}),
        (1, CROWDED | {"swap_space": 0.01}),
        (2, CROWDED | {"swap_space": 0, "enable_prefix_caching": False}),
    ],
    ids=["roomy", "swapped", "recomputed"],
)
def test_random_requests_at_once(folder: Path, model: Any, seed: int, options: dict[str, Any]) -> None:
    rng = random.Random(seed)
    with LLM(str(folder), max_num_seqs=96, **options) as llm:
        oracle = oracle_of(llm, model, ENDS)
        alone = [generate(llm, [one.prompt], one.params)[0].outputs for one in PLAIN]
        preemptions = compared = 0
        for _ in range(2):
            asked = [random_request(rng) for _ in range(8)]
            both = PLAIN + asked  # the last ones to come are the first to be preempted
            outputs = generate(llm, [one.prompt for one in both], [one.params for one in both])
            for output, done in zip(outputs, alone, strict=False):
                assert [found.token_ids for found in output.outputs] == [found.token_ids for found in done]
            outputs = outputs[len(PLAIN) :]
            preemptions += sum(output.metrics.num_preemptions for output in outputs if output.metrics)
            for one, output in zip(asked, outputs, strict=True):
                assert output.prompt_token_ids == one.tokens
                assert one.params.prompt_logprobs is None or len(output.prompt_logprobs or ()) == len(one.tokens)
                expected, closest = oracle.search(one.tokens, one.params)
                if closest > TIE:
                    assert_equal(output.outputs, expected, one.params)
                    compared += 1
        assert (preemptions > 0) == (options["num_gpu_blocks_override"] < 1024)
        assert compared >= 13
        assert_idle(engine_of(llm))


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_streams_of_random_requests_take_nothing_back(folder: Path, kind: RequestOutputKind) -> None:
    rng = random.Random(9)
    early = 0
    # Without the cache both runs take the same steps: they are equal to the last bit.
    with LLM(str(folder), **ROOMY, num_gpu_blocks_override=512, enable_prefix_caching=False) as llm:
        for _ in range(10):
            asked = random_request(rng)
            (whole,) = generate(llm, [asked.prompt], asked.params)
            shown: dict[int, CompletionOutput] = {}
            for output in llm.stream(asked.prompt, SamplingParams(**asked.fields, output_kind=kind)):
                for news in output.outputs:
                    known = shown.setdefault(news.index, CompletionOutput(index=news.index, text="", token_ids=[]))
                    if kind == RequestOutputKind.DELTA:
                        news.text, news.token_ids = known.text + news.text, known.token_ids + news.token_ids
                        news.logprobs = news.logprobs and (known.logprobs or []) + news.logprobs
                    assert news.text.startswith(known.text)
                    assert news.token_ids[: len(known.token_ids)] == known.token_ids
                    early += not output.finished and len(news.token_ids) > len(known.token_ids)
                    shown[news.index] = news
            assert list(shown.values()) == whole.outputs
    assert early >= 5


@pytest.fixture(scope="module")
def form_llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), **(OPTIONS | {"max_model_len": MAX_LEN})) as llm:
        yield llm


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(
    "choices", [["the cat", "the dog", "then", "a"], ["x"], ["in", "inn", "inner"], ["é", "ä", "日本"]]
)
def test_beams_of_a_form(form_llm: LLM, tiny_llama: Path, choices: list[str], early_stopping: Any) -> None:
    form = StructuredOutputsParams(choice=choices)
    beams = BeamSearchParams(
        beam_width=4, max_tokens=9, structured_outputs=form, early_stopping=early_stopping, logprobs=2
    )
    params = beams.to_sampling_params()
    (output,) = generate(form_llm, [[5, 6, 7]], params)
    with reference(tiny_llama) as model:
        expected, _ = oracle_of(form_llm, model.cpu(), [257]).search([5, 6, 7], params)
    assert_equal(output.outputs, expected, params)
    assert all(completion.text in choices for completion in output.outputs)
    assert [beam.text for beam in form_llm.beam_search([[5, 6, 7]], beams)[0].sequences] == [
        form_llm.get_tokenizer().decode([5, 6, 7]) + completion.text for completion in output.outputs
    ]


def test_a_json_schema_holds_for_every_beam(form_llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 23, "x"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = BeamSearchParams(beam_width=5, max_tokens=30, structured_outputs=form, num_return_sequences=3)
    texts = [
        json.loads(sequence.text.removeprefix("the"))["a"]
        for sequence in form_llm.beam_search("the", params)[0].sequences
    ]
    assert set(map(str, texts)) == {"1", "23", "x"}


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_logprobs_of_beams_are_what_the_mode_says(tiny_llama: Path, mode: Any) -> None:
    params = SamplingParams(
        use_beam_search=True, temperature=0, best_of=3, n=3, max_tokens=1, logprobs=2, logit_bias={40: 3.0, 41: 100.0}
    )
    with reference(tiny_llama) as model, LLM(str(tiny_llama), logprobs_mode=mode, **OPTIONS) as llm:
        (output,) = generate(llm, [[5, 6, 7]], params)
        logits = model.cpu()(torch.tensor([[5, 6, 7]])).logits[0, -1]
    ranked = logits.log_softmax(-1)
    ranked[40] += 3
    ranked[41] += 100
    shown = ranked if mode.startswith("processed") else logits
    shown = shown.log_softmax(-1) if mode.endswith("logprobs") else shown
    best = shown.topk(2).indices.tolist()
    for completion, token in zip(output.outputs, ranked.topk(3).indices.tolist(), strict=True):
        assert completion.token_ids == [token]
        assert completion.cumulative_logprob == pytest.approx(ranked[token].item(), abs=1e-4)
        (entry,) = told(completion)
        assert entry.keys() == {token, *best}
        for i, (value, rank) in entry.items():
            assert value == pytest.approx(shown[i].item(), abs=1e-4)
            assert rank == 1 + int((shown > shown[i]).sum())


# --- too little to choose from ----------------------------------------------------------------------------------------


def search(llm: LLM, **fields: Any) -> list[CompletionOutput]:
    (output,) = generate(llm, [[5, 6, 7]], SamplingParams(use_beam_search=True, temperature=0, **fields))
    return output.outputs


def test_fewer_tokens_than_beams_give_fewer_results(llm: LLM) -> None:
    (only,) = search(llm, best_of=4, n=4, max_tokens=3, allowed_token_ids=[40])
    assert (only.token_ids, only.finish_reason) == ([40, 40, 40], "length")
    both = search(llm, best_of=8, n=8, max_tokens=2, allowed_token_ids=[40, 41])
    assert sorted(one.token_ids for one in both) == [[40, 40], [40, 41], [41, 40], [41, 41]]
    everything = search(llm, best_of=64, n=64, max_tokens=2, allowed_token_ids=list(range(40, 48)))
    assert sorted(one.token_ids for one in everything) == [[i, j] for i in range(40, 48) for j in range(40, 48)]


def test_a_search_that_nothing_may_follow_fails_alone(llm: LLM) -> None:
    def nothing(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits - (float("inf") if len(token_ids) == 2 else 0.0)

    params = [
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(
            use_beam_search=True, temperature=0, best_of=3, max_tokens=8, ignore_eos=True, logits_processors=[nothing]
        ),
    ]
    with pytest.raises(ParameterError, match="use_beam_search must leave a token for a beam to go on with"):
        generate(llm, [[5, 6, 7]] * 2, params)


@pytest.mark.parametrize("width", [1, 3])
def test_no_tokens_are_refused(llm: LLM, width: int) -> None:
    with pytest.raises(ParameterError, match="max_tokens must be None or an integer of at least 1, got 0"):
        BeamSearchParams(beam_width=width, max_tokens=0)
    full = list(range(1, 10)) * 100
    with pytest.raises(ParameterError, match="prompt_token_ids has 900 tokens"):
        llm.beam_search([full], BeamSearchParams(beam_width=width, max_tokens=1))


def test_an_abort_in_mid_search_leaves_nothing(tiny_llama: Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny_llama), **OPTIONS))
    params = SamplingParams(use_beam_search=True, temperature=0, best_of=5, n=2, max_tokens=30, ignore_eos=True)
    for steps in range(1, 6):
        engine.add_request("x", {"prompt_token_ids": [5, 6, 7]}, params)
        for _ in range(steps):
            engine.step()
        engine.abort_request("x")
        assert not engine.has_unfinished_requests()
        assert not engine.step()
        assert_idle(engine._engine)


def test_more_beams_than_half_of_the_vocabulary(tiny_llama: Path) -> None:
    params = SamplingParams(use_beam_search=True, temperature=0, best_of=200, n=200, max_tokens=3, ignore_eos=True)
    options = OPTIONS | {"num_gpu_blocks_override": 512, "max_num_seqs": 256}
    with reference(tiny_llama) as model, LLM(str(tiny_llama), **options) as llm:
        (output,) = generate(llm, [[5, 6, 7]], params)
        expected, _ = oracle_of(llm, model.cpu(), []).search([5, 6, 7], params)
    # So many are too close for one order: the scores are the same, whichever of two equal ones comes first.
    scores = [completion.cumulative_logprob for completion in output.outputs]
    assert scores == pytest.approx([beam.cumulative.item() for beam in expected], abs=1e-4)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 200
