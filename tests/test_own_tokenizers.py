"""Tokenizers whose classes are code in the checkpoint, against sentencepiece and tiktoken, on models made here."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvllm.sentencepiece_model import build_sentencepiece, read_sentencepiece
from pyvllm.tokenizer import Tokenizer, load_tokenizer
from tests.test_equals_transformers import TEXT

SAMPLES = [
    "Hello, world",
    "It is a truth universally acknowledged",
    " two  spaces ",
    "a\nb\tc",
    "ďábelské hi😀",
    "你好世界, the family",
    "<|not special|> 3.14159",
    "\u2581x",
    "\nx",
    " ",
    "",
]


def train(path: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A small model of a few texts, written to `path`."""
    words = TEXT.split()
    order = random.Random(0)
    lines = [" ".join(order.choices(words, k=12)) for _ in range(400)]
    model = io.BytesIO()
    fields: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 500,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        "num_threads": 1,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **(fields | options))
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def folder(path: Path, **files: Mapping[str, Any]) -> Path:
    """`path`, with JSON files of these contents."""
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


# --- sentencepiece ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"},
        {"model_type": "unigram", "vocab_size": 400},
        {"model_type": "unigram", "vocab_size": 140, "byte_fallback": False},
        {"user_defined_symbols": ["<tool>", "<t", "a.c", "\u2581\u2581"]},
        {"user_defined_symbols": ["<tool>"], "model_type": "unigram", "vocab_size": 400},
    ],
    ids=str,
)
def test_ids_and_texts_equal_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    reference = train(tmp_path / "tokenizer.model", **options)
    model = read_sentencepiece(tmp_path / "tokenizer.model")
    assert model.pieces == [reference.id_to_piece(i) for i in range(reference.vocab_size())]
    backend = build_sentencepiece(model, model.pieces)
    for text in [*SAMPLES, TEXT, TEXT[::-1], "a   b <tool>", "<tool>the<tool> the\n<t the", "x<tool><tool>a.c abc"]:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text), text
        if reference.unk_id() not in ids:
            assert backend.decode(ids) == reference.decode(ids)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[sentencepiece.SentencePieceProcessor, Any]:
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    reference = train(path)
    model = read_sentencepiece(path)
    return reference, build_sentencepiece(model, model.pieces)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text(pair: tuple[sentencepiece.SentencePieceProcessor, Any], text: str) -> None:
    reference, backend = pair
    text = "".join(character for character in text if character not in "\0<")
    assert backend.encode(text, add_special_tokens=False).ids == reference.encode(text)


