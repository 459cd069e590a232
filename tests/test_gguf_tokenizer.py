"""Tokenizers made from GGUF metadata, against the tokenizers of the same models in Hugging Face's format."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from pyvllm.gguf import GgufFile
from pyvllm.gguf_tokenizer import build_gguf_tokenizer, merges_from_scores
from pyvllm.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "Hello, my name is Lily. She's 12 years old; they'LL pay 1234.50!",
    " two  spaces  \n\n\tand \r\n lines  ",
    "def f(x):\n    return x ** 2  # squares\n",
    "ďábelské hi😀 👨‍👩‍👧 नमस्ते 你好世界 ½ Ⅷ ٣٤ e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


def gguf(metadata: dict[str, Any]) -> Tokenizer:
    keys = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return Tokenizer.from_gguf(GgufFile(path=Path("made.gguf"), metadata=keys, tensors={}))


def byte_level(**overrides: Any) -> dict[str, Any]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "12", "</s>", "<think>", "<s>"]
    types = [*[NORMAL] * 258, CONTROL, USER_DEFINED, CONTROL]
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": ["t h", "1 2"]}
    return fields | {"bos_token_id": 260, "eos_token_id": 258} | overrides


def sentencepiece(**overrides: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "hi", "▁hi"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6]
    scores = [*[0.0] * 259, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    fields = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return fields | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | overrides


def test_smollm2_equals_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(smollm2)
    reference = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    # SmolLM2's tokenizer.json cuts before and after each digit, which transformers does not take from a GGUF file.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    for text in [*TEXTS, "There are 220 castles.  40 percent of them", "x" * 3000]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    names = {name: token for name, token in reference.special_tokens_map.items() if token is not None}
    assert tokenizer.special_tokens == names
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.vocab_size == 49152


def test_smollm2_chat_equals_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(smollm2)
    reference = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answered = [{"role": "system", "content": "Be brief."}, *question, {"role": "assistant", "content": "It is"}]
    for messages, options in (
        (question, {"add_generation_prompt": True}),
        (answered, {"add_generation_prompt": False}),
        (answered, {"add_generation_prompt": False, "continue_final_message": True}),
    ):
        text = tokenizer.render_chat(messages, **options)  # type: ignore[arg-type]
        assert text == reference.apply_chat_template(messages, tokenize=False, **options)
        ids = reference.apply_chat_template(messages, return_dict=False, **options)
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_sentencepiece_from_scores_equals_tokenizer_json(stories260k: Path) -> None:
    description = json.loads((stories260k / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(description["model"]["vocab"], key=description["model"]["vocab"].get)
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    scores = [0.0 if kind != NORMAL else -float(token_id - 259) for token_id, kind in enumerate(types)]
    tokenizer = gguf(sentencepiece(tokens=tokens, token_type=types, scores=scores))
    reference = load_tokenizer(stories260k)
    for text in [*TEXTS, "Once upon a time, there was a little girl named Lily.", "<s>hi</s>", "x" * 500]:
        assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.vocabulary == reference.vocabulary
    assert tokenizer.bos_token_id == 1


def test_merges_from_scores_are_ordered_by_their_result() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "abb": 3, "bb": 4}
    assert merges_from_scores(vocab, [0, 0, -2, -3, -1]) == [("b", "b"), ("a", "b"), ("ab", "b"), ("a", "bb")]


def test_without_a_space_prefix_the_first_space_is_text() -> None:
    tokenizer = gguf(sentencepiece(add_space_prefix=False))
    assert tokenizer.encode("hi", add_special_tokens=False) == [263]
    assert tokenizer.decode(tokenizer.encode(" hi")) == " hi"
    assert not tokenizer.vocabulary.strip_leading_space
    assert gguf(sentencepiece()).encode("hi") == [1, 264]


@pytest.mark.parametrize(
    ("make", "overrides", "expected"),
    [
        (sentencepiece, {}, [1]),
        (sentencepiece, {"add_bos_token": False}, []),
        (sentencepiece, {"add_eos_token": True}, [1, 2]),
        (byte_level, {}, []),
        (byte_level, {"add_bos_token": True}, [260]),
        (byte_level, {"pre": "llama-bpe"}, [260]),
        (byte_level, {"pre": "llama-bpe", "add_bos_token": False, "add_eos_token": True}, [258]),
        (byte_level, {"add_bos_token": True, "bos_token_id": None}, []),
    ],
    ids=str,
)
def test_bos_and_eos_are_added_as_the_file_says(make: Any, overrides: dict[str, Any], expected: list[int]) -> None:
    assert gguf(make(**overrides)).encode("") == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", [["Ġ", "Ġ123"], ["ĊĊ"], ["it", "'s"], ["IT", "'", "S"], ["a", "!(", "Ġb"]]),
        ("smollm", [["ĠĠ", "1", "2", "3"], ["ĊĊ"], ["it", "'s"], ["IT", "'", "S"], ["a", "!(", "Ġb"]]),
        ("llama-bpe", [["Ġ", "Ġ", "123"], ["ĊĊ"], ["it", "'s"], ["IT", "'S"], ["a", "!(", "Ġb"]]),
        ("qwen2", [["Ġ", "Ġ", "1", "2", "3"], ["ĊĊ"], ["it", "'s"], ["IT", "'S"], ["a", "!(", "Ġb"]]),
        ("tekken", [["Ġ", "Ġ", "1", "2", "3"], ["ĊĊ"], ["it", "'s"], ["IT", "'S"], ["a", "!(", "Ġb"]]),
        ("default", [["Ġ", "Ġ", "123"], ["ĊĊ"], ["it", "'", "s"], ["IT", "'", "S"], ["a", "!(", "Ġb"]]),
    ],
)
def test_text_is_cut_by_the_rules_of_the_model(pre: str, expected: list[list[str]]) -> None:
    keys = {f"tokenizer.ggml.{key}": value for key, value in byte_level(pre=pre).items()}
    made = build_gguf_tokenizer(GgufFile(path=Path("made.gguf"), metadata=keys, tensors={}))
    assert made.backend.pre_tokenizer is not None
    for text, pieces in zip(["  123", "\n\n", "it's", "IT'S", "a!( b"], expected, strict=True):
        assert [piece for piece, _ in made.backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_patterns_equal_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    from pyvllm.gguf_tokenizer import _SPLITS

    shared = _SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert {"llama-bpe", "qwen2", "tekken"} <= shared
    for pre in shared:
        assert _SPLITS[pre] == (GGUF_PRE_TOKENIZER_SPLITS[pre],)


def test_whole_pieces_come_before_merges() -> None:
    # "the" is a token that no merge makes.
    fields = byte_level()
    fields["tokens"][257] = "the"
    fields["merges"] = ["t h"]
    assert gguf(fields | {"pre": "gpt-2"}).encode("the") == [256, fields["tokens"].index("e")]
    assert gguf(fields | {"pre": "llama-bpe", "add_bos_token": False}).encode("the") == [257]


def test_kinds_of_tokens() -> None:
    tokenizer = gguf(byte_level())
    ids = tokenizer.encode("th<think>12</s>")
    assert ids == [256, 259, 257, 258]
    assert tokenizer.decode(ids) == "th<think>12"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "th<think>12</s>"
    assert tokenizer.added_tokens == {"</s>": 258, "<think>": 259, "<s>": 260}


def test_chat_template_of_the_file() -> None:
    made = gguf(byte_level() | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    assert made.render_chat([{"role": "user", "content": "hi"}]) == "<s>hi"
    with pytest.raises(ValueError, match="no chat template"):
        gguf(byte_level()).render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (byte_level(model="t5"), r"tokenizer\.ggml\.model is 't5', supported: gpt2, llama"),
        (byte_level(pre="nobody"), r"tokenizer\.ggml\.pre is 'nobody', supported: .*llama-bpe"),
        (byte_level(tokens=None), r"tokenizer\.ggml\.tokens is missing"),
        (byte_level(tokens=[1, 2]), r"tokenizer\.ggml\.tokens is missing or not a list of strings"),
        (byte_level(tokens=["a", "b", "a"]), r"tokenizer\.ggml\.tokens has 'a' twice"),
        (byte_level(merges=["t q"]), r"tokenizer\.ggml\.merges has 't q'"),
        (byte_level(merges=["th"]), r"tokenizer\.ggml\.merges has 'th'"),
        (byte_level(merges=None), r"tokenizer\.ggml\.merges is missing"),
        (byte_level(token_type=[1]), r"tokenizer\.ggml\.token_type .* each of the 261 tokens"),
        (byte_level(bos_token_id=261), r"tokenizer\.ggml\.bos_token_id is 261, must be in \[0, 260\]"),
        (byte_level(eos_token_id=-1), r"tokenizer\.ggml\.eos_token_id is -1"),
        (sentencepiece(scores=[0.0]), r"tokenizer\.ggml\.scores .* each of the 265 tokens"),
    ],
)
def test_wrong_metadata_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"made\.gguf: {message}"):
        gguf(fields)


def test_empty_tokens_do_not_collide() -> None:
    fields = byte_level()
    fields["tokens"][259] = fields["tokens"][260] = ""
    assert gguf(fields).token_text(259) == "[EMPTY_259]"
