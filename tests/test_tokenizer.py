"""`Tokenizer` against the tokenizers library and transformers, and the Rust detokenizer against their `decode`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pyvllm import _core
from pyvllm.tokenizer import Tokenizer, load_tokenizer
from pyvllm.vocabulary import vocabulary_table
from tests.conftest import TinyCheckpoint

REPLACEMENT = "\ufffd"
SAMPLES = [
    "Hello, world",
    "",
    " two  spaces ",
    "a\nb\tc",
    "ďábelské hi😀",
    "👨‍👩‍👧 नमस्ते 你好",
    "</s> <tool>x",
    "\u2581",
]


def byte_level() -> tokenizers.Tokenizer:
    """Bytes, two merges, two special tokens, and added ones: plain, with spaces, and one that spells a byte."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "Ġh", "Ġhi"]
    merges = [("Ġ", "h"), ("Ġh", "i")]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|é|>"])
    backend.add_tokens([AddedToken("<tool>"), AddedToken("two words"), AddedToken("ÿé"), AddedToken("日本")])
    return backend


def byte_fallback(*, strip: bool = True) -> tokenizers.Tokenizer:
    """SentencePiece as in LLaMA, or with `strip` off as in Gemma."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "i", "e", "l", "o", "▁h", "▁hi", "é", "▁▁", "你"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Replace(" ", "▁")
    if strip:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), backend.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁h", -1.0), ("i", -1.0), ("▁hi", -1.0), ("é", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>"])
    return backend


def words() -> tokenizers.Tokenizer:
    """Without a decoder, tokens are joined by spaces."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "bc": 2, "é": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>"])
    return backend


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_no_strip": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "words": words,
}
BACKENDS = {name: make() for name, make in MAKERS.items()}
TOKENIZERS = {name: Tokenizer(backend, special_tokens={}, chat_templates={}) for name, backend in BACKENDS.items()}


def core_vocabulary(tokenizer: Tokenizer) -> _core.Vocabulary:
    table = tokenizer.vocabulary
    return _core.Vocabulary(
        table.token_bytes,
        special_token_ids=table.special_token_ids,
        byte_token_ids=table.byte_token_ids,
        strip_leading_space=table.strip_leading_space,
    )


VOCABULARIES = {name: core_vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def check_streamed(name: str, tokenizer: Tokenizer, vocab: _core.Vocabulary, ids: list[int], skip: bool) -> None:
    """Id by id, the text equals the whole decode of all so far wherever that is valid; and nothing is taken back."""
    detokenizer = _core.Detokenizer(vocab, [], skip_special_tokens=skip)
    text = ""
    for end in range(1, len(ids) + 1):
        text += detokenizer.push([ids[end - 1]])
        whole = tokenizer.decode(ids[:end], skip_special_tokens=skip)
        ended = _core.Detokenizer(vocab, [], skip_special_tokens=skip)
        joined = ended.push(ids[:end]) + ended.finish()
        assert joined.startswith(text)
        if "fallback" in name and REPLACEMENT in whole:
            continue  # the listed exception: a run of byte tokens that is not UTF-8 as a whole
        assert joined == whole
        if REPLACEMENT not in whole:
            assert text == whole, "all of it is certain"


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_b095_streamed_text_equals_the_whole_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    spread = tokenizer.encode("h😀i é你", add_special_tokens=False)
    one = st.lists(st.integers(0, tokenizer.vocab_size + 1), min_size=1, max_size=1)
    parts = data.draw(st.lists(st.one_of(one, st.just(spread), st.just(spread[:-2])), max_size=8))
    ids = [token_id for part in parts for token_id in part]
    check_streamed(name, tokenizer, VOCABULARIES[name], ids, skip)


@pytest.mark.parametrize("name", ["smollm2", "stories260k"])
def test_b095_real_vocabularies(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(request.getfixturevalue(name))
    vocab = core_vocabulary(tokenizer)
    kind = "byte_fallback" if name == "stories260k" else "byte_level"

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12), st.text(max_size=8), st.booleans())
    def check(ids: list[int], text: str, skip: bool) -> None:
        check_streamed(kind, tokenizer, vocab, [*ids, *tokenizer.encode(text), *ids[:2]], skip)

    check()


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", SAMPLES)
def test_b090_b093_output_goes_on_where_the_prompt_ends(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    for cut in range(len(ids) + 1):
        prompt = _core.Detokenizer(VOCABULARIES[name], [], skip_special_tokens=False).push(ids[:cut])
        detokenizer = _core.Detokenizer(VOCABULARIES[name], ids[:cut], skip_special_tokens=False)
        assert prompt + detokenizer.push(ids[cut:]) + detokenizer.finish() == whole


def test_b088_b092_deltas() -> None:
    detokenizer = _core.Detokenizer(VOCABULARIES["byte_level"])
    ids = TOKENIZERS["byte_level"].encode("hi😀")
    assert [detokenizer.push([token_id]) for token_id in ids] == ["h", "i", "", "", "", "😀"]
    assert detokenizer.push([5, 10_000, 6]) == TOKENIZERS["byte_level"].decode([5, 6])
    assert TOKENIZERS["byte_level"].decode([5, 10_000, -1, 2**40, 6]) == TOKENIZERS["byte_level"].decode([5, 6])


def test_b094_added_tokens_in_the_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text = "a<tool>b a\nb c"
    detokenizer = _core.Detokenizer(VOCABULARIES["byte_level"])
    assert detokenizer.push(tokenizer.encode(text)) == text == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_fallback_no_strip"])
@pytest.mark.parametrize("text", SAMPLES[:6])
def test_round_trip(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "hi", text]) == [ids, tokenizer.encode("hi"), ids]
    space = " " if text and name == "byte_fallback" else ""
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == space + text