@pytest.mark.parametrize("damage", ["cut", "text", "word", "empty"])
def test_a_damaged_model_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    if damage == "word":
        train(path, model_type="word", byte_fallback=False, vocab_size=80)
    else:
        train(path)
        path.write_bytes({"cut": path.read_bytes()[:-5], "text": b"version https://git-lfs", "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"tokenizer\.model: .*SentencePiece model"):
        read_sentencepiece(path)


# --- families ---------------------------------------------------------------------------------------------------------


def chat(tokenizer: Tokenizer, *contents: str) -> str:
    """The text of a conversation whose turns alternate, the user's first."""
    roles = ["user", "assistant"] * len(contents)
    return tokenizer.render_chat([{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)])


def test_internlm(tmp_path: Path) -> None:
    turns = ["<|User|>", "<eoh>", "<|Bot|>", "<eoa>"]
    reference = train(tmp_path / "tokenizer.model", user_defined_symbols=turns)
    made = load_tokenizer(folder(tmp_path, tokenizer_config={"tokenizer_class": "InternLMTokenizer"}))
    for text in SAMPLES:
        assert made.encode(text) == [reference.bos_id(), *reference.encode(text)]
        assert made.encode(text, add_special_tokens=False) == reference.encode(text)
    text = chat(made, "Hi", "Yes?", "It is a truth")
    assert text == "<s><|User|>:Hi\n<|Bot|>:Yes?<eoa>\n<|User|>:It is a truth\n<|Bot|>:"
    ids = made.encode(text, add_special_tokens=False)
    # Nothing comes between these tokens and what follows them: to the family's own code they are not special.
    assert ids == [made.bos_token_id, *reference.encode(text.removeprefix("<s>"))]
    assert made.eos_token_id == made.token_id("<eoa>")
    assert made.decode(ids) == text.removeprefix("<s>")


def test_internlm2_renames_tokens_of_the_file(tmp_path: Path) -> None:
    """Its files call ids of reserved pieces by new names."""
    reference = train(tmp_path / "tokenizer.model", user_defined_symbols=["[UNUSED_1]", "[UNUSED_2]"])
    first = reference.piece_to_id("[UNUSED_1]")
    config = {
        "tokenizer_class": "InternLM2Tokenizer",
        "added_tokens_decoder": {
            str(first): {"content": "<|im_start|>", "special": True},
            str(first + 1): {"content": "<|im_end|>", "special": True},
        },
        "chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
        "eos_token": "<|im_end|>",
    }
    made = load_tokenizer(folder(tmp_path, tokenizer_config=config))
    ids = made.encode(chat(made, "the family"), add_special_tokens=False)
    assert ids == [first, *reference.encode("the family"), first + 1]
    assert made.eos_token_id == first + 1
    assert made.decode(ids) == "the family"
    assert made.token_id("[UNUSED_1]") is None


def test_baichuan(tmp_path: Path) -> None:
    reference = train(tmp_path / "tokenizer.model", user_defined_symbols=["<reserved_106>", "<reserved_107>"])
    user, assistant = (reference.piece_to_id(f"<reserved_10{i}>") for i in (6, 7))
    config = {"tokenizer_class": "BaichuanTokenizer", "add_bos_token": False, "add_eos_token": True}
    made = load_tokenizer(folder(tmp_path, tokenizer_config=config))
    for text in SAMPLES:
        assert made.encode(text) == [*reference.encode(text), reference.eos_id()]
    with pytest.raises(ValueError, match="no chat template"):
        chat(made, "Hi")
    folder(tmp_path, generation_config={"user_token_id": user, "assistant_token_id": assistant})
    made = load_tokenizer(tmp_path)
    ids = made.encode(chat(made, "Hi", "the family", "is"), add_special_tokens=False)
    expected = [user, *reference.encode("Hi"), assistant, *reference.encode("the family")]
    assert ids == [*expected, user, *reference.encode("is"), assistant]


def test_chatglm(tmp_path: Path) -> None:
    reference = train(tmp_path / "tokenizer.model")
    first = reference.vocab_size()  # of [MASK] [gMASK] [sMASK] sop eop, system user assistant observation
    made = load_tokenizer(folder(tmp_path, tokenizer_config={"tokenizer_class": "ChatGLMTokenizer"}))
    for text in [*SAMPLES, "philosophy, a sop and eop"]:
        assert made.encode(text) == [first + 1, first + 3, *reference.encode(text)]
        assert made.decode(made.encode(text)) == made.decode(reference.encode(text)) == reference.decode(
            reference.encode(text)
        )  # fmt: skip
    ids = made.encode(chat(made, "Hi", "the family"), add_special_tokens=False)
    expected = [first + 1, first + 3, first + 6, *reference.encode("\n Hi")]
    assert ids == [*expected, first + 7, *reference.encode("\n the family"), first + 7]
    assert made.vocab_size == first + 9
    assert made.end_token_ids == [first + 6, first + 8]


def test_chatglm3_as_its_files_spell_it(tmp_path: Path) -> None:
    """They list special tokens as plain ones, and write one of them, in a template, as letters of a text."""
    reference = train(tmp_path / "tokenizer.model")
    first = reference.vocab_size()
    listed = {1: "[gMASK]", 3: "sop", 6: "<|user|>", 7: "<|assistant|>", 8: "<|observation|>"}
    config = {
        "tokenizer_class": "ChatGLMTokenizer",
        "added_tokens_decoder": {
            str(first + i): {"content": content, "normalized": True, "special": False} for i, content in listed.items()
        },
        "additional_special_tokens": ["sop", "<|user|>"],
        "chat_template": "{% for m in messages %}{% if loop.first %}[gMASK]sop{% endif %}<|{{ m['role'] }}|>\n "
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    }
    made = load_tokenizer(folder(tmp_path, tokenizer_config=config))
    ids = made.encode(chat(made, "a sop"), add_special_tokens=False)
    assert ids == [first + 1, first + 3, first + 6, *reference.encode("\n a sop"), first + 7]
    assert made.decode(ids) == reference.decode(reference.encode("\n a sop"))
    assert made.vocab_size == first + 9


def test_chatglm2(tmp_path: Path) -> None:
    reference = train(tmp_path / "tokenizer.model")
    first = reference.vocab_size()
    config = {"_name_or_path": "THUDM/chatglm2-6b"}
    made = load_tokenizer(folder(tmp_path, tokenizer_config={"tokenizer_class": "ChatGLMTokenizer"}, config=config))
    turn = "[Round 1]\n\n问\uff1aHi\n\n答\uff1a"
    assert chat(made, "Hi") == f"[gMASK]<sop>{turn}"
    ids = made.encode(chat(made, "Hi"), add_special_tokens=False)
    assert ids == made.encode(turn) == [first + 1, first + 3, *reference.encode(turn)]
    assert made.eos_token_id == reference.eos_id()
    assert made.vocab_size == first + 5
    assert made.token_id("<|user|>") is None


@pytest.mark.parametrize(
    "listed",
    [[3], {"x": {"content": "a"}}, {"10000000": {"content": "a"}}, {"7": "a"}, {"7": {"content": 3}}, {"7": {}}],
)
@pytest.mark.parametrize("name", ["InternLM2Tokenizer", "ChatGLMTokenizer"])
def test_added_tokens_of_a_wrong_form_are_named(listed: Any, name: str, tmp_path: Path) -> None:
    folder(tmp_path, tokenizer_config={"tokenizer_class": name, "added_tokens_decoder": listed})
    train(tmp_path / "tokenizer.model")
    with pytest.raises(ValueError, match=r"added_tokens_decoder in tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_qwen1(tmp_path: Path) -> None:
    ranks = byte_pairs()
    write_tiktoken(tmp_path, ranks)
    folder(tmp_path, tokenizer_config={"tokenizer_class": "QWenTokenizer"})
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    reference = tiktoken.Encoding(
        "small",
        # As the family's own class has it.
        pat_str=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for i, name in enumerate(names)},
    )
    made = load_tokenizer(tmp_path)
    for text in [*SAMPLES, TEXT, "It's 2023\r\n\r\n  x", "<|im_start|>user\nHi<|im_end|>", TEXT[::-1]]:
        ids = reference.encode(text, allowed_special="all")
        assert made.encode(text) == ids
        assert made.decode(ids, skip_special_tokens=False) == reference.decode(ids)
    assert made.encode("e\u0301") == reference.encode("\xe9")  # composed first
    assert made.eos_token_id == len(ranks)
    assert not made.chat_templates
    folder(tmp_path, generation_config={"chat_format": "chatml", "eos_token_id": len(ranks)})
    made = load_tokenizer(tmp_path)
    assert made.end_token_ids == [len(ranks) + 2, len(ranks) + 1]
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert chat(made, "Hi") == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["ChatGLMTokenizer", "ChatGLM4Tokenizer"])
def test_glm4_in_its_first_spelling(name: str, tmp_path: Path) -> None:
    ranks = byte_pairs()
    write_tiktoken(tmp_path, ranks, "tokenizer.model")
    names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|user|>", "<|assistant|>"]
    reference = tiktoken.Encoding(
        "small",
        pat_str=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for i, name in enumerate(names)},
    )
    config: dict[str, Any] = {
        "tokenizer_class": name,
        "added_tokens_decoder": {
            str(len(ranks) + i): {"content": name, "special": True} for i, name in enumerate(names)
        },
        "chat_template": "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}",
    }
    made = load_tokenizer(folder(tmp_path, tokenizer_config=config))
    begin = [len(ranks) + 2, len(ranks) + 4]
    for text in [*SAMPLES, TEXT, "It's 20234\r\n\r\n  x", "e\u0301"]:
        assert made.encode(text) == begin + reference.encode(text)
        assert made.decode(made.encode(text)) == text
    text = chat(made, "Hi", "the family")
    assert made.encode(text, add_special_tokens=False) == reference.encode(text, allowed_special="all")
    assert made.eos_token_id == len(ranks)
    del config["added_tokens_decoder"][str(len(ranks))]
    with pytest.raises(ValueError, match="leaves ids out before it"):
        load_tokenizer(folder(tmp_path, tokenizer_config=config))


