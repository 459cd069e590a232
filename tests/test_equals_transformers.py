"""Greedy tokens, log-probabilities and beams equal those of `transformers` in float32."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm import LLM, BeamSearchParams, SamplingParams
from pyvllm.logprobs import LogprobDict
from tests.conftest import TinyCheckpoint
from tests.idle import engine_of

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. 'My dear Mr. Bennet,' said his lady to him one day, 'have you heard that "
    "Netherfield Park is let at last?' Mr. Bennet replied that he had not. def fibonacci(n): return n if n < 2 else "
    "fibonacci(n - 1) + fibonacci(n - 2). Naïve café, 你好世界, 😀 and 3.14159 are all text too."
)
NEW_TOKENS = 64
POOL: dict[str, Any] = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_gib": 4}
"""Leaves room for the reference, and for other processes, on a GPU; a CPU's pool takes only what is touched."""


def prompts_of_different_lengths(encode: Any, count: int) -> list[list[int]]:
    """`count` prompts of 1 to about 200 tokens, beginning at different places of a text."""
    ids = encode(TEXT + " " + TEXT)
    return [ids[3 * i : 3 * i + 1 + (i * i) % 150] for i in range(count)]


@contextmanager
def reference(path: Path) -> Iterator[Any]:
    """The same checkpoint in `transformers`, float32, on a GPU if there is one."""
    import transformers

    if path.suffix == ".gguf":
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        yield model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def values(entries: Sequence[LogprobDict | None] | None, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of `ids`, one from each entry."""
    assert entries is not None
    return torch.tensor([entry[i].logprob for entry, i in zip(entries, ids, strict=True) if entry is not None])


def assert_greedy_equal(model: Any, llm: LLM, prompts: list[list[int]], new_tokens: int) -> None:
    """Our tokens are the argmax of the reference's logits at each position, given the tokens before: by induction they
    are what its own greedy search gives. Log-probabilities are within 1e-4.
    """
    params = SamplingParams(temperature=0, max_tokens=new_tokens, logprobs=2, prompt_logprobs=1)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        ids = torch.tensor([prompt + completion.token_ids])
        logprobs = model(ids.to(model.device)).logits[0].log_softmax(-1).cpu()
        predicted = logprobs[len(prompt) - 1 : -1]
        assert predicted.argmax(-1).tolist() == completion.token_ids
        chosen = predicted.max(-1).values
        torch.testing.assert_close(values(completion.logprobs, completion.token_ids), chosen, atol=1e-4, rtol=0)
        assert completion.cumulative_logprob == pytest.approx(chosen.sum().item(), abs=1e-2)
        its = logprobs[: len(prompt) - 1].gather(1, ids[0, 1 : len(prompt), None])[:, 0]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        torch.testing.assert_close(values(output.prompt_logprobs[1:], prompt[1:]), its, atol=1e-4, rtol=0)


def beams_of(model: Any, prompt: list[int], eos: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """What `transformers` finds, best first: generated tokens, the one that ends them included, and score."""
    width = params.beam_width
    its = model.generate(
        torch.tensor([prompt], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    found = []
    for place, tokens in enumerate(its.sequences.tolist()):
        generated = tokens[len(prompt) :]
        ends = [i + 1 for i, token in enumerate(generated) if token in eos]
        generated = generated[: ends[0] if ends else None]
        if width > 1:
            score = its.sequences_scores[place].item()
        else:  # greedy: it gives no score
            rows = zip(its.scores, generated, strict=False)
            total = sum(logits[0].log_softmax(-1)[token].item() for logits, token in rows)
            score = total / len(generated) ** params.length_penalty
        found.append((generated, score))
    return found


def assert_beams_equal(
    model: Any, llm: LLM, prompts: list[list[int]], new_tokens: int, width: int, **options: Any
) -> None:
    """Sequences, order and scores of all returned beams. With a negative penalty a score is the sum of
    log-probabilities times a power of the length: then the sums are within 1e-4.
    """
    params = BeamSearchParams(beam_width=width, max_tokens=new_tokens, **options)
    known = model.generation_config.eos_token_id
    eos = known if isinstance(known, list) else [] if known is None else [known]
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        its = beams_of(model, prompt, [*eos, *(params.stop_token_ids or ())], params)
        assert [mine.tokens for mine in output.sequences] == [prompt + tokens for tokens, _ in its]
        for mine, (tokens, score) in zip(output.sequences, its, strict=True):
            power = len(tokens) ** params.length_penalty
            assert mine.cum_logprob / power == pytest.approx(score, abs=1e-4 * max(1, 1 / power))


TINY = {
    "llama": {},
    "llama_mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {},
}


@pytest.mark.parametrize("name", TINY)
def test_tiny_model(name: str, tiny_checkpoint: TinyCheckpoint) -> None:
    """Random checkpoints of each family, through chunked prefill and small blocks."""
    path = tiny_checkpoint(name.split("_")[0], TINY[name])
    prompts = [[(11 * i + 7 * j) % 250 for j in range(1 + 5 * i)] for i in range(8)]
    options = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "max_num_seqs": 64,
    }
    with reference(path) as model, LLM(str(path), **options, **POOL) as llm:
        assert_greedy_equal(model, llm, prompts, 32)
        for early_stopping in (False, True):
            assert_beams_equal(model, llm, prompts[:5], 24, 4, early_stopping=early_stopping)
        assert_beams_equal(model, llm, prompts[:3], 24, 3, early_stopping="never", length_penalty=2.0)


def test_b072_prompt_logprobs_cold_warm_and_in_chunks(tiny_llama: Path) -> None:
    prompt = [(11 * i + 3) % 250 for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    options = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 7, "max_model_len": 64}
    with reference(tiny_llama) as model, LLM(str(tiny_llama), **options, **POOL) as llm:
        expected = model(torch.tensor([prompt], device=model.device)).logits[0].log_softmax(-1).cpu()
        for _ in range(2):  # cold, then warm
            entries = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
            assert entries is not None
            assert len(entries) == 20
            assert entries[0] is None
            torch.testing.assert_close(
                values(entries[1:], prompt[1:]), expected[torch.arange(19), prompt[1:]], atol=1e-4, rtol=0
            )
            for i, entry in enumerate(entries[1:]):
                assert entry is not None
                best = expected[i].topk(3).indices.tolist()
                assert [token for token in entry if entry[token].rank in (1, 2, 3)] == (
                    best if prompt[i + 1] not in best else [prompt[i + 1], *(b for b in best if b != prompt[i + 1])]
                )


def test_stories260k(stories260k: Path) -> None:
    """A trained model, whose texts end by themselves."""
    prompts = [[1], [1, 403, 407, 261], [1, 378, 432, 383, 286, 261]]
    with reference(stories260k) as model, LLM(str(stories260k), dtype="float32", **POOL) as llm:
        assert_greedy_equal(model, llm, prompts, 200)
        for early_stopping in (False, True):
            assert_beams_equal(model, llm, prompts, 64, 4, early_stopping=early_stopping)


@pytest.fixture(scope="module")
def smollm2_pair(smollm2: Path) -> Iterator[tuple[Any, LLM]]:
    """SmolLM2-135M-Instruct in both."""
    with reference(smollm2) as model, LLM(str(smollm2), dtype="float32", max_model_len=1024, **POOL) as llm:
        yield model, llm


def test_smollm2_greedy(smollm2_pair: tuple[Any, LLM]) -> None:
    """50 prompts of different lengths at once, 64 new tokens each."""
    model, llm = smollm2_pair
    prompts = prompts_of_different_lengths(llm.get_tokenizer().encode, 50)
    assert_greedy_equal(model, llm, prompts, NEW_TOKENS)


EVERY_SEARCH = [
    (width, length_penalty, early_stopping, ends)
    for width in range(1, 9)
    for length_penalty in (-1.0, 0.0, 0.6, 1.0, 2.0)
    for early_stopping in (False, True, "never")
    for ends in ("", ".\n", ".,\n")
]
SOME_SEARCHES = [
    (1, 0.6, False, ".\n"),
    (2, -1.0, True, ""),
    (3, 0.0, "never", ".\n"),
    (4, 1.0, False, ""),
    (5, 0.6, True, ".,\n"),
    (6, 2.0, "never", ".\n"),
    (7, 1.0, False, ".,\n"),
    (8, -1.0, "never", ".\n"),
    (8, 2.0, True, ".,\n"),
]
BEGINNINGS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):\n", "'I am not sure', she said", TEXT[:100]]


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping", "ends"),
    EVERY_SEARCH if "PYVLLM_ALL_SEARCHES" in os.environ else SOME_SEARCHES,
)
def test_smollm2_beams(
    smollm2_pair: tuple[Any, LLM], width: int, length_penalty: float, early_stopping: Any, ends: str
) -> None:
    """Beams of texts, some of which end. All 360 searches, in half an hour, if PYVLLM_ALL_SEARCHES is set."""
    model, llm = smollm2_pair
    encode = llm.get_tokenizer().encode
    options = {
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "stop_token_ids": [encode(end)[-1] for end in ends],
    }
    prompt = encode(BEGINNINGS[width % len(BEGINNINGS)])
    assert_beams_equal(model, llm, [prompt], 16, width, **options)


def test_smollm2_eight_sequences_are_eight_solo_runs(smollm2_pair: tuple[Any, LLM]) -> None:
    """One prompt for all of them is computed, and its last block copied for all but one."""
    _, llm = smollm2_pair
    engine = engine_of(llm)
    engine.reset_prefix_cache()
    before = engine.stats()
    fields: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "top_p": 0.95}
    (together,) = llm.generate(["Once upon a time"], SamplingParams(n=8, seed=40, **fields), use_tqdm=False)
    after = engine.stats()
    # The last token of each sequence is sampled, never computed.
    assert after.step_tokens - before.step_tokens == len(together.prompt_token_ids) + 8 * 11
    assert after.num_copies - before.num_copies == 7
    alone = [SamplingParams(seed=40 + i, **fields) for i in range(8)]
    outputs = llm.generate(["Once upon a time"] * 8, alone, use_tqdm=False)
    texts = [completion.text for completion in together.outputs]
    assert texts == [output.outputs[0].text for output in outputs]
    assert len(set(texts)) == 8
