"""Prompts as requests have them: with a gap, for models trained to fill in; cut; of a server without a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from pyvllm.inputs import ParsedPrompt
from pyvllm.server.errors import ApiError
from pyvllm.server.prompts import ReadyPrompt, encode_with_gap, truncated
from pyvllm.tokenizer import Tokenizer
from tests.server.conftest import serve
from tests.server.test_errors import assert_error

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def _tokenizer(*specials: str, bos: bool = False) -> Tokenizer:
    """A letter a token; the special tokens come after them."""
    names = (*specials, "<s>")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate([*LETTERS, *names])}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(names))
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", len(LETTERS) + len(specials))]
        )
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"}, chat_templates={})


@pytest.mark.parametrize(
    "specials",
    [
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ],
)
def test_gap_lies_between_prefix_and_suffix(specials: tuple[str, ...]) -> None:
    tokenizer = _tokenizer(*specials)
    (prompt,) = encode_with_gap(tokenizer, [ParsedPrompt(text="ab")], "c", add_special_tokens=True)
    before, between, after = range(256, 259)
    a, b, c = (LETTERS.index(letter) for letter in "abc")
    assert prompt.token_ids == [before, a, b, between, c, after]
    assert prompt.text == "ab"


def test_gap_begins_with_bos_where_the_tokenizer_does() -> None:
    tokenizer = _tokenizer("<fim_prefix>", "<fim_suffix>", "<fim_middle>", bos=True)
    (with_bos,) = encode_with_gap(tokenizer, [ParsedPrompt(text="a")], "", add_special_tokens=True)
    (without,) = encode_with_gap(tokenizer, [ParsedPrompt(text="a")], "", add_special_tokens=False)
    assert with_bos.token_ids == [259, *(without.token_ids or ())]


def test_gap_needs_a_model_and_a_text() -> None:
    with pytest.raises(ApiError, match="no fill-in-the-middle tokens") as error:
        encode_with_gap(_tokenizer(), [ParsedPrompt(text="a")], "b", add_special_tokens=True)
    assert (error.value.status, error.value.param) == (400, "suffix")
    tokenizer = _tokenizer("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    with pytest.raises(ApiError, match="suffix needs a prompt that is text"):
        encode_with_gap(tokenizer, [ParsedPrompt(token_ids=[1])], "b", add_special_tokens=True)


def test_truncation_keeps_the_end() -> None:
    prompt = ReadyPrompt(parsed=ParsedPrompt(text="abc"), token_ids=[1, 2, 3])
    assert truncated(prompt, None) is prompt
    assert truncated(prompt, 3) is prompt
    assert truncated(prompt, 2).token_ids == [2, 3]


def test_without_a_tokenizer_only_ids_are_taken(tiny_llama: Path, tmp_path: Path) -> None:
    message = {"role": "user", "content": "a"}
    with serve(tiny_llama, tmp_path, "--skip-tokenizer-init") as served:
        for path, body, param in (
            ("/v1/completions", {"prompt": "a"}, "prompt"),
            ("/v1/completions", {"prompt": [1], "stop": "a"}, "stop"),
            ("/v1/completions", {"prompt": [1], "guided_regex": "a"}, "guided_regex"),
            ("/v1/completions", {"prompt": [1], "suffix": "a"}, "suffix"),
            ("/v1/chat/completions", {"messages": [message]}, "messages"),
            ("/tokenize", {"prompt": "a"}, "prompt"),
            ("/tokenize", {"messages": [message]}, "messages"),
            ("/detokenize", {"tokens": [1]}, "tokens"),
        ):
            assert "without" in assert_error(served.post(path, body), 400, param)
        good = {"prompt": [1], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
        for options in ({}, {"add_special_tokens": False}):
            (choice,) = served.post("/v1/completions", good | options).json()["choices"]
            assert (len(choice["token_ids"]), choice["text"]) == (3, "")
