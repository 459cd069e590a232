"""The tokenizer that a GGUF file describes in its metadata.

llama.cpp names the way text is cut before byte-pair merging (`tokenizer.ggml.pre`) and compiles the rules in; the file
itself has the vocabulary, the merges or scores, and a type for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pyvllm.gguf import GgufFile

_SPECIAL_TOKENS: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}
"""Hugging Face's name of a special token -> llama.cpp's (its spelling)."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Of the values of `tokenizer.ggml.token_type`, those whose tokens are found in a text before it is cut."""


@dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
    """A tokenizer, and what Hugging Face's `tokenizer_config.json` would say beside it."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, ... -> content."""
    chat_template: str | None


def build_gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Make the tokenizer of a GGUF file.

    Raises ValueError naming the file and the key for metadata that is missing, wrong or of an unknown kind.
    """
    try:
        return _build(file.metadata)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _build(metadata: Mapping[str, Any]) -> GgufTokenizer:
    tokens = _strings(metadata, "tokens")
    # As llama.cpp does: an id without content must not stand in the way of another.
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise ValueError(f"tokenizer.ggml.tokens has {twice!r} twice")
    special_tokens = _special_tokens(metadata, tokens)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "default")
        backend = _byte_level(vocab, _merges(metadata, vocab), pre)
        add_bos = pre in _WITH_BOS
    elif kind == "llama":
        backend = _sentencepiece(metadata, vocab, special_tokens.get("unk_token"))
        add_bos = True
    else:
        raise ValueError(f"tokenizer.ggml.model is {kind!r}, supported: gpt2, llama")
    _add_tokens(backend, metadata, tokens)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _set_bos_eos(backend, special_tokens, add_bos=add_bos, add_eos=add_eos)
    template = metadata.get("tokenizer.chat_template")
    return GgufTokenizer(backend=backend, special_tokens=special_tokens, chat_template=template)


def _set_bos_eos(backend: Tokenizer, special_tokens: Mapping[str, str], *, add_bos: bool, add_eos: bool) -> None:
    added = {name: special_tokens.get(f"{name}_token") for name, on in (("bos", add_bos), ("eos", add_eos)) if on}
    ids = {name: backend.token_to_id(token) for name, token in added.items() if token is not None}
    # Names, since a template gives "$" and ":" in a token a meaning of their own.
    pieces = [piece for piece in ("bos", "$A", "eos") if piece == "$A" or ids.get(piece) is not None]
    special = [{"id": name, "ids": [ids[name]], "tokens": [added[name]]} for name in pieces if name != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"tokenizer.ggml.{key} is missing or not a list of strings")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> Sequence[float]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or len(values) < count or not all(isinstance(v, int | float) for v in values):
        raise ValueError(f"tokenizer.ggml.{key} is missing or not a number for each of the {count} tokens")
    return values


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    special_tokens = {}
    for name, key in _SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ValueError(f"tokenizer.ggml.{key}_token_id is {token_id!r}, must be in [0, {len(tokens) - 1}]")
        special_tokens[f"{name}_token"] = tokens[token_id]
    return special_tokens


def _add_tokens(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    if "tokenizer.ggml.token_type" not in metadata:
        return
    types = _numbers(metadata, "token_type", len(tokens))
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)


# --- byte-level -------------------------------------------------------------------------------------------------------


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of the pieces that LLaMA 3, GLM 4 and others merge bytes within."""
QWEN2_SPLIT: Final = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
"""Pattern of the pieces that Qwen 1 to 3 merge bytes within."""
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPLITS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"), (LLAMA3_SPLIT,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (LLAMA3_SPLIT,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), (QWEN2_SPLIT,)),
}
"""`tokenizer.ggml.pre` -> patterns that cut a text one after the other; what lies between matches is a piece too."""

_WHOLE_PIECES: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral", "tekken"})
"""Where a piece that is a token is that token, whatever the merges say."""
_WITH_BOS: Final = _WHOLE_PIECES
"""Where BOS is added unless the file says otherwise."""
_COMPOSED: Final = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Where the model's own tokenizer composes characters first (which llama.cpp leaves out)."""


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], pre: object) -> Tokenizer:
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre is {pre!r}, supported: {', '.join(sorted(_SPLITS))}")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_PIECES))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(metadata, "merges"):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(f"tokenizer.ggml.merges has {merge!r}, whose parts or result are not tokens")
        merges.append((left, right))
    return merges


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int], unk_token: str | None) -> Tokenizer:
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata, vocab)
    else:
        merges = merges_from_scores(vocab, _numbers(metadata, "scores", len(vocab)))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    to_piece: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*to_piece, normalizers.Replace(" ", "▁")])
    to_text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)] if prefix else to_text)
    return backend


def merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges, best first, that build SentencePiece's tokens: of all pairs, the one whose result scores highest."""
    merges = [
        (scores[token_id], token[:cut], token[cut:])
        for token, token_id in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    # Of equal results the order is that of transformers: the longer left part first.
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]
