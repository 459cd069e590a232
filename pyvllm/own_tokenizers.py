"""Tokenizers of families whose checkpoints come with a class of their own, in code that is never run here.

What that code does beyond reading the vocabulary is written down below: which tokens it adds to a text, what special
tokens it has, and the form of a chat, which such checkpoints do not store.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pyvllm.gguf_tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, merges_from_scores
from pyvllm.json_file import read_object
from pyvllm.sentencepiece_model import build_sentencepiece, read_sentencepiece
from pyvllm.vocabulary import BYTE_ALPHABET


@dataclass(frozen=True, kw_only=True)
class OwnTokenizer:
    """A tokenizer, and what a `tokenizer_config.json` would say beside it."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, ... -> content. `eos_token` ends a turn of a chat, where that is another token, and may
    then be a token like others."""
    settings: Mapping[str, Any]
    """The contents of `tokenizer_config.json`, with tokens called and found as here."""
    chat_template: str | None = None
    """For a folder that stores none."""
    ends: tuple[str, ...] = ()
    """Other tokens that end a turn."""


def build_own_tokenizer(folder: Path, settings: Mapping[str, Any]) -> OwnTokenizer | None:
    """The tokenizer of a folder whose settings name one of these classes; None if they do not.

    `settings`: the contents of `tokenizer_config.json`. Raises FileNotFoundError or ValueError naming the file that is
    missing or damaged.
    """
    build = _CLASSES.get(str(settings.get("tokenizer_class")))
    return (
        None if build is None else build(folder, dict(settings) | {"added_tokens_decoder": _listed(folder, settings)})
    )


def _internlm(folder: Path, settings: Mapping[str, Any]) -> OwnTokenizer:
    """InternLM 1 to 3. The first has a form of chat that its files do not store."""
    tokens = _Tokens.read(folder, settings)
    chat = "<eoa>" in tokens.ids
    return OwnTokenizer(
        backend=tokens.backend([], _bos_eos(tokens, settings)),
        special_tokens=tokens.special_tokens | ({"eos_token": "<eoa>"} if chat else {}),
        settings=settings,
        chat_template=_INTERNLM_CHAT if chat else None,
    )


def _baichuan(folder: Path, settings: Mapping[str, Any]) -> OwnTokenizer:
    """Baichuan 1 and 2. In a chat two reserved tokens, which generation_config.json names, stand for the roles."""
    tokens = _Tokens.read(folder, settings)
    config = _object(folder / "generation_config.json")
    ids = [config.get(name) for name in ("user_token_id", "assistant_token_id")]
    roles = [tokens.names[i] for i in ids if type(i) is int and 0 <= i < len(tokens.names)]
    template = None
    if len(roles) == 2:
        template = _BAICHUAN_CHAT.replace("USER", roles[0]).replace("ASSISTANT", roles[1])
    return OwnTokenizer(
        backend=tokens.backend(roles, _bos_eos(tokens, settings)),
        special_tokens=tokens.special_tokens,
        settings=settings,
        chat_template=template,
    )


_CHATGLM_TOKENS: Final = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
_CHATGLM_ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


def _chatglm(folder: Path, settings: Mapping[str, Any]) -> OwnTokenizer:
    """ChatGLM 2 and 3: special tokens follow the vocabulary, and every text begins with two of them.

    Its own code and files call `<sop>` and `<eop>` sop and eop, which a text may contain.
    """
    if _TIKTOKEN_LINE.match(_first_bytes(folder / "tokenizer.model")):  # GLM 4 had this class at first.
        return _glm4(folder, settings)
    second = "chatglm2" in str(_object(folder / "config.json").get("_name_or_path")).lower()
    added = _CHATGLM_TOKENS if second else (*_CHATGLM_TOKENS, *_CHATGLM_ROLES)
    known = {*added, "sop", "eop"}
    listed = {key: token for key, token in settings["added_tokens_decoder"].items() if token["content"] not in known}
    settings = dict(settings) | {"added_tokens_decoder": listed, "additional_special_tokens": None}
    if isinstance(stored := settings.get("chat_template"), str):
        settings["chat_template"] = stored.replace("[gMASK]sop", "[gMASK]<sop>")
    tokens = _Tokens.read(folder, settings, added)
    return OwnTokenizer(
        backend=tokens.backend(added, (["[gMASK]", "<sop>"], [])),
        # In the third, the user's turn ends what the assistant says.
        special_tokens=tokens.special_tokens | ({} if second else {"eos_token": "<|user|>"}),
        settings=settings,
        chat_template=_CHATGLM2_CHAT if second else _CHATGLM3_CHAT,
        ends=() if second else ("<|observation|>",),
    )


def _glm4(folder: Path, settings: Mapping[str, Any]) -> OwnTokenizer:
    """GLM 4 in its first spelling: bytes merged by rank. Its files have the special tokens and the chat."""
    backend = _tiktoken(folder / "tokenizer.model", LLAMA3_SPLIT, settings)
    listed = sorted((int(token_id), token["content"]) for token_id, token in settings["added_tokens_decoder"].items())
    for token_id, content in listed:
        backend.add_special_tokens([AddedToken(content, normalized=False)])
        if backend.token_to_id(content) != token_id:
            raise ValueError(
                f"{folder}: token {token_id} of tokenizer_config.json, {content!r}, leaves ids out before it"
            )
    begin = {content: token_id for token_id, content in listed if content in ("[gMASK]", "<sop>")}
    _put_around(backend, begin, (list(begin), []))
    return OwnTokenizer(backend=backend, special_tokens={"eos_token": "<|endoftext|>"}, settings=settings)


def _qwen(folder: Path, settings: Mapping[str, Any]) -> OwnTokenizer:
    """Qwen 1: bytes merged by rank; 208 special tokens follow."""
    backend = _tiktoken(folder / "qwen.tiktoken", QWEN2_SPLIT, settings)
    backend.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    chat = _object(folder / "generation_config.json").get("chat_format") == "chatml"
    return OwnTokenizer(
        backend=backend,
        special_tokens={"eos_token": "<|im_end|>" if chat else "<|endoftext|>", "pad_token": "<|endoftext|>"},
        settings=settings,
        chat_template=_QWEN_CHAT if chat else None,
        ends=("<|im_start|>",) if chat else (),
    )


def _tiktoken(path: Path, split: str, settings: Mapping[str, Any]) -> Tokenizer:
    """Bytes merged by rank within what the pattern `split` matches, as tiktoken does."""
    ranks = _read_tiktoken(path, settings)
    spelling = {byte: character for character, byte in BYTE_ALPHABET.items()}
    vocab = {"".join(spelling[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = merges_from_scores(vocab, [-float(rank) for rank in range(len(vocab))])
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _put_around(backend: Tokenizer, ids: Mapping[str, int], around: tuple[Sequence[str], Sequence[str]]) -> None:
    """Let every text have tokens before and after it. `ids`: at least of these."""
    before, after = around
    tokens = [
        {"id": f"t{ids[name]}", "ids": [ids[name]], "tokens": [name]} for name in dict.fromkeys((*before, *after))
    ]
    pieces = [*(f"t{ids[name]}" for name in before), "$A", *(f"t{ids[name]}" for name in after)]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=tokens)


_CLASSES: Final[Mapping[str, Callable[[Path, Mapping[str, Any]], OwnTokenizer]]] = {
    "InternLMTokenizer": _internlm,
    "InternLM2Tokenizer": _internlm,
    "InternLM2TokenizerFast": _internlm,
    "InternLM3Tokenizer": _internlm,
    "BaiChuanTokenizer": _baichuan,
    "BaichuanTokenizer": _baichuan,
    "ChatGLMTokenizer": _chatglm,
    "ChatGLM4Tokenizer": _glm4,
    "QWenTokenizer": _qwen,
}


# --- chats as the families' own code writes them ----------------------------------------------------------------------


_INTERNLM_CHAT: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|System|>:' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|User|>:' + message['content'] + '\n' }}"
    "{% else %}{{ '<|Bot|>:' + message['content'] + '<eoa>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Bot|>:' }}{% endif %}"
)
_BAICHUAN_CHAT: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT' }}{% endif %}"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT' }}{% endif %}"
)
_CHATGLM2_CHAT: Final = (
    "{{ '[gMASK]<sop>' }}{% set turn = namespace(number=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set turn.number = turn.number + 1 %}"
    "{{ '[Round ' + turn.number | string + ']\n\n问\uff1a' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '答\uff1a' + message['content'] + '\n\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '答\uff1a' }}{% endif %}"
)
_CHATGLM3_CHAT: Final = (
    "{{ '[gMASK]<sop>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n ' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_QWEN_CHAT: Final = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """The tokens of a `tokenizer.model`, some under names that the settings give them."""

    model: Any
    names: list[str]
    """By id."""
    special_tokens: dict[str, str]

    @property
    def ids(self) -> dict[str, int]:
        return {name: token_id for token_id, name in enumerate(self.names)}

    @classmethod
    def read(cls, folder: Path, settings: Mapping[str, Any], added: Sequence[str] = ()) -> _Tokens:
        """`added` follow the vocabulary of the file."""
        path = folder / "tokenizer.model"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there, which {settings.get('tokenizer_class')} is read from")
        model = read_sentencepiece(path)
        names = [*model.pieces, *added]
        for token_id, token in settings["added_tokens_decoder"].items():
            names += [f"[EMPTY_{i}]" for i in range(len(names), int(token_id) + 1)]
            names[int(token_id)] = token["content"]
        special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        for name in (*special_tokens, "pad_token"):
            given = settings.get(name)
            given = given.get("content") if isinstance(given, Mapping) else given
            if isinstance(given, str):
                special_tokens[name] = given
        known = {name: token for name, token in special_tokens.items() if token in names}
        return cls(model=model, names=names, special_tokens=known)

    def backend(self, special: Sequence[str], around: tuple[Sequence[str], Sequence[str]]) -> Tokenizer:
        """`special`: tokens to be found in a text beside those of the file. `around`: those added before and after."""
        backend = build_sentencepiece(self.model, self.names)
        special = [*self.special_tokens.values(), *special]
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        _put_around(backend, self.ids, around)
        return backend


def _bos_eos(tokens: _Tokens, settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What these classes put around a text: BOS unless the settings say no, EOS if they say so."""
    added = []
    for name, default in (("bos", True), ("eos", False)):
        token = tokens.special_tokens.get(f"{name}_token")
        wanted = settings.get(f"add_{name}_token")
        added.append([token] if token is not None and (default if wanted is None else wanted) else [])
    return added[0], added[1]