def test_token_text_keeps_spaces_and_marks_parts_of_characters() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("hi h")] == [" hi", " h"]
    assert tokenizer.token_text(3 + 0xF0) == REPLACEMENT
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.token_text(-1) == tokenizer.token_text(10**6) == ""


@pytest.mark.parametrize("text", [None, 5, b"x", ["a"], "a\ud800"])
def test_what_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="text to tokenize"):
        TOKENIZERS["byte_level"].encode(text)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: Any) -> None:
    backend = words()
    backend.decoder = decoder
    with pytest.raises(ValueError, match=r"decoder is not supported.*(WordPiece|CTC|Sequence)"):
        vocabulary_table(backend)


def test_sequences_of_sequences_are_flattened() -> None:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])])
    assert vocabulary_table(backend) == vocabulary_table(byte_level())


# --- folders ----------------------------------------------------------------------------------------------------------


def save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


BASE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        BASE | {"add_bos_token": True},
        BASE | {"add_bos_token": False},
        BASE | {"add_bos_token": True, "add_eos_token": True},
        BASE | {"eos_token": {"content": "</s>", "__type": "AddedToken"}},
        BASE | {"eos_token": "<tool>"},
        BASE | {"additional_special_tokens": ["<tool>", "Ġhi"]},
        BASE | {"added_tokens_decoder": {"259": {"content": "Ġhi", "special": True, "normalized": False}}},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_template", [False, True])
def test_settings_mean_what_they_mean_to_transformers(
    config: dict[str, Any], has_template: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    backend = byte_level()
    if has_template:
        backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 256)])
    save(tmp_path, backend, config)
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLES:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    if "bos_token" in config:  # transformers has defaults of its own
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
        assert tokenizer.special_tokens == reference.special_tokens_map
    assert tokenizer.added_tokens == reference.get_added_vocab()


def test_tokens_listed_only_in_the_settings_are_added(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    listed = {str(size): {"content": "<new>", "special": True}, str(size + 1): {"content": "<other>"}}
    config = BASE | {"added_tokens_decoder": listed, "pad_token": "<pad>"}
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), config))
    assert tokenizer.encode("<new><other>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<other>"
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.pad_token_id is None, "a token that the vocabulary lacks has no row in the model"


def test_older_folders_name_special_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), {"eos_token": "<s>"})
    content = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(content), encoding="utf-8")
    assert load_tokenizer(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_without_settings_nothing_has_a_name(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level()) / "tokenizer.json")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_tokens) == (None, None, {})
    assert tokenizer.encode("hi") == byte_level().encode("hi").ids


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(load_tokenizer(save(tmp_path, backend)).encode("abcdef")) == 6


def test_other_formats_are_read_through_transformers(tmp_path: Path) -> None:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>", "Ġh"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ h\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a h") == [pieces.index("a"), pieces.index("Ġh")]
    assert tokenizer.eos_token_id == 256
    assert tokenizer.decode(tokenizer.encode("hi😀<|endoftext|>")) == "hi😀"


def test_s043_no_code_of_the_model_runs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')", encoding="utf-8")
    (tmp_path / "vocab.json").write_text("{}", encoding="utf-8")
    auto_map = {"AutoTokenizer": ["tokenizer.Mine", "tokenizer.Mine"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}), encoding="utf-8")
    with pytest.raises(ValueError, match="transformers cannot read the tokenizer"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"}', "\ufffd"])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(content or "[]", encoding="utf-8")
    if content not in ("{}", '{"version": "1.0"}'):
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: "):
            load_tokenizer(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", tmp_path / "missing.json"):
        with pytest.raises(FileNotFoundError, match="no tokenizer at"):
            load_tokenizer(path)


def test_transformers_is_not_imported(tiny_checkpoint: TinyCheckpoint) -> None:
    program = (
        "import sys; from pathlib import Path; from pyvllm.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(Path(sys.argv[1]))\n"
        "tokenizer.decode(tokenizer.encode(tokenizer.render_chat([{'role': 'user', 'content': 'hi'}])))\n"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tiny_checkpoint("llama"))], check=True)
