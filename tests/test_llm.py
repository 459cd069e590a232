"""`LLM` with a tiny model: forms of input, order, streams, threads, chat."""

import threading
from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLM, BeamSearchParams, SamplingParams
from pyvllm.sampling_params import RequestOutputKind
from tests.idle import engine_of
from tests.small_llm import GREEDY, generate


def test_all_forms_of_a_prompt_give_the_same(llm: LLM) -> None:
    text = "the rain"
    ids = llm.get_tokenizer().encode(text)
    forms: list[Any] = [
        text,
        ids,
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": ids, "prompt": text},
    ]
    outputs = generate(llm, forms)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == [text, None, text, None, text]
    for form in forms:
        assert generate(llm, form)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_old_keyword_for_token_ids(llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in generate(llm, [[1, 2], [3]])]
    assert [o.outputs[0].token_ids for o in generate(llm, None, prompt_token_ids=[[1, 2], [3]])] == expected
    assert [o.outputs[0].token_ids for o in generate(llm, None, prompt_token_ids=[1, 2])] == expected[:1]
    (output,) = generate(llm, "shown", prompt_token_ids=[1, 2])
    assert (output.prompt, output.outputs[0].token_ids) == ("shown", expected[0])


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert generate(llm, []) == []
    with pytest.raises(ValueError, match="prompts must be given"):
        llm.generate()


def test_b030_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i + 1] * (1 + i % 3) for i in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=12 - i, ignore_eos=True) for i in range(12)]
    for _ in range(2):
        outputs = generate(llm, prompts, params)
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(12, 0, -1))
        assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_lists_must_be_as_long_as_the_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params has 3 entries, but there are 2 prompts"):
        generate(llm, ["a", "b"], [GREEDY] * 3)
    with pytest.raises(ValueError, match=r"priority must be a list with an integer for each of 2 prompts, got \[1\]"):
        generate(llm, ["a", "b"], priority=[1])
    with pytest.raises(ValueError, match="prompts has 1 entries, but prompt_token_ids has 2"):
        generate(llm, ["a"], prompt_token_ids=[[1], [2]])


@pytest.mark.parametrize("params", ["x", 3, [SamplingParams(), None], {"temperature": 0}])
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(TypeError, match=r"sampling_params(\[1\])? must be SamplingParams"):
        generate(llm, ["a", "b"], params)


def test_users_parameters_are_not_changed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    generate(llm, "a", params)
    assert params == SamplingParams(max_tokens=2)


def test_stream_gives_all_so_far_or_what_is_new(llm: LLM) -> None:
    prompts = ["the", "in the end"]
    whole = [output.outputs[0] for output in generate(llm, prompts)]
    texts, deltas, ids = {}, dict.fromkeys("01", ""), {"0": [], "1": []}  # type: ignore[var-annotated]
    outputs = list(llm.stream(prompts, GREEDY))
    first = min(int(output.request_id) for output in outputs)
    for output in outputs:
        texts[int(output.request_id) - first] = output.outputs[0].text
    assert len(outputs) == 2 * GREEDY.max_tokens  # type: ignore[operator]
    assert texts == {i: completion.text for i, completion in enumerate(whole)}
    delta = GREEDY.clone()
    delta.output_kind = RequestOutputKind.DELTA
    outputs = list(llm.stream(prompts, delta))
    first = min(int(output.request_id) for output in outputs)
    for output in outputs:
        deltas[str(int(output.request_id) - first)] += output.outputs[0].text
        ids[str(int(output.request_id) - first)] += output.outputs[0].token_ids
    assert list(deltas.values()) == [completion.text for completion in whole]
    assert list(ids.values()) == [completion.token_ids for completion in whole]


def test_leaving_a_stream_drops_the_request(llm: LLM) -> None:
    for output in llm.stream("a", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)):
        if len(output.outputs[0].token_ids) == 3:
            break
    del output
    assert not engine_of(llm).stats().num_running


def test_a_stream_that_is_never_read_is_dropped(llm: LLM) -> None:
    stream = llm.stream("a", GREEDY)
    assert engine_of(llm).has_unfinished()
    del stream


def test_stream_refuses_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt"):
        llm.stream([[1], [10**6]], GREEDY)


def test_generate_inside_a_stream(llm: LLM) -> None:
    alone = generate(llm, "in")[0].outputs[0].token_ids
    streamed = None
    for output in llm.stream("the", GREEDY):
        assert generate(llm, "in")[0].outputs[0].token_ids == alone
        streamed = output.outputs[0].token_ids
    assert streamed == generate(llm, "the")[0].outputs[0].token_ids


