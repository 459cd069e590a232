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

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. 'My dear Mr. Bennet,' said his lady to him one day, 'have you heard that "
    "Netherfield Park is let at last?' Mr. Bennet replied that he had not. def fibonacci(n): return n if n < 2 else "
    "fibonacci(n - 1) + fibonacci(n - 2). Naïve café, 你好世界, 😀 and 3.14159 are all text too."
)
NEW_TOKENS = 64
POOL: dict[str, Any] = {"kv_cache_memory_bytes": 2 << 30}
"""Leaves room for the reference on a GPU; a CPU's pool takes only what is touched."""


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


def assert_beams_equal(
    model: Any, llm: LLM, prompts: list[list[int]], new_tokens: int, width: int, **options: Any
) -> None:
    """Sequences, order and scores of all returned beams."""
    params = BeamSearchParams(beam_width=width, max_tokens=new_tokens, **options)
    config = model.generation_config
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        its = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=eos[0],
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        assert len(output.sequences) == width
        for mine, tokens, score in zip(output.sequences, its.sequences.tolist(), its.sequences_scores, strict=True):
            generated = tokens[len(prompt) :]
            ends = [i + 1 for i, token in enumerate(generated) if token in eos]
            generated = generated[: ends[0] if ends else None]
            assert mine.tokens == prompt + generated
            length = len(generated)
            assert mine.cum_logprob / length**params.length_penalty == pytest.approx(score.item(), abs=1e-4, rel=1e-6)


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
    with reference(tiny_llama) as model, LLM(str(tiny_llama), **options) as llm:
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
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


@pytest.mark.parametrize("early_stopping", [False, True])
def test_smollm2_beams(smollm2_pair: tuple[Any, LLM], early_stopping: bool) -> None:
    """Width 4, every tenth of the 50 prompts; all of them, in a quarter of an hour, if PYVLLM_ALL_PROMPTS is set."""
    model, llm = smollm2_pair
    prompts = prompts_of_different_lengths(llm.get_tokenizer().encode, 50)
    every = 1 if "PYVLLM_ALL_PROMPTS" in os.environ else 10
    assert_beams_equal(model, llm, prompts[::every], NEW_TOKENS, 4, early_stopping=early_stopping)