def write_tiktoken(path: Path, ranks: Mapping[bytes, int], name: str = "qwen.tiktoken") -> None:
    """The file of Qwen 1."""
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (path / name).write_bytes(b"\n".join(lines))


def byte_pairs() -> dict[bytes, int]:
    """Ranks of all bytes and of the 300 most frequent pairs of `TEXT`, merged one after the other."""
    words = [[bytes([byte]) for byte in f" {word}".encode()] for word in TEXT.split()]
    ranks = {bytes([byte]): byte for byte in range(256)}
    for _ in range(300):
        counts: dict[bytes, int] = {}
        for word in words:
            for left, right in pairwise(word):
                counts[left + right] = counts.get(left + right, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        ranks[best] = len(ranks)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] + word[i + 1] == best:
                    word[i : i + 2] = [best]
                i += 1
    return ranks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nzzz", r"qwen\.tiktoken: line 2 is not a token in base64 and a rank"),
        (b"IQ== 0\nIg== 5", r"qwen\.tiktoken: the ranks of 2 tokens must be 0 to 1"),
        (None, r"qwen\.tiktoken is not there, which QWenTokenizer is read from"),
    ],
)
def test_a_damaged_tiktoken_file_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    folder(tmp_path, tokenizer_config={"tokenizer_class": "QWenTokenizer"})
    (tmp_path / "tokenizer.model").write_bytes(b"")
    if content is not None:
        (tmp_path / "qwen.tiktoken").write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_tokenizer(tmp_path)


def test_aquila_is_read_as_it_is(tmp_path: Path) -> None:
    """Its files are those of GPT-2's class; the model's own code is not asked for."""
    vocab = {chr(i): i - 97 for i in range(97, 123)} | {"th": 26, "the": 27, "</s>": 28}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n", encoding="utf-8")
    folder(
        tmp_path,
        tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "unk_token": "</s>"},
        config={"model_type": "aquila", "auto_map": {"AutoConfig": "configuration_aquila.AquilaConfig"}},
    )
    assert load_tokenizer(tmp_path).encode("thebe") == [27, 1, 4]
