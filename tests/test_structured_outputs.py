"""`structured_outputs`: whatever a random model says has the form that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from pyvllm import LLM, EngineArgs, LLMEngine, ParameterError, SamplingParams
from pyvllm.outputs import CompletionOutput, RequestOutput
from pyvllm.sampling_params import GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams
from tests.async_requests import PATIENCE_S
from tests.json_schemas import random_schema
from tests.small_llm import GREEDY, OPTIONS, generate

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def shared_llm(tiny_llama: Path) -> Iterator[LLM]:
    """Memory for many sequences that may become long."""
    with LLM(str(tiny_llama), **(OPTIONS | {"num_gpu_blocks_override": 4096})) as llm:
        yield llm


def form(max_tokens: int = 300, seed: int = 0, **fields: Any) -> SamplingParams:
    """Parameters for an output of a form; names of `StructuredOutputsParams`, then of `SamplingParams`."""
    own = {name: fields.pop(name) for name in list(fields) if name in StructuredOutputsParams.__dataclass_fields__}
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=StructuredOutputsParams(**own), **fields)


def say(llm: LLM, **fields: Any) -> list[CompletionOutput]:
    return generate(llm, PROMPT, form(**fields))[0].outputs


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_outputs_of_240_schemas_parse_and_validate(llm: LLM) -> None:
    rng = np.random.default_rng(0)
    schemas = [random_schema(rng) for _ in range(240)]
    kinds = {kind for schema in schemas for kind in re.findall(r'"([$\w]+)":', json.dumps(schema))}
    assert {"anyOf", "enum", "const", "pattern", "format", "prefixItems", "required", "$ref", "minimum"} <= kinds
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    params = [form(json=schema, seed=i, disable_any_whitespace=i % 3 > 0) for i, schema in enumerate(schemas)]
    outputs = [output.outputs[0] for output in generate(llm, [PROMPT] * len(schemas), params)]
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.finish_reason == "length":
            continue
        ended += 1
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(output.text), schema, format_checker=checker)
    assert ended >= 200


@pytest.mark.parametrize("given", ["dict", "text", "guided_decoding"])
def test_a_schema_may_come_as_a_dict_or_as_text(llm: LLM, given: str) -> None:
    schema: dict[str, Any] = {"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 3, "maxItems": 3}
    expected = say(llm, json=schema)[0].text
    assert len(json.loads(expected)) == 3
    if given == "text":
        assert say(llm, json=json.dumps(schema))[0].text == expected
    elif given == "guided_decoding":
        params = SamplingParams(max_tokens=300, seed=0, guided_decoding=GuidedDecodingParams(json=schema))
        assert generate(llm, PROMPT, params)[0].outputs[0].text == expected


def test_any_json_object(llm: LLM) -> None:
    for output in say(llm, json_object=True, n=12):
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)
        else:
            assert output.text.lstrip().startswith("{")


def test_whitespace_and_additional_properties(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for output in say(llm, json=schema, n=8, disable_any_whitespace=True, disable_additional_properties=True):
        assert output.text in ('{"a":true}', '{"a":false}')
    texts = [o.text for o in say(llm, json=schema, n=8, whitespace_pattern="[ ]?", disable_additional_properties=True)]
    assert all(re.fullmatch(r'\{ ?"a" ?: ?(true|false) ?\}', text) for text in texts)
    assert any(" " in text for text in texts)


# --- regular expressions, choices, grammars ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "regex",
    [
        "[a-c]{3}-[0-9]{2}",
        "(yes|no)( (please|thanks))?",
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}Z",
        "(GET|POST) /[a-z]{1,5} HTTP/1[.][01]\n",
        "[日本語]{2,4}",
        "(😀|é|e\u0301){3}",
        "a?b?c?d",
        "(a|ab)(c|bcd)",
        "[^a-z0-9]{2}x",
        r"[\w.]{1,8}@[a-z]{1,8}\.(com|org)",
        "x{1,20}y",
        "the (the )?",
    ],
)
def test_regular_expressions(llm: LLM, regex: str) -> None:
    outputs = say(llm, regex=regex, n=4)
    for output in outputs:
        assert re.fullmatch(regex, output.text, re.ASCII), output.text
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert len({output.text for output in outputs}) > (regex != "the (the )?")


def test_choices(llm: LLM) -> None:
    choices = ["positive", "negative", "neu", "neutral", 'a "quoted" one', "zwei Zeilen\n", "日本", "/x/"]
    outputs = say(llm, choice=choices, n=40)
    texts = {output.text for output in outputs}
    assert texts <= set(choices)
    assert len(texts) >= 4
    # The model decides where a choice may end or go on.
    assert all(output.finish_reason == "stop" for output in outputs)


def test_as_many_choices_and_properties_as_a_schema_may_have(llm: LLM) -> None:
    choices = [f"choice number {i}, one of many that are as long as this" for i in range(4096)]
    (output,) = say(llm, choice=choices)
    assert output.text in choices
    properties = {f"p{i}": {"const": i} for i in range(1200)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    no_end = {llm.get_tokenizer().encode("}")[0]: -100.0}
    (output,) = say(llm, json=schema, disable_any_whitespace=True, max_tokens=30, logit_bias=no_end)
    assert re.match(r'\{"p([0-9]+)":\1,"p([0-9]+)":', output.text)


# --- where a text may end ---------------------------------------------------------------------------------------------


def test_the_end_comes_only_where_the_grammar_has_one(llm: LLM) -> None:
    eos = 257
    for bias in (100.0, -100.0):
        for output in say(llm, regex="(ab){2,8}", n=4, logit_bias={eos: bias}):
            assert re.fullmatch("(ab){2,8}", output.text)
            assert (output.finish_reason, output.stop_reason) == ("stop", None)
            # What is wanted most is had as soon as it may be, what is wanted least only when nothing else may be.
            assert len(output.text) == (4 if bias > 0 else 16)
            assert (eos in output.token_ids) == (bias > 0)


def test_other_ends_of_sequence_and_stops_keep_their_reasons(tiny_checkpoint: Any) -> None:
    folder = tiny_checkpoint("llama", {"eos_token_id": [257, 259]})
    with LLM(str(folder), **OPTIONS) as llm:
        bias = {259: 100.0, 257: -100.0}
        (output,) = say(llm, regex="(ab){2,8}", logit_bias=bias)
        assert (output.text, output.finish_reason, output.stop_reason) == ("abab", "stop", 259)
        (output,) = say(llm, regex="(ab){2,8}", logit_bias=bias, min_tokens=9)
        assert (len(output.text) >= 8, output.stop_reason) == (True, 259)
        (output,) = say(llm, regex="(ab){2,8}", stop="ba")
        assert (output.text, output.stop_reason) == ("a", "ba")
        (output,) = say(llm, regex="(ab){2,8}", ignore_eos=True, logit_bias=bias)
        assert (output.text, output.finish_reason) == ("abab", "stop")


def test_max_tokens_may_cut_the_form(llm: LLM) -> None:
    (output,) = say(llm, regex="[ab]{50}", max_tokens=7)
    assert (len(output.text), output.finish_reason) == (7, "length")
    (output,) = say(llm, regex="[ab]{7}", max_tokens=7)
    assert (len(output.text), output.finish_reason) == (7, "stop")


# --- beside others ----------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"k": {"type": "array", "items": {"type": "integer"}, "minItems": 6}}}


def test_the_same_alone_in_a_crowd_preempted_and_in_chunks(tiny_llama: Path) -> None:
    prompts = [[i, *range(40 + i, 60)] for i in range(5)]
    params = [form(60, seed=i, json=SCHEMA | {"required": ["k"]}, disable_any_whitespace=True) for i in range(4)]
    params += [form(60, seed=9, regex="[a-z]{10,50}", n=3)]
    results = []
    for options in (
        {},
        {"num_gpu_blocks_override": 30, "max_model_len": 96},
        {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"async_scheduling": True},
    ):
        with LLM(str(tiny_llama), **(OPTIONS | options)) as llm:
            outputs = generate(llm, prompts, params)
            results.append([[completion.token_ids for completion in output.outputs] for output in outputs])
            if "max_model_len" in options:
                assert any(output.metrics and output.metrics.num_preemptions for output in outputs)
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        solo = [generate(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
        results.append([[completion.token_ids for completion in output.outputs] for output in solo])
    assert all(result == results[0] for result in results)


def test_plain_requests_are_not_disturbed(llm: LLM) -> None:
    plain = generate(llm, [PROMPT])[0].outputs[0].token_ids
    outputs = generate(llm, [PROMPT] * 3, [GREEDY, form(json=SCHEMA), GREEDY])
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == [plain, plain]


def test_streams_show_what_the_whole_shows(llm: LLM) -> None:
    params = form(regex="(日本|é😀|e\u0301){5,9}", output_kind=RequestOutputKind.DELTA)
    pieces = [output.outputs[0].text for output in llm.stream(PROMPT, params)]
    assert len(pieces) > 5
    assert "".join(pieces) == say(llm, regex="(日本|é😀|e\u0301){5,9}")[0].text


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs must be given exactly one of json, regex"),
        ({"json": {}, "regex": "x"}, r"given exactly one of .* got \['json', 'regex'\]"),
        ({"json": 5}, "whose json is a JSON schema as a string or a dict"),
        ({"json": "{"}, "structured_outputs.json must be a JSON schema, got no JSON"),
        ({"json": "[1]"}, "structured_outputs.json must be a JSON schema: an object, true or false"),
        ({"json": {"enum": [{1}]}}, "a schema that JSON can express"),
        ({"json": '{"a":' * 300 + "1" + "}" * 300}, "recursion limit exceeded"),
        ({"json": {"enum": ["x" * 300_000]}}, "structured_outputs.json must have at most 262144 bytes"),
        ({"regex": "x" * 20_000}, "structured_outputs.regex must have at most 16384 bytes"),
        ({"choice": []}, "structured_outputs.choice must hold 1 to 4096 strings"),
        ({"choice": ["a", ""]}, "structured_outputs.choice must hold 1 to 4096 strings"),
        ({"choice": ["a", 1]}, "whose choice is a list of strings"),
        ({"choice": ["x" * 100] * 4000}, "structured_outputs.choice must have at most 262144 bytes"),
        ({"grammar": 7}, "whose grammar is a string"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag must be JSON of structures"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structural_tag must be given a structure"),
        ({"structural_tag": {"format": {}}}, "structural_tag must be .*unknown field `format`"),
        ({"structural_tag": {"structures": [{"begin": "a", "schema": {}}], "triggers": ["b"]}}, "each tag begins with"),
        (
            {"structural_tag": {"structures": [{"begin": "a", "schema": 5}], "triggers": ["a"]}},
            "schemas that are objects",
        ),
    ],
)
def test_what_is_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    assert caught.value.parameter == "structured_outputs"


def test_two_names_at_once_are_refused() -> None:
    one = StructuredOutputsParams(regex="a")
    with pytest.raises(ParameterError, match="guided_decoding must be None beside structured_outputs"):
        SamplingParams(structured_outputs=one, guided_decoding=one)
    with pytest.raises(ParameterError, match="structured_outputs must be None or a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_tokenizer_is_needed(tiny_llama: Path) -> None:
    missing = pytest.raises(ParameterError, match="structured_outputs needs text")
    with LLM(str(tiny_llama), skip_tokenizer_init=True, **OPTIONS) as llm, missing:
        say(llm, regex="a")


HOSTILE: dict[str, dict[str, Any]] = {
    "no expression": {"regex": "("},
    "deep expression": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "deep grammar": {"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "unknown rule": {"grammar": "start: nothing"},
    "wide grammar": {"grammar": "start: " + " | ".join(f"/[a-z]*{i}[a-z]*/" for i in range(6000))},
    "endless reference": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "remote reference": {"json": {"$ref": "http://127.0.0.1/schema"}},
    "huge product": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"const": i}}} for i in range(9)]} for j in range(9)]}
    },
    "huge repetition": {"json": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$", "minLength": 1000}},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}},
    "deep parentheses": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "no such type": {"json": {"type": "foo"}},
    "bad whitespace": {"json_object": True, "whitespace_pattern": "("},
}


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(model=str(tiny_llama), **OPTIONS))


@pytest.mark.parametrize("name", list(HOSTILE))
def test_s026_what_cannot_be_compiled_ends_alone_and_soon(engine: LLMEngine, name: str) -> None:
    import time

    begin = time.monotonic()
    engine.add_request("hostile", {"prompt_token_ids": PROMPT}, form(**HOSTILE[name]))
    engine.add_request("plain", {"prompt_token_ids": PROMPT}, GREEDY)
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert time.monotonic() - begin < PATIENCE_S
    error = finished["hostile"].error
    assert isinstance(error, ParameterError)
    assert error.parameter == "structured_outputs"
    assert next(iter(HOSTILE[name])) in str(error)
    assert len(str(error)) < 500
    assert finished["hostile"].outputs[0].finish_reason == "error"
    assert finished["plain"].error is None
    assert len(finished["plain"].outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    "fields", [{"regex": "(a+)+"}, {"regex": "((a{1,1000}){1,1000}){1,1000}"}, {"json": {"pattern": "^(a+)+$"}}]
)
def test_s026_what_is_only_wild_works(llm: LLM, fields: dict[str, Any]) -> None:
    (output,) = say(llm, max_tokens=20, **fields)
    assert output.finish_reason in ("stop", "length")


def test_s027_schemas_do_not_pile_up(llm: LLM) -> None:
    import resource

    def many(start: int) -> int:
        params = [form(4, json={"type": "object", "title": f"schema {start + i}"}) for i in range(300)]
        generate(llm, [PROMPT] * len(params), params)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    first = many(0)
    assert many(300) - first < 100 * 1024  # KiB: one compiled schema has some


def test_an_abort_while_the_grammar_is_compiled(engine: LLMEngine) -> None:
    engine.add_request("gone", {"prompt_token_ids": PROMPT}, form(**HOSTILE["many properties"]))
    engine.step()
    engine.abort_request("gone")
    assert not engine.has_unfinished_requests()
    engine.add_request("plain", {"prompt_token_ids": PROMPT}, form(regex="ab"))
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step() if output.finished]
    assert texts == ["ab"]


def test_no_request_fails_because_of_what_others_of_its_form_have_said(llm: LLM) -> None:
    # It has 2 ** 30 states, more than may be known of it; a text goes through few.
    wanted: dict[str, Any] = {"regex": "[ab]*a[ab]{30}c", "allowed_token_ids": [64, 65], "temperature": 1e3, "n": 16}
    for seed in range(0, 80, 16):
        assert all(re.fullmatch("[ab]{300}", output.text) for output in say(llm, seed=seed, **wanted))


def test_requests_of_a_known_form_do_not_wait(engine: LLMEngine) -> None:
    known = form(1, regex="[a-f]{40}")
    engine.add_request("first", {"prompt_token_ids": PROMPT}, known)
    while engine.has_unfinished_requests():
        engine.step()
    for i in range(12):
        engine.add_request(str(i), {"prompt_token_ids": PROMPT}, known)
    assert sum(output.finished for output in engine.step()) == 12
