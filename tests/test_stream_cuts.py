"""Streams under every cut: what they show piece by piece is the whole, wherever a text ends and whatever ends it.

The model repeats its prompt, so the text is known, token by token.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLM, AsyncLLM, EngineArgs, SamplingParams
from pyvllm.outputs import CompletionOutput, RequestOutput
from pyvllm.sampling_params import RequestOutputKind
from tests.async_requests import OPTIONS as ASYNC_OPTIONS
from tests.async_requests import collect, joined
from tests.conftest import TinyCheckpoint
from tests.small_llm import OPTIONS
from tests.test_tokenizer import byte_fallback

TEXT = "né e\u0301 你 👨‍👧{}🇩🇪 स्\u200dते…"
"""Letters with marks, before and behind; CJK; emoji of several characters; a place for special tokens."""
SPECIAL = {"byte_level": "<s>x</s>", "byte_fallback": "</s><tool>", "gguf": "<|im_end|>x<|endoftext|>"}
NAMES = {"saying": "tests.some_processors:saying"}
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Told:
    """A text that the model is going to say."""

    llm: LLM
    ids: list[int]
    is_byte_fallback: bool

    def text(self, count: int, *, skip: bool) -> str:
        """The text of the first `count` tokens, as the tokenizer decodes them."""
        text = self.decoded(count, skip)
        if self.is_byte_fallback and REPLACEMENT in text:
            # The tokenizer gives up a whole run of bytes, a stream only those that are no character.
            whole = next(n for n in range(count, -1, -1) if REPLACEMENT not in self.decoded(n, skip))
            return self.decoded(whole, skip) + REPLACEMENT * (count - whole)
        return text

    def decoded(self, count: int, skip: bool) -> str:
        tokenizer = self.llm.get_tokenizer()
        prompt = tokenizer.decode(self.ids, skip_special_tokens=skip)
        return tokenizer.decode(self.ids + self.ids[:count], skip_special_tokens=skip)[len(prompt) :]

    def params(self, **fields: Any) -> SamplingParams:
        fields = {"max_tokens": len(self.ids), "ignore_eos": True, "logprobs": 0} | fields
        return SamplingParams(temperature=0, logits_processors=["saying"], **fields)


@pytest.fixture(scope="module", params=SPECIAL)
def told(
    request: pytest.FixtureRequest, tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Told]:
    kind = request.param
    options: dict[str, Any] = OPTIONS | {"num_gpu_blocks_override": 4096, "logits_processors": NAMES}
    if kind == "gguf":
        options["tokenizer"] = str(request.getfixturevalue("smollm2"))
        folder = tiny_checkpoint("llama", {"vocab_size": 49152})
    else:
        folder = tiny_checkpoint("llama")
    if kind == "byte_fallback":
        folder = Path(shutil.copytree(folder, tmp_path_factory.mktemp(kind) / "model"))
        byte_fallback().save(str(folder / "tokenizer.json"))
    with LLM(str(folder), **options) as llm:
        text = TEXT.format(SPECIAL[kind])
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
        yield Told(llm=llm, ids=ids, is_byte_fallback=kind == "byte_fallback")


def streamed(
    told: Told, params: Sequence[SamplingParams], kinds: Sequence[RequestOutputKind] = tuple(RequestOutputKind)
) -> list[CompletionOutput]:
    """What streams of some kinds show of each request in the end, after the check that nothing shown is taken back."""
    ends = {}
    for kind in kinds:
        own = [one.clone() for one in params]
        for one in own:
            one.output_kind = kind
        outputs: dict[int, list[RequestOutput]] = {}
        for output in told.llm.stream([told.ids] * len(own), own):
            outputs.setdefault(int(output.request_id), []).append(output)
        for pieces in outputs.values() if kind == RequestOutputKind.CUMULATIVE else ():
            texts = [piece.outputs[0].text for piece in pieces]
            assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
        ends[kind] = [joined(outputs[request_id], kind)[0] for request_id in sorted(outputs)]
        for end in ends[kind]:
            assert end.logprobs is not None
            assert [next(iter(row)) for row in end.logprobs] == end.token_ids
    first, *others = ([facts(end) for end in ends[kind]] for kind in kinds)
    assert all(other == first for other in others)
    return ends[kinds[0]]


def facts(end: CompletionOutput) -> tuple[object, ...]:
    return end.text, end.token_ids, end.finish_reason, end.stop_reason


@pytest.mark.parametrize("skip", [True, False])
def test_cut_at_any_token(told: Told, skip: bool) -> None:
    counts = range(1, len(told.ids) + 1)
    ends = streamed(told, [told.params(max_tokens=count, skip_special_tokens=skip) for count in counts])
    for count, end in zip(counts, ends, strict=True):
        assert (end.token_ids, end.finish_reason) == (told.ids[:count], "length")
        assert end.text == told.text(count, skip=skip)
    assert REPLACEMENT in "".join(end.text for end in ends)


@pytest.mark.parametrize("include", [True, False])
def test_cut_by_a_stop_string_at_any_place(told: Told, include: bool) -> None:
    text = told.text(len(told.ids), skip=False)
    stops = [text[at : at + 2] for at in range(len(text) - 1)]
    fields = {"skip_special_tokens": False, "include_stop_str_in_output": include}
    for stop, end in zip(stops, streamed(told, [told.params(stop=stop, **fields) for stop in stops]), strict=True):
        place = text.index(stop) + len(stop) * include
        assert (end.text, end.finish_reason, end.stop_reason) == (text[:place], "stop", stop)
        count = len(end.token_ids)
        assert stop in told.text(count, skip=False)
        assert stop not in told.text(count - 1, skip=False), "the ids end with the token that completes it"


@pytest.mark.parametrize("skip", [True, False])
def test_cut_by_any_token_as_a_stop(told: Told, skip: bool) -> None:
    stops = sorted(set(told.ids))
    for include in (True, False):
        fields = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
        params = [told.params(stop_token_ids=[stop], **fields) for stop in stops]
        ends = streamed(told, params, [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
        for stop, end in zip(stops, ends, strict=True):
            count = told.ids.index(stop) + 1
            assert (end.token_ids, end.finish_reason, end.stop_reason) == (told.ids[:count], "stop", stop)
            assert end.text == told.text(count if include else count - 1, skip=skip)


def test_cut_in_a_process_of_its_own(tiny_llama: Path) -> None:
    """The same through a socket, all cuts at once."""

    async def run(llm: AsyncLLM) -> None:
        ids = (await llm.get_tokenizer()).encode(TEXT.format(""), add_special_tokens=False)
        text = TEXT.format("")
        fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logits_processors": ["saying"]}
        params = [SamplingParams(max_tokens=count, **fields) for count in range(1, len(ids) + 1)]
        expected = [bytes_of(text)[:count].decode(errors="replace") for count in range(1, len(ids) + 1)]
        for at in range(len(text) - 1):
            params.append(SamplingParams(max_tokens=len(ids), stop=text[at : at + 2], **fields))
            expected.append(text[: text.index(text[at : at + 2])])
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
            for one in params:
                one.output_kind = kind
            outputs = await asyncio.gather(*(collect(llm, ids, one) for one in params))
            assert [joined(pieces, kind)[0].text for pieces in outputs] == expected

    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama), logits_processors=NAMES, **ASYNC_OPTIONS))
    try:
        asyncio.run(run(llm))
    finally:
        llm.shutdown()


def bytes_of(text: str) -> bytes:
    """One for each token: the tiny tokenizer has no merges of what is in the text."""
    return text.encode()