def test_enqueue_then_wait(llm: LLM) -> None:
    ids = llm.enqueue(["a", "b"], GREEDY) + llm.enqueue("c", GREEDY)
    inside = generate(llm, "d")
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    assert inside[0].outputs[0].token_ids == generate(llm, "d")[0].outputs[0].token_ids
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_b118_two_threads(llm: LLM) -> None:
    prompts = {name: [f"{name} {i}" for i in range(5)] for name in ("one", "two", "three")}
    alone = {name: [generate(llm, prompt)[0].outputs[0].token_ids for prompt in prompts[name]] for name in prompts}
    found: dict[str, list[list[list[int]]]] = {name: [] for name in prompts}

    def work(name: str) -> None:
        for _ in range(5):
            found[name].append([output.outputs[0].token_ids for output in generate(llm, prompts[name])])

    threads = [threading.Thread(target=work, args=[name]) for name in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [alone[name]] * 5 for name in prompts}


def test_n_sequences_and_best_of(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=42, max_tokens=16, ignore_eos=True)
    first, second = (generate(llm, "the", params)[0].outputs for _ in range(2))
    assert [completion.index for completion in first] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in first}) > 1
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    best = generate(llm, "the", SamplingParams(n=1, best_of=4, seed=42, max_tokens=16, ignore_eos=True, logprobs=0))
    ranked = generate(llm, "the", SamplingParams(n=4, seed=42, max_tokens=16, ignore_eos=True, logprobs=0))
    assert best[0].outputs[0].cumulative_logprob == max(c.cumulative_logprob or 0.0 for c in ranked[0].outputs)


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    prompts: list[Any] = ["the", llm.get_tokenizer().encode("the")]
    text, ids = llm.beam_search(prompts, params)
    assert len(text.sequences) == 3
    scores = [beam.cum_logprob / len(beam.tokens[len(ids.sequences[0].tokens) - 6 :]) for beam in text.sequences]
    assert scores == sorted(scores, reverse=True)
    assert [beam.tokens for beam in text.sequences] == [beam.tokens for beam in ids.sequences]
    assert all(beam.text.startswith("the") for beam in text.sequences + ids.sequences)
    greedy = generate(llm, "the", SamplingParams(temperature=0, max_tokens=6))[0]
    (one,) = llm.beam_search("the", BeamSearchParams(beam_width=1, max_tokens=6))
    assert one.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids
    assert one.sequences[0].cum_logprob < 0


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = generate(llm, "in the", params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids
    assert all(
        len(row) == 2 and row[t].rank == 1 for row, t in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    total = sum(row[t].logprob for row, t in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-5)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for row, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True):
        assert row is not None
        assert row[token].decoded_token == llm.get_tokenizer().token_text(token)


def test_empty_prompt_is_bos(llm: LLM) -> None:
    outputs = generate(llm, ["", [], {"prompt": ""}, {"prompt_token_ids": []}, [256]])
    assert all(output.prompt_token_ids == [256] for output in outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_prefix_cache_salt_and_reset(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    ids = list(range(1, 34))
    assert generate(llm, ids)[0].num_cached_tokens == 0
    assert generate(llm, ids)[0].num_cached_tokens == 32
    assert generate(llm, {"prompt_token_ids": ids, "cache_salt": "x"})[0].num_cached_tokens == 0
    stream = llm.stream("a", GREEDY)
    assert not llm.reset_prefix_cache()
    del stream
    assert llm.reset_prefix_cache()
    assert generate(llm, ids)[0].num_cached_tokens == 0


def test_metrics(llm: LLM) -> None:
    before = {metric.name: metric.value for metric in llm.get_metrics()}
    (output,) = generate(llm, "the")
    after = {metric.name: metric.value for metric in llm.get_metrics()}
    grown = {name: after[name] - before[name] for name in after}
    assert grown["pyvllm:generation_tokens_total"] == 8
    assert grown["pyvllm:prompt_tokens_total"] == len(output.prompt_token_ids)
    assert (after["pyvllm:num_requests_running"], after["pyvllm:kv_cache_usage_perc"]) == (0, 0)
    times = output.metrics
    assert times is not None
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts


def test_progress_counts_prompts_and_tokens(llm: LLM) -> None:
    shown: list[Any] = []

    class Bar:
        def __init__(self, total: int, **_: object) -> None:
            shown.append(total)

        def update(self, count: int) -> None:
            shown.append(count)

        def set_postfix_str(self, text: str) -> None:
            shown.append(text)

        def close(self) -> None:
            shown.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert shown[0] == 2
    assert shown.count(1) == 2
    assert shown[-2].startswith("est. speed input: ")
    assert "output: 0.00" not in shown[-2]
    assert shown[-1] == "closed"


def test_progress_bar_only_if_wanted(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    generate(llm, "a")
    assert capfd.readouterr() == ("", "")
    llm.generate("a", GREEDY)
    assert "Processed prompts: 100%" in capfd.readouterr().err


def test_chat_renders_the_template_once(llm: LLM, tiny_llama: Path) -> None:
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(tiny_llama)
    messages = [{"role": "system", "content": "be the one"}, {"role": "user", "content": "hi"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == expected
    assert output.prompt == reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    both = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert both[0].outputs[0].text == output.outputs[0].text
    assert both[1].prompt_token_ids != expected
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages[1].content }}!")
    assert output.prompt == "hi!"