def _object(path: Path) -> Mapping[str, Any]:
    return read_object(path) if path.is_file() else {}


# Far beyond any vocabulary: a corrupt id must not fill the memory with names.
_MOST_IDS: Final = 10_000_000


def _listed(folder: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`added_tokens_decoder`: id -> content and flags. These classes cut texts at its tokens before all else."""
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise ValueError(f"{folder}: added_tokens_decoder in tokenizer_config.json is {listed!r}, must be an object")
    for key, token in listed.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if not (key.isdecimal() and int(key) < _MOST_IDS and isinstance(content, str) and content):
            raise ValueError(
                f"{folder}: added_tokens_decoder in tokenizer_config.json has {key!r}: {token!r}, must be an id below "
                f"{_MOST_IDS} and an object with content"
            )
    return {key: dict(token) | {"normalized": False} for key, token in listed.items()}


_TIKTOKEN_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")


def _first_bytes(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(200)


def _read_tiktoken(path: Path, settings: Mapping[str, Any]) -> dict[bytes, int]:
    """Lines of a token in base64 and its rank, which is its id."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there, which {settings.get('tokenizer_class')} is read from")
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{path}: line {number} is not a token in base64 and a rank: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the ranks of {len(ranks)} tokens must be 0 to {len(ranks) - 1}")
    return ranks
