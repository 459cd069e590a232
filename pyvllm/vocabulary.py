"""What each token id adds to a text: the tokenizer's decoder, turned into the table of the Rust detokenizer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class VocabularyTable:
    """The arguments of `_core.Vocabulary`; see there."""

    token_bytes: list[bytes]
    """By id; ids that the tokenizer does not know have no bytes."""
    special_token_ids: list[int]
    byte_token_ids: list[int]
    strip_leading_space: bool


def vocabulary_table(backend: Tokenizer) -> VocabularyTable:
    """The table for a tokenizer, such that joining its bytes gives the text of the tokenizer's own `decode`.

    Known exceptions: a run of byte tokens that is not UTF-8 as a whole (the Rust detokenizer says how), and Metaspace,
    which drops every space of the first token where this drops one.

    Raises ValueError naming the decoder if it is not one of: none, ByteLevel, Metaspace, or SentencePiece's sequence
    of Replace, ByteFallback, Fuse and Strip.
    """
    decoding = _decoding(backend)
    num_ids = max(backend.get_vocab().values(), default=-1) + 1
    tokens = [backend.id_to_token(token_id) for token_id in range(num_ids)]
    # As `decode` does, go by content: of two ids with the same content both are special.
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    bytes_of = [_BYTE_TOKEN.fullmatch(token) if decoding.byte_fallback and token else None for token in tokens]
    return VocabularyTable(
        token_bytes=[
            bytes.fromhex(byte[1]) if byte else decoding.token_bytes(token) if token else b""
            for token, byte in zip(tokens, bytes_of, strict=True)
        ],
        special_token_ids=[token_id for token_id, token in enumerate(tokens) if token in special],
        byte_token_ids=[token_id for token_id, byte in enumerate(bytes_of) if byte],
        strip_leading_space=decoding.strip_leading_space,
    )


_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: those that print stand for themselves, the others for characters from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET: Final = _byte_alphabet()
"""Character of a byte-level token -> byte."""


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    strip_leading_space: bool = False

    def token_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([BYTE_ALPHABET[character] for character in token])
            except KeyError:  # An added token, spelled as it is. The decoder takes a token in one way or the other.
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (self.prefix + token).encode()


def _decoding(backend: Tokenizer) -> _Decoding:
    if backend.decoder is None:  # Tokens are joined by spaces.
        return _Decoding(prefix=" ", strip_leading_space=True)
    description: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = _steps(description)
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return _Decoding(byte_level=True)
        case ["Metaspace"] | ["ByteFallback", "Metaspace"]:
            return _Decoding(
                byte_fallback=len(steps) == 2,
                replacements=((steps[-1]["replacement"], " "),),
                strip_leading_space=steps[-1].get("prepend_scheme", "always") != "never",
            )
    decoding = _sentencepiece(steps)
    if decoding is None:
        raise ValueError(
            f"the tokenizer's decoder is not supported: {json.dumps(description, ensure_ascii=False)[:500]}; "
            "supported: ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip"
        )
    return decoding


def _steps(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description["type"] != "Sequence":
        return [description]
    return [step for part in description["decoders"] for step in _steps(part)]


def _sentencepiece(steps: list[dict[str, Any]]) -> _Decoding | None:
    """Replace*, ByteFallback?, Fuse?, Strip?: in this order, and Strip only of one space at the start of the whole."""
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    kinds = [step["type"] for step in steps]
    if not set(kinds) <= set(order) or kinds != sorted(kinds, key=order.index):
        return None
    if any(kinds.count(kind) > 1 for kind in order[1:]) or ("Strip" in kinds and "Fuse" not in kinds):
        return None
    replacements = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    if any(not old for old, _ in replacements):  # a regular expression
        return None
    strip = steps[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strip["content"] != " " or strip["start"] not in (0, 1) or strip["stop"] != 0:
        return None
    return _Decoding(
        byte_fallback="ByteFallback" in kinds,
        replacements=tuple(replacements),
        strip_leading_space=strip["start"] == 1,
    )
