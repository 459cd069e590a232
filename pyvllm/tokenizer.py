"""`Tokenizer`: text to token ids and back, from a `tokenizer.json`, a GGUF file, or what transformers can convert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from pyvllm.chat import choose_template, render_chat
from pyvllm.config import EngineArgs
from pyvllm.gguf import GgufFile, read_gguf
from pyvllm.gguf_tokenizer import build_gguf_tokenizer
from pyvllm.hub import ModelFiles, resolve_model
from pyvllm.json_file import read_object
from pyvllm.own_tokenizers import build_own_tokenizer
from pyvllm.vocabulary import VocabularyTable, vocabulary_table

_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a name; templates know them by it."""

_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""What an added token has beside its content."""

_OTHER_FORMATS: Final = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken", "tekken.json")
"""Files that show that there is a tokenizer, if not one that the `tokenizers` library reads."""


def find_tokenizer(args: EngineArgs, files: ModelFiles) -> Tokenizer | None:
    """The tokenizer that the arguments ask for, by default the model's own; None if they ask for none."""
    if args.skip_tokenizer_init:
        return None
    path = files.path
    if args.tokenizer is not None:
        path = Path(args.tokenizer).expanduser()
        if not path.exists():
            path = resolve_model(
                args.tokenizer,
                revision=args.tokenizer_revision,
                download_dir=args.download_dir,
                hf_token=args.hf_token,
                load_format="dummy",
            ).path
    own = files.gguf_file if path == files.path else None
    tokenizer = load_tokenizer(path) if own is None else Tokenizer.from_gguf(own)
    if args.chat_template is not None:
        choose_template(tokenizer.chat_templates, args.chat_template)  # A wrong path is found now.
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model's folder, of a .gguf file, or in a tokenizer.json file with what lies beside it.

    A folder without tokenizer.json is read through transformers, if that is installed; no code of a model is ever run.

    Raises FileNotFoundError saying what was looked for; ValueError naming a file that is damaged or not supported.
    """
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(read_gguf(path))
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return _from_tokenizer_json(file, _settings(folder))
    if not path.is_dir() or not any(any(folder.glob(name)) for name in _OTHER_FORMATS):
        wanted = ", ".join(("tokenizer.json", *_OTHER_FORMATS)) if path.is_dir() else "no such file"
        raise FileNotFoundError(f"no tokenizer at {path}: {wanted}; pass tokenizer, or skip_tokenizer_init=True")
    return _from_own_class(folder) or _from_transformers(folder)


class Tokenizer:
    """Text to token ids and back, for one model. May be used from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        ends: Sequence[str] = (),
    ) -> None:
        """`special_tokens`: `bos_token` and so on -> content. `chat_templates`: `default` and so on -> text. `ends`:
        tokens that end a text beside `eos_token`.

        Raises ValueError naming the decoder of `backend` if it is not supported.
        """
        # A tokenizer.json may cut or fill up texts, which no prompt should be without being told.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens: Final = dict(special_tokens)
        self.chat_templates: Final = dict(chat_templates)
        self._ends = tuple(ends)
        self.vocabulary: Final[VocabularyTable] = vocabulary_table(backend)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """The tokenizer in the metadata of a GGUF file. Raises ValueError naming the file and the key that is wrong."""
        made = build_gguf_tokenizer(file)
        templates = {} if made.chat_template is None else {"default": made.chat_template}
        return cls(made.backend, special_tokens=made.special_tokens, chat_templates=templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: with BOS and so on, as the model's tokenizer does by default.

        A chat's text has them already. Raises ValueError for what is not text, lone surrogates included.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        for text in texts:
            _check_text(text)
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the tokenizer does not know have none."""
        known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What `token_id` adds to a text, special or not: perhaps a part of a character. Empty for an unknown id."""
        return self.vocabulary.token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, a leading space included; U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token spelled as in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id, added tokens included. A model may have more rows of logits, or fewer."""
        return len(self.vocabulary.token_bytes)

    @cached_property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if there is one (`encode` need not add it)."""
        return self._special_id("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if there is one. A model's generation_config may name others beside it."""
        return self._special_id("eos_token")

    @cached_property
    def end_token_ids(self) -> list[int]:
        """All ids that end a text by the tokenizer's account, `eos_token_id` first."""
        found = [self.eos_token_id, *(self.token_id(token) for token in self._ends)]
        return [token_id for token_id in found if token_id is not None]

    @cached_property
    def pad_token_id(self) -> int | None:
        """The id that fills up batches, if there is one."""
        return self._special_id("pad_token")

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Content -> id of the tokens that are found in a text before it is cut into pieces, special ones included."""
        return {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of one conversation, to be encoded with `add_special_tokens=False`.

        `chat_template`: a text, a path, or the name of one of the model's; see `chat.choose_template`. The rest, and
        what is raised, is that of `chat.render_chat`.
        """
        return render_chat(
            choose_template(self.chat_templates, chat_template, has_tools=tools is not None),
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            template_kwargs=chat_template_kwargs,
        )


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text to tokenize must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text to tokenize has a lone surrogate at index {error.start}: it is not Unicode") from error


# --- folders ----------------------------------------------------------------------------------------------------------


def _from_tokenizer_json(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{path}: not a tokenizer.json: {error}") from error
    special_tokens = {name: token for name in _NAMES if (token := _content(settings.get(name))) is not None}
    try:
        _add_tokens(backend, settings, special_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.parent}: tokenizer_config.json has added tokens of a wrong form: {error!r}") from error
    try:
        return Tokenizer(backend, special_tokens=special_tokens, chat_templates=_templates(path.parent, settings))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_own_class(folder: Path) -> Tokenizer | None:
    made = build_own_tokenizer(folder, _settings(folder))
    if made is None:
        return None
    _add_tokens(made.backend, made.settings, {})
    templates = {} if made.chat_template is None else {"default": made.chat_template}
    return Tokenizer(
        made.backend,
        special_tokens=made.special_tokens,
        chat_templates=_templates(folder, made.settings) or templates,
        ends=made.ends,
    )


def _from_transformers(folder: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has no tokenizer.json; its tokenizer is read through transformers, which is not installed: "
            "pip install 'pyvllm[hf]'"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # converters raise whatever the file led them to
        raise ValueError(f"{folder}: transformers cannot read the tokenizer: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(f"{folder}: {type(loaded).__name__} has no form as tokenizer.json, which is needed")
    return Tokenizer(
        backend, special_tokens=loaded.special_tokens_map, chat_templates=_templates(folder, _settings(folder))
    )


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed by the special_tokens_map.json of older folders; empty if neither is there.

    Of `add_bos_token` and `add_eos_token` nothing is made: what is added to a text is as tokenizer.json has it.
    """
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if "added_tokens_decoder" not in settings and (folder / name).is_file():
            settings |= read_object(folder / name)
    return settings


def _content(token: object) -> str | None:
    """A token of tokenizer_config.json is a string, or an object with its content and flags."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _add_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add what tokenizer_config.json knows beyond tokenizer.json, as transformers does: tokens, and which are special.

    A special token that the vocabulary lacks (often padding) is left out: the model has no row for it.
    """
    listed = settings.get("added_tokens_decoder") or {}
    for token_id, flags in sorted((int(key), flags) for key, flags in listed.items()):
        known_flags = {name: bool(flags[name]) for name in _FLAGS if name in flags}
        token = AddedToken(flags["content"], **known_flags)
        if repr(token) != repr(backend.get_added_tokens_decoder().get(token_id)):
            backend.add_tokens([token])
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    extra = {_content(token) for token in (extra.values() if isinstance(extra, Mapping) else extra)}
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    new = {token for token in special_tokens.values() if not added.get(token)} | (extra - added.keys())
    known = [token for token in new if token and backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(known)])


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own come before tokenizer_config.json, which has one template or a list with names."""
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    try:
        files = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder}: a chat template is not UTF-8: {error}") from error
    if files:
        return files
    inside = settings.get("chat_template")
    if isinstance(inside, str):
        return {"default": inside}
    named = inside if isinstance(inside, list) else []
    entries = [entry for entry in named if isinstance(entry, dict) and {"name", "template"} <= entry.keys()]
    return {entry["name"]: entry["template"] for entry in entries}
