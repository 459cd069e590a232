"""SentencePiece's model file (`tokenizer.model`), a protocol buffer of pieces and settings, without its library."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from pyvllm.gguf_tokenizer import merges_from_scores

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_KINDS: Final = {_UNIGRAM: "unigram", _BPE: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """What a model file says. Lists go by id."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: int
    byte_fallback: bool
    charsmap: bytes
    """SentencePiece's compiled rules for characters; empty: there are none."""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises ValueError naming the file if it is damaged or of a kind other than bpe and unigram."""
    try:
        model = _parse(path.read_bytes())
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a SentencePiece model, or damaged: {error}") from error
    if model.kind not in (_UNIGRAM, _BPE) or not model.pieces:
        kind = _KINDS.get(model.kind, model.kind)
        raise ValueError(f"{path}: a SentencePiece model of {len(model.pieces)} pieces and kind {kind!r}, supported: "
                         "bpe and unigram")  # fmt: skip
    return model


def build_sentencepiece(model: SentencePieceModel, names: Sequence[str]) -> Tokenizer:
    """The tokenizer. `names`: by id, what tokens are called, for some of them perhaps not as in the model.

    Equal to SentencePiece between special tokens: a text is cut at these, and each part has the space of a beginning.
    Exception: a part that is nothing but a token defined by the user has none.
    """
    vocab = {name: token_id for token_id, name in enumerate(names)}
    unknown = next((names[i] for i, kind in enumerate(model.types) if kind == _UNKNOWN), None)
    if model.kind == _BPE:
        scores = [*model.scores, *[0.0] * (len(names) - len(model.scores))]
        merges = merges_from_scores(vocab, scores)
        backend = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
        )
    else:
        scored = list(zip(names, [*model.scores, *[0.0] * (len(names) - len(model.scores))], strict=True))
        unk_id = None if unknown is None else vocab[unknown]
        backend = Tokenizer(models.Unigram(scored, unk_id=unk_id, byte_fallback=model.byte_fallback))
    # Runs of spaces are merged like any other piece.
    whole = [names[i] for i, kind in enumerate(model.types) if kind == _USER_DEFINED and "▁" not in names[i]]
    backend.normalizer = _normalizer(model, whole)
    to_text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    backend.decoder = decoders.Sequence([*to_text, *prefix])
    special = [names[i] for i, kind in enumerate(model.types) if kind in (_UNKNOWN, _CONTROL)]
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    # Found after the normalizer has run on all the text around them.
    backend.add_tokens([AddedToken(name, special=False, normalized=True) for name in whole])
    return backend


def _normalizer(model: SentencePieceModel, whole: Sequence[str]) -> normalizers.Normalizer:
    """`whole`: tokens to be found in the normalised text. They are normalised for that too, and must not change."""
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", "▁"))
    if model.add_dummy_prefix:
        names = "|".join(re.escape(name) for name in whole)
        steps.append(normalizers.Replace(Regex(rf"\A(?!({names})?\z)"), "▁"))
    return normalizers.Sequence(steps)


# --- the file ---------------------------------------------------------------------------------------------------------
#
# ModelProto: 1 pieces, 2 trainer_spec, 3 normalizer_spec. SentencePiece: 1 piece, 2 score, 3 type. TrainerSpec: 3 model
# type, 35 byte_fallback. NormalizerSpec: 2 charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces.


def _parse(data: bytes) -> SentencePieceModel:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == 1:
            piece = dict(_fields(_bytes(value)))
            pieces.append(_bytes(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece[2]))[0] if 2 in piece else 0.0)
            types.append(_number(piece.get(3, 1)))
        elif field == 2:
            trainer = dict(_fields(_bytes(value)))
        elif field == 3:
            normalizer = dict(_fields(_bytes(value)))
    return SentencePieceModel(
        pieces=pieces,
        scores=scores,
        types=types,
        kind=trainer.get(3, _UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        charsmap=_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a number where bytes belong: {value!r}")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"bytes where a number belongs: {value!r}")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a message's fields; numbers of fixed size as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            length, place = _varint(data, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field of wire type {kind} at byte {place}")
        if place + length > len(data):
            raise ValueError(f"field of {length} bytes at byte {place} of {len(data)}")
        yield key >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
