"""Beam search on tiny models: against `transformers` over its parameters, in streams, and beside other requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm import LLM, BeamSearchParams, SamplingParams
from pyvllm.sampling_params import RequestOutputKind
from tests.conftest import TinyCheckpoint
from tests.idle import assert_idle, engine_of
from tests.small_llm import GREEDY, OPTIONS, generate
from tests.test_equals_transformers import assert_beams_equal, reference

ENDS = [257, 30, 77, 130, 140, 150, 171, 182, 190, 200, 230, 239]
"""Ids that end a text: so many that some beams end at once and others never."""


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: TinyCheckpoint) -> Iterator[tuple[Any, LLM]]:
    folder = tiny_checkpoint("llama", {"eos_token_id": ENDS})
    with reference(folder) as model, LLM(str(folder), **(OPTIONS | {"max_num_seqs": 16})) as llm:
        yield model, llm


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width", range(2, 9))
def test_equal_to_transformers(pair: tuple[Any, LLM], width: int, early_stopping: Any) -> None:
    model, llm = pair
    prompts = [[(11 * i + 7 * j + width) % 250 for j in range(1 + 4 * i)] for i in range(2)]
    for length_penalty in (-1.0, 0.0, 0.6, 1.0, 2.0):
        options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
        assert_beams_equal(model, llm, prompts, 10, width, **options)
    assert_idle(engine_of(llm))


def test_some_beams_end_early_and_some_do_not(pair: tuple[Any, LLM]) -> None:
    _, llm = pair
    outputs = llm.beam_search([[7], [3, 4, 5]], BeamSearchParams(beam_width=8, max_tokens=10))
    lengths = {len(sequence.tokens) for output in outputs for sequence in output.sequences}
    reasons = {sequence.finish_reason for output in outputs for sequence in output.sequences}
    assert len(lengths) > 3
    assert reasons == {"stop", "length"}


def test_width_one_is_greedy(pair: tuple[Any, LLM]) -> None:
    model, llm = pair
    for prompt in ([7], [3, 4, 5]):
        (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=10))
        (sequence,) = output.sequences
        its = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=257)
        assert sequence.tokens == its[0].tolist()
        logprobs = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        chosen = logprobs[torch.arange(len(prompt) - 1, len(sequence.tokens) - 1), sequence.tokens[len(prompt) :]]
        assert sequence.cum_logprob == pytest.approx(chosen.sum().item(), abs=1e-4)


# --- streams ----------------------------------------------------------------------------------------------------------


def favouring(count: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A function on logits that leaves one choice for most tokens, so that beams have long beginnings in common."""

    def process(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) % count:
            logits[(7 * sum(token_ids) + len(token_ids)) % 250] += 30
        return logits

    return process


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize(("best_of", "n"), [(2, 1), (4, 4), (5, 2)])
def test_a_stream_shows_only_what_no_beam_can_change(llm: LLM, kind: RequestOutputKind, best_of: int, n: int) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "best_of": best_of, "n": n, "temperature": 0, "logprobs": 2}
    params = SamplingParams(max_tokens=30, logits_processors=[favouring(6)], stop=["zq"], **fields)
    (whole,) = generate(llm, [[5, 6, 7]], params)
    params.output_kind = kind
    shown: dict[int, list[Any]] = {i: ["", [], []] for i in range(n)}
    early = 0
    for output in llm.stream([5, 6, 7], params):
        for completion in output.outputs:
            news: list[Any] = [completion.text, completion.token_ids, completion.logprobs]
            known = shown[completion.index]
            if kind == RequestOutputKind.DELTA:
                news = [old + new for old, new in zip(known, news, strict=True)]
            for old, new in zip(known, news, strict=True):
                assert new[: len(old)] == old
            shown[completion.index] = news
            assert whole.outputs[completion.index].text.startswith(news[0])
        if not output.finished:
            early = max(early, len(shown[0][1]))
    assert early >= 5
    for completion in whole.outputs:
        assert shown[completion.index] == [completion.text, completion.token_ids, completion.logprobs]


# --- beside others ----------------------------------------------------------------------------------------------------


def test_with_stops_and_logprobs_beside_plain_requests_under_memory_pressure(tiny_llama: Path) -> None:
    beams: dict[str, Any] = {"use_beam_search": True, "temperature": 0, "max_tokens": 24}
    params = [
        SamplingParams(best_of=4, n=3, logprobs=3, **beams),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(best_of=3, n=3, stop=["x", "m"], stop_regex="[0-9]+q", **beams),
        SamplingParams(n=3, seed=5, max_tokens=24, logprobs=1),
        SamplingParams(best_of=2, n=1, length_penalty=2.0, early_stopping="never", **beams),
        SamplingParams(best_of=4, n=4, stop_token_ids=[40, 50, 60, 70], bad_words=["ab", "e"], **beams),
    ]
    prompts = [[(5 * i + 3 * j) % 250 for j in range(7 + i)] for i in range(len(params))]
    results = []
    for options in ({"num_gpu_blocks_override": 512}, {"num_gpu_blocks_override": 44, "swap_space": 0.001},
                    {"num_gpu_blocks_override": 44, "swap_space": 0, "max_num_batched_tokens": 16}):  # fmt: skip
        with LLM(str(tiny_llama), **(OPTIONS | {"block_size": 4, "max_model_len": 48} | options)) as llm:
            outputs = generate(llm, prompts, params)
            results.append([output.outputs for output in outputs])
            preemptions = sum(output.metrics.num_preemptions for output in outputs if output.metrics)
            assert (preemptions > 0) == (options["num_gpu_blocks_override"] == 44)
            assert_idle(engine_of(llm))
    for crowded in results[1:]:
        for ours, theirs in zip(crowded, results[0], strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.token_ids == other.token_ids
                assert (mine.text, mine.finish_reason, mine.stop_reason) == (
                    other.text,
                    other.finish_reason,
                    other.stop_reason,
                )
                if other.cumulative_logprob is not None:
                    assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        for prompt, one, together in zip(prompts, params, results[0], strict=True):
            alone = generate(llm, [prompt], one)[0].outputs
            assert [completion.token_ids for completion in alone] == [completion.token_ids for completion in together]


def test_stop_strings_end_beams(llm: LLM) -> None:
    free = llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True))[0]
    prompt_text = llm.get_tokenizer().decode([5, 6, 7])
    text = free.sequences[0].text.removeprefix(prompt_text)
    stop = text[3:5]
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True, stop=[stop])
    stopped = llm.beam_search([[5, 6, 7]], params)[0].sequences
    assert any(sequence.stop_reason == stop for sequence in stopped)
    for sequence in stopped:
        assert stop not in sequence.text.removeprefix(prompt_text)
    assert generate(llm, [[5, 6, 7]], GREEDY)
