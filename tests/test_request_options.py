"""What a request may ask of text and logits beside the usual: bad words, stop expressions, truncation, functions on
logits, and what log-probabilities are taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyvllm import LLM, EngineArgs, LLMEngine, ParameterError, SamplingParams
from pyvllm.inputs import bad_word_ids
from pyvllm.outputs import CompletionOutput, RequestOutput
from tests.small_llm import GREEDY, OPTIONS, generate

PROMPT = [5, 6, 7]


def saying(*texts: str, tokenizer: Any) -> Callable[[list[int], Tensor], Tensor]:
    """Logits that make a model say a text, and then the next one in its place if that is not possible, and so on."""
    scripts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def process(token_ids: list[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -50.0)
        for preference, script in enumerate(scripts):
            if len(token_ids) < len(script):
                token_id = script[len(token_ids)]
                forced[token_id] = max(float(forced[token_id]), 50.0 - preference)
        return forced

    return process


def say(llm: LLM, *texts: str, **fields: Any) -> CompletionOutput:
    tokenizer = llm.get_tokenizer()
    length = max(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    fields = {"temperature": 0, "max_tokens": length, "ignore_eos": True} | fields
    params = SamplingParams(logits_processors=[saying(*texts, tokenizer=tokenizer)], **fields)
    return generate(llm, PROMPT, params)[0].outputs[0]


# --- bad words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad_words", "wanted", "instead", "expected"),
    [
        (["ab cd", "ab ce"], "ab cd", "ab.xx", "ab cx"),
        (["ab cd", "ab ce"], "ab ce", "ab.xx", "ab cx"),
        (["ab cd", "ab ce"], "xb cd", "ab.xx", "xb cd"),  # only right after "ab"
        (["the"], "the", "xyz", "xyz"),  # one token, and " the" is another
        (["the"], " the", "x", "x"),
        ([" the"], "the", "x", "x"),
        (["q"], "aqa", "xxx", "axa"),
        (["\n"], "a\nb", "xxx", "axb"),
    ],
)
def test_b064_bad_words(llm: LLM, bad_words: list[str], wanted: str, instead: str, expected: str) -> None:
    assert say(llm, wanted, instead, bad_words=bad_words).text == expected


def test_b064_ids_of_bad_words_have_no_bos(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    the, space_the = tokenizer.encode("the"), tokenizer.encode(" the")
    assert bad_word_ids(tokenizer, ["the", " the"]) == [the, space_the] * 2
    assert len(the) == len(space_the) == 1
    # What begins with a space is found by its end.
    assert bad_word_ids(tokenizer, ["xy"]) == [tokenizer.encode("xy")]


def test_bad_words_do_not_run_ahead(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), async_scheduling=True, **OPTIONS) as llm:
        letters = llm.get_tokenizer().encode("abcdefgh")
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=letters)
        (plain,) = generate(llm, [PROMPT], params)
        text = plain.outputs[0].text
        word = text[3:5]
        free, params.bad_words = params.clone(), [word]
        banned, other = generate(llm, [PROMPT, PROMPT], [params, free])
        assert word not in banned.outputs[0].text
        assert other.outputs[0].token_ids == plain.outputs[0].token_ids
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        assert generate(llm, [PROMPT], params)[0].outputs[0].token_ids == banned.outputs[0].token_ids


def test_b065_bad_words_that_leave_nothing(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="bad_words must leave a token that may be generated") as caught:
        generate(llm, PROMPT, SamplingParams(allowed_token_ids=[ord("q") - 33], bad_words=["q"]))
    assert caught.value.parameter == "bad_words"


def test_bad_words_need_a_tokenizer(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), skip_tokenizer_init=True, **OPTIONS) as llm:
        for fields, parameter in (({"bad_words": ["x"]}, "bad_words"), ({"stop_regex": "x"}, "stop_regex")):
            with pytest.raises(ParameterError) as caught:
                generate(llm, PROMPT, SamplingParams(**fields))
            assert caught.value.parameter == parameter


# --- stop_regex -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop_regex", "include", "text"),
    [
        ("[0-9]{2}", False, "Room "),
        ("[0-9]{2}", True, "Room 12"),
        (["x+", "m.1"], True, "Room 1"),
        ("nothing", False, "Room 123 is free"),
    ],
)
def test_stop_regex(llm: LLM, stop_regex: Any, include: bool, text: str) -> None:
    completion = say(llm, "Room 123 is free", stop_regex=stop_regex, include_stop_str_in_output=include)
    assert completion.text == text
    stopped = text != "Room 123 is free"
    reason = stop_regex if isinstance(stop_regex, str) else stop_regex[1]
    expected = ("stop", reason) if stopped else ("length", None)
    assert (completion.finish_reason, completion.stop_reason) == expected


def test_of_stop_strings_and_expressions_the_first_to_end_wins(llm: LLM) -> None:
    assert say(llm, "abcd", stop="c", stop_regex="b.").stop_reason == "c"
    assert say(llm, "abcd", stop="cd", stop_regex="b.").stop_reason == "b."


def test_stop_regex_in_a_stream_shows_no_part_of_a_match(llm: LLM) -> None:
    process = saying("I say: User 12: no", tokenizer=llm.get_tokenizer())
    params = SamplingParams(temperature=0, max_tokens=18, stop_regex="User [0-9]+:", logits_processors=[process])
    shown = [output.outputs[0].text for output in llm.stream(PROMPT, params)]
    assert shown[-1] == "I say: "
    assert all("I say: ".startswith(text) for text in shown)
    assert "I sa" in shown


def test_stop_regex_is_not_looked_for_in_the_first_min_tokens(llm: LLM) -> None:
    assert say(llm, "aaaaaaaa", stop_regex="a", min_tokens=5).text == "aaaaa"


# --- truncate_prompt_tokens -------------------------------------------------------------------------------------------


def test_truncated_prompts_keep_their_end(llm: LLM) -> None:
    prompt = list(range(40, 60))
    (short,) = generate(llm, [prompt[-7:]])
    fields = vars(GREEDY)
    (cut,) = generate(llm, [prompt], SamplingParams(**fields | {"truncate_prompt_tokens": 7}))
    assert cut.prompt_token_ids == prompt[-7:]
    assert cut.outputs[0].token_ids == short.outputs[0].token_ids
    (whole,) = generate(llm, [prompt], SamplingParams(**fields | {"truncate_prompt_tokens": 20}))
    assert whole.prompt_token_ids == prompt


def test_truncation_to_the_models_length_leaves_room_for_output(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), max_model_len=32, **OPTIONS) as llm:
        for max_tokens, min_tokens, room in ((9, 0, 9), (None, 2, 2), (99, 0, 1)):
            params = SamplingParams(
                ignore_eos=True, truncate_prompt_tokens=-1, max_tokens=max_tokens, min_tokens=min_tokens
            )
            (output,) = generate(llm, [list(range(100, 180))], params)
            assert output.prompt_token_ids == list(range(180 - 32 + room, 180))
            assert len(output.outputs[0].token_ids) == room
        with pytest.raises(ParameterError, match="prompt_token_ids has 60 tokens"):
            generate(llm, [list(range(100, 180))], SamplingParams(truncate_prompt_tokens=60))


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "parameter"),
    [(10, 5, "min_tokens"), (10, None, None), (10**9, None, "min_tokens"), (-1, 5, "min_tokens"), (500, None, None)],
)
def test_b087_min_tokens_that_cannot_be_reached(
    llm: LLM, min_tokens: int, max_tokens: int | None, parameter: str | None
) -> None:
    def run() -> list[int]:
        # Nothing but end of sequence is ever wanted.
        params = SamplingParams(
            temperature=0, min_tokens=min_tokens, max_tokens=max_tokens, logit_bias={257: 100.0}, detokenize=False
        )
        return generate(llm, PROMPT, params)[0].outputs[0].token_ids

    if parameter is None:
        assert len(run()) == min_tokens + 1
        return
    with pytest.raises(ParameterError) as caught:
        run()
    assert caught.value.parameter == parameter


# --- logits_processors ------------------------------------------------------------------------------------------------


def test_processors_see_what_was_generated_and_decide(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def countdown(prompt: list[int], token_ids: list[int], logits: Tensor) -> Tensor:
        assert logits.shape == (320,)
        assert logits.dtype == torch.float32
        seen.append((list(prompt), list(token_ids)))
        return torch.where(torch.arange(320) == 90 - len(token_ids), 10.0, -10.0)

    def next_one(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits.roll(1)

    params = SamplingParams(temperature=0, max_tokens=4, logits_processors=[countdown, next_one])
    processed, plain = generate(llm, [PROMPT, PROMPT], [params, GREEDY])
    assert processed.outputs[0].token_ids == [91, 90, 89, 88]
    assert seen == [(PROMPT, [91, 90, 89, 88][:i]) for i in range(4)]
    assert plain.outputs[0].token_ids == generate(llm, [PROMPT])[0].outputs[0].token_ids


def test_processors_of_each_of_n_sequences(llm: LLM) -> None:
    def no_repeats(token_ids: list[int], logits: Tensor) -> Tensor:
        logits[token_ids] = -torch.inf
        return logits

    params = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True, temperature=0.3, top_k=5)
    free = generate(llm, PROMPT, params)[0].outputs
    assert any(len(set(completion.token_ids)) < 40 for completion in free)
    params.logits_processors = [no_repeats]
    outputs = generate(llm, PROMPT, params)[0].outputs
    assert [len(set(completion.token_ids)) for completion in outputs] == [40] * 3
    assert len({tuple(completion.token_ids) for completion in outputs}) == 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda token_ids, logits: 1 / 0, r"ZeroDivisionError\('division by zero'\)"),
        (lambda token_ids, logits: None, "gave NoneType, not a tensor"),
        (lambda token_ids, logits: logits[:3], r"gave logits of shape \(3,\), not \(320,\)"),
    ],
)
def test_r007_a_processor_that_fails_ends_its_request_alone(tiny_llama: Path, function: Any, message: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny_llama), **OPTIONS))
    engine.add_request("bad", {"prompt_token_ids": PROMPT}, SamplingParams(logits_processors=[function]))
    engine.add_request("good", {"prompt_token_ids": PROMPT}, GREEDY)
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    error = finished["bad"].error
    assert isinstance(error, ParameterError)
    assert error.parameter == "logits_processors"
    assert finished["bad"].outputs[0].finish_reason == "error"
    assert finished["good"].outputs[0].finish_reason == "length"
    assert finished["good"].error is None
    with LLM(str(tiny_llama), **OPTIONS) as llm, pytest.raises(ParameterError, match=message):
        generate(llm, PROMPT, SamplingParams(logits_processors=[function]))


def test_infinities_of_processors_are_what_they_seem(llm: LLM) -> None:
    def force(token_ids: list[int], logits: Tensor) -> Tensor:
        logits[80 + len(token_ids)] = torch.inf
        logits[90] = torch.nan
        return logits

    for fields in ({"temperature": 0}, {"temperature": 2.0, "top_p": 0.9}, {"allowed_token_ids": [*range(80, 100)]}):
        params = SamplingParams(max_tokens=4, logits_processors=[force], repetition_penalty=1.5, **fields)
        assert generate(llm, PROMPT, params)[0].outputs[0].token_ids == [80, 81, 82, 83]


@pytest.mark.parametrize("value", ["f", [1], {"f": len}, len])
def test_what_is_no_list_of_functions(value: Any) -> None:
    with pytest.raises(ParameterError, match="logits_processors must be None or a list of functions and names"):
        SamplingParams(logits_processors=value)


def test_a_clone_keeps_the_functions(llm: LLM) -> None:
    process = saying("x", tokenizer=llm.get_tokenizer())
    assert SamplingParams(logits_processors=[process]).clone().logits_processors == [process]


# --- logprobs_mode ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modes(tiny_llama: Path) -> Iterator[Callable[[str, SamplingParams], RequestOutput]]:
    llms = {
        mode: LLM(str(tiny_llama), logprobs_mode=mode, max_logprobs=-1, **OPTIONS)
        for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
    }
    yield lambda mode, params: generate(llms[mode], PROMPT, params)[0]
    for llm in llms.values():
        llm.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {3: 5.0}, "repetition_penalty": 1.5},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 2.0, "seed": 1, "top_k": 7},
        {"temperature": 1.5, "seed": 2, "top_p": 0.6, "min_p": 0.01, "allowed_token_ids": list(range(50, 90))},
        {"temperature": 0.5, "seed": 2, "min_tokens": 1, "stop_token_ids": [3, 4]},
        {"temperature": 0, "min_tokens": 1, "stop_token_ids": list(range(100))},
    ],
)
def test_what_log_probabilities_are_taken_from(
    modes: Callable[[str, SamplingParams], RequestOutput], fields: dict[str, Any]
) -> None:
    params = SamplingParams(logprobs=-1, max_tokens=1, ignore_eos=True, **fields)
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"):
        completion = modes(mode, params).outputs[0]
        assert completion.logprobs is not None
        entries = completion.logprobs[0]
        assert next(iter(entries)) == completion.token_ids[0]
        found[mode] = torch.tensor([entries[i].logprob for i in range(320)])
    logits = found["raw_logits"]
    torch.testing.assert_close(found["raw_logprobs"], logits.log_softmax(-1), atol=1e-5, rtol=0)
    expected = logits.clone()
    for token_id, bias in fields.get("logit_bias", {}).items():
        expected[token_id] += bias
    for token_id in PROMPT if "repetition_penalty" in fields else []:
        expected[token_id] *= 1.5 if expected[token_id] < 0 else 1 / 1.5
    allowed = torch.zeros(320, dtype=torch.bool)
    allowed[fields.get("allowed_token_ids", list(range(320)))] = True
    allowed[fields.get("stop_token_ids", [])] = False
    expected[~allowed] = -torch.inf
    expected /= fields["temperature"] or 1
    p = expected.softmax(-1)
    p[p < p.max() * fields.get("min_p", 0)] = 0
    if "top_k" in fields:
        p[p < p.sort().values[-fields["top_k"]]] = 0
    p /= p.sum()
    order = p.argsort(descending=True)
    before = p[order].cumsum(-1) - p[order]
    p[order[before >= fields.get("top_p", 2)]] = 0
    expected[p == 0] = -torch.inf
    torch.testing.assert_close(found["processed_logits"], expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found["processed_logprobs"], expected.log_softmax(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("prompt_logprobs", [0, 3, -1])
def test_what_log_probabilities_of_prompts_are_taken_from(
    modes: Callable[[str, SamplingParams], RequestOutput], prompt_logprobs: int
) -> None:
    """Nothing is drawn there, so nothing is processed."""
    params = SamplingParams(prompt_logprobs=prompt_logprobs, max_tokens=1, temperature=0.5, top_k=2, seed=1)
    whole = params.clone()
    whole.prompt_logprobs = -1
    for kind in ("logprobs", "logits"):
        tables = {}
        for mode in (f"raw_{kind}", f"processed_{kind}"):
            rows = modes(mode, params).prompt_logprobs
            assert rows is not None
            assert rows[0] is None
            tables[mode] = [{i: entry.logprob for i, entry in (row or {}).items()} for row in rows]
        assert tables[f"raw_{kind}"] == tables[f"processed_{kind}"]
        every = modes("raw_logits", whole).prompt_logprobs
        assert every is not None
        for token_id, found, row in zip(PROMPT[1:], tables[f"raw_{kind}"][1:], every[1:], strict=True):
            assert row is not None
            logits = torch.tensor([row[i].logprob for i in range(320)])
            expected = logits.log_softmax(-1) if kind == "logprobs" else logits
            best = range(320) if prompt_logprobs == -1 else logits.topk(prompt_logprobs).indices.tolist()
            assert set(found) == {token_id, *best}
            assert found == pytest.approx({i: float(expected[i]) for i in found}, abs=1e-5)


def test_unknown_logprobs_mode() -> None:
    with pytest.raises(ValueError, match="logprobs_mode must be one of raw_logprobs, processed_logprobs"):
        EngineArgs(model="x", logprobs_mode="raw")  # type: ignore[arg-type]


def test_lora_request_must_be_none(llm: LLM) -> None:
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=None)
    with pytest.raises(ParameterError, match="lora_request must be None"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request="adapter")
