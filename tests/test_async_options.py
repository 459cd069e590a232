"""Forms of outputs, bad words and failures in an engine in a process of its own."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pyvllm import LLM, AsyncLLM, EngineArgs, ParameterError, SamplingParams
from pyvllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from pyvllm.tokenizer import Tokenizer
from tests.async_requests import GREEDY, OPTIONS, collect, joined, wait_until_idle

PROMPT = "the request"


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[AsyncLLM]:
    names = {"counting": "tests.some_processors:counting", "next": "tests.some_processors:next_one"}
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama), logits_processors=names, **OPTIONS))
    yield llm
    llm.shutdown()


def form(kind: RequestOutputKind = RequestOutputKind.DELTA, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=60, seed=3, output_kind=kind, structured_outputs=StructuredOutputsParams(**fields))


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_an_output_has_its_form_and_plain_ones_go_on(llm: AsyncLLM, kind: RequestOutputKind) -> None:
    async def run() -> None:
        plain, shaped = await asyncio.gather(
            collect(llm, PROMPT, GREEDY), collect(llm, PROMPT, form(kind, choice=["first", "second"]))
        )
        assert len(plain[-1].outputs[0].token_ids) == 8
        (completion,) = joined(shaped, kind)
        assert completion.text in ("first", "second")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        await wait_until_idle(llm)

    asyncio.run(run())


def test_s026_a_form_that_cannot_be_compiled_ends_its_request_alone(llm: AsyncLLM) -> None:
    async def run() -> None:
        plain = asyncio.ensure_future(collect(llm, PROMPT, GREEDY))
        for fields in ({"regex": "("}, {"json": {"$ref": "#/nowhere"}}, {"grammar": "start: nothing"}):
            with pytest.raises(ParameterError, match=r"structured_outputs\.\w+ cannot be used"):
                await collect(llm, PROMPT, form(**fields))
        assert len((await plain)[-1].outputs[0].token_ids) == 8
        await wait_until_idle(llm)
        await llm.check_health()

    asyncio.run(run())


def test_words_expressions_and_truncation_travel(llm: AsyncLLM) -> None:
    async def run() -> None:
        letters = (await llm.get_tokenizer()).encode("abcdefgh")
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "allowed_token_ids": letters}
        free = (await collect(llm, PROMPT, SamplingParams(**fields)))[-1].outputs[0].text
        word = free[3:5]
        banned = (await collect(llm, PROMPT, SamplingParams(bad_words=[word], **fields)))[-1].outputs[0].text
        assert word not in banned
        stopped = (await collect(llm, PROMPT, SamplingParams(stop_regex=f"{word}.", **fields)))[-1].outputs[0]
        assert (stopped.text, stopped.stop_reason) == (free[: free.index(word)], f"{word}.")
        cut = (await collect(llm, [1, 2, 3, 4, 5], SamplingParams(truncate_prompt_tokens=2, max_tokens=1)))[-1]
        assert cut.prompt_token_ids == [4, 5]

    asyncio.run(run())


def test_words_of_many_prompts_become_tokens_once(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return real(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encode)

    async def run() -> None:
        for words in (["bad"], ["bad"], ["worse"], ["bad"]):
            await collect(llm, [1, 2, 3], SamplingParams(bad_words=words, max_tokens=1))

    asyncio.run(run())
    assert [text for text in encoded if not text.startswith(" ")] == ["bad", "worse", "bad"]


def test_functions_do_not_travel(llm: AsyncLLM) -> None:
    async def run() -> None:
        with pytest.raises(ParameterError, match=r"names of EngineArgs.logits_processors: functions do not travel"):
            await collect(llm, PROMPT, SamplingParams(logits_processors=[lambda token_ids, logits: logits]))
        with pytest.raises(ParameterError, match="lora_request must be None"):
            await collect(llm, PROMPT, GREEDY, lora_request="adapter")

    asyncio.run(run())


def test_functions_that_the_engine_knows_have_names(llm: AsyncLLM) -> None:
    async def run() -> None:
        for names, expected in (
            (["counting"], [20, 21, 22, 23]),
            (["counting", "next"], [21, 22, 23, 24]),
            (["counting", "next", "next"], [22, 23, 24, 25]),
        ):
            params = SamplingParams(temperature=0, max_tokens=4, logits_processors=[*names])
            assert (await collect(llm, PROMPT, params))[-1].outputs[0].token_ids == expected
        with pytest.raises(ParameterError, match=r'the engine knows \["counting", "next"\], got "other"'):
            await collect(llm, PROMPT, SamplingParams(logits_processors=["other"]))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "got 'no_such_module:f': No module named"),
        ("tests.some_processors:missing", "has no attribute 'missing'"),
        ("tests.some_processors", "must be module:function"),
        ("tests.some_processors:NOTHING", "must be a function, got 7"),
    ],
)
def test_functions_that_cannot_be_found(tiny_llama: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_llama), logits_processors={"f": path}, **OPTIONS)


def test_functions_beside_an_interactive_program_are_found(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_functions.py").write_text("thing = 5")
    monkeypatch.chdir(tmp_path)
    # As Python itself says that it looks in the working directory.
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    names = {"mine": "my_functions:thing"}
    with pytest.raises(ValueError, match="must be a function, got 5"):
        AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama), logits_processors=names, **OPTIONS))


def test_names_and_functions_side_by_side_in_one_process(tiny_llama: Path) -> None:
    def double(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits.roll(2)

    with LLM(str(tiny_llama), logits_processors={"counting": "tests.some_processors:counting"}, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, logits_processors=["counting", double])
        assert llm.generate([[1]], params, use_tqdm=False)[0].outputs[0].token_ids == [22, 23]
        with pytest.raises(ParameterError, match='got "next"'):
            llm.generate([[1]], SamplingParams(logits_processors=["next"]), use_tqdm=False)
    with pytest.raises(ValueError, match="logits_processors must be None or a dict of name to module:function"):
        EngineArgs(model="m", logits_processors={"f": 1})  # type: ignore[dict-item]
