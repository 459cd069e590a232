"""Notations of grammars, features of schemas, tags in free text: what a form may say, and what is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pyvllm import LLM, ParameterError, SamplingParams
from pyvllm.outputs import CompletionOutput
from pyvllm.sampling_params import StructuredOutputsParams
from tests.small_llm import OPTIONS, generate


@pytest.fixture(scope="module")
def shared_llm(tiny_llama: Path) -> Iterator[LLM]:
    """Memory for many sequences that may become long."""
    with LLM(str(tiny_llama), **(OPTIONS | {"num_gpu_blocks_override": 2048})) as llm:
        yield llm


def say(llm: LLM, *, n: int = 8, max_tokens: int = 120, **fields: Any) -> list[CompletionOutput]:
    """Outputs of a form, `fields` of `StructuredOutputsParams`."""
    form = StructuredOutputsParams(**fields)
    params = SamplingParams(n=n, seed=1, max_tokens=max_tokens, structured_outputs=form)
    return generate(llm, [5, 6, 7], params)[0].outputs


# --- Lark and GBNF ----------------------------------------------------------------------------------------------------

SQL = r"SELECT col_[12] from table_[12] where col_[12] = [12]"
NUMBER = r"-?[0-9]+(\.[0-9]+)?"

GRAMMARS = {
    "lark sums": (
        'start: sum\nsum: product ("+" product)*\nproduct: NUM | "(" sum ")"\nNUM: /[1-9][0-9]{0,2}/\n',
        r"[0-9()+]+",
    ),
    "lark with imports, white space that is ignored, and letters of any case": (
        '%import common.INT\nstart: "a" INT "z"i\n%ignore / /\n',
        r" *a *[0-9]+ *[zZ] *",
    ),
    "lark with JSON inside": ('start: "x=" %json {"type": "boolean"}', "x=(true|false)"),
    "lark that says ::= in a string": ('start: "a::=" /[bc]/', "a::=[bc]"),
    "xgrammar's SQL": (
        'root ::= "SELECT " column " from " table " where " condition\n'
        'column ::= "col_1" | "col_2"\ntable ::= "table_1" | "table_2"\n'
        'condition ::= column " = " number\nnumber ::= "1" | "2"\n',
        SQL,
    ),
    "names with dashes, capitals and collisions": (
        'root ::= a-b a_b A-B start Root\na-b ::= "1"\na_b ::= "2"\nA-B ::= "3"\nstart ::= "4"\nRoot ::= "5"', "12345"
    ),
    "comments and lines inside parentheses": (
        '# "root" ::= [\nroot ::= (\n  "a" # one ) \n  | "b"\n) "#"\n', "[ab]#"
    ),
    "alternatives in lines of their own": ('root ::= item{2,4}\nitem ::= "x"\n  | "y"\n', "[xy]{2,4}"),
    "rules that go on in the next line": (
        'root ::=\n  item{2,4} |\n  # or\n\n  "z" none\nitem ::= "x" |\r\n"y"\r\nnone ::=\r\n', "[xy]{2,4}|z"
    ),
    "names that begin with no letter": ('root ::= 1-x{1,2} _x\n1-x ::= "a"\n_x ::= "b"', "a{1,2}b"),
    "classes": (r'root ::= [^a-z"\]/]{2} [/] "!" [\x41-\x43]', r'[^a-z"\]/]{2}/![A-C]'),
    "classes with what combines classes in expressions": (
        r'root ::= [[]{2} [^[\]!-z]{2} [a&&b~~c]{3} [+--]{3} [--/]{3} [a\-] [x-] ["\\/b]',
        r'\[\[[^!-z]{2}[ab&c~]{3}[+,\-]{3}[\-./]{3}[a\-][x\-]["\\/b]',
    ),
    "escapes": (r'root ::= "\n\"\\\x41\u00e9\U0001F600" [\t]', '\n"\\\\Aé😀\t'),
    "any character, nothing": ('root ::= . "z" ("" | "y")', "(?s:.)zy?"),
    "llama.cpp's numbers": (
        'root ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]{1,3})? ws\nws ::= | " " | "\\n" [ \\t]{0,2}',
        NUMBER + r"( |\n[ \t]{0,2})?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(llm: LLM, name: str) -> None:
    grammar, expected = GRAMMARS[name]
    ended = [output.text for output in say(llm, grammar=grammar) if output.finish_reason == "stop"]
    assert len(ended) >= 3
    for text in ended:
        assert re.fullmatch(expected, text), text
    if name == "lark sums":
        assert all(isinstance(eval(text, {}), int) for text in ended)  # noqa: S307  the characters are checked above


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('first: "a"', "no start rule found"),
        ('root ::= "a" other', "r_other_0"),
        ('root ::= "a', "grammar cannot be used"),
        ('start: A\nA.2: "a"', "priority not supported"),
        ('start: /(?=a)b/', "look-around"),
        ('start: /a(/', "regex"),
        ("root ::= <[40]>", r"panic: removal index \(is 0\) should be < len \(is 0\)$"),
        ("", "grammar cannot be used"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_named(llm: LLM, grammar: str, message: str) -> None:
    with pytest.raises(ParameterError, match=rf"structured_outputs\.grammar cannot be used: .*{message}|{message}"):
        say(llm, grammar=grammar)


def test_the_cause_is_shown_however_long_an_expression_is(llm: LLM) -> None:
    with pytest.raises(
        ParameterError, match=r"structured_outputs\.regex cannot be used: backreferences are not supported"
    ):
        say(llm, regex="x" * 1000 + r"(a)\1")


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}, {"stop_token_ids": [0], "logprobs": 0}, {"temperature": 0}])
def test_b065_a_form_of_which_other_parameters_leave_nothing(llm: LLM, fields: dict[str, Any]) -> None:
    form = StructuredOutputsParams(regex="[ab]{3}")
    message = r"structured_outputs\.regex cannot be used: allowed_token_ids, bad_words or logits_processors leave none"
    with pytest.raises(ParameterError, match=message):
        generate(llm, [5, 6, 7], SamplingParams(structured_outputs=form, allowed_token_ids=[80, 81], **fields))
    # What only bad words exclude is still had rather than something of another form.
    (output,) = generate(llm, [5, 6, 7], SamplingParams(structured_outputs=form, bad_words=["a", "b"]))[0].outputs
    assert re.fullmatch("[ab]{3}", output.text)


# --- schemas ----------------------------------------------------------------------------------------------------------

SMALL = {"type": "integer", "minimum": 0, "maximum": 3}
REFUSED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": SMALL, "uniqueItems": True},
    "contains": {"type": "array", "items": SMALL, "contains": {"const": 2}},
    "minContains": {"type": "array", "items": SMALL, "minContains": 1},
    "not": SMALL | {"not": {"const": 2}},
    "if": SMALL | {"if": {"minimum": 2}, "then": {"const": 3}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    r"\$dynamicRef": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}},
    "format: nonsense": {"type": "string", "format": "nonsense"},
    "look-around": {"type": "string", "pattern": "^(?=a)b"},
    "backreferences": {"type": "string", "pattern": r"^(a)\1$"},
    r"minimum \(5\)": {"type": "integer", "minimum": 5, "maximum": 3},
    r"minItems \(5\)": {"type": "array", "minItems": 5, "maxItems": 3},
    "required property 'z'": {"type": "object", "required": ["z"], "additionalProperties": False},
    "schema is false": False,
    "Invalid type: foo": {"type": ["integer", "foo"]},
}


@pytest.mark.parametrize("feature", REFUSED)
def test_what_a_schema_says_that_no_grammar_can_is_named(llm: LLM, feature: str) -> None:
    with pytest.raises(ParameterError, match=rf"structured_outputs\.json cannot be used: .*{feature}"):
        say(llm, json=json.dumps(REFUSED[feature]))


UNDERSTOOD: list[dict[str, Any]] = [
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "object", "maxProperties": 1, "additionalProperties": SMALL},
    {"type": "object", "patternProperties": {"^x[a-c]$": SMALL}, "additionalProperties": False, "maxProperties": 2},
    {"$ref": "#tree", "$defs": {"a": {"$anchor": "tree", "const": 1}}},
    {"$ref": "#/definitions/a", "maximum": 2, "definitions": {"a": SMALL}},
    {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 5}, {"multipleOf": 2}]},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string", "pattern": "b", "maxLength": 3},
    {"type": "object", "properties": {"b": {}, "a": SMALL}, "required": ["a"], "additionalProperties": False},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 3}, {"type": "null"}]},
    {"type": ["string", "null"], "maxLength": 2, "title": "T", "description": "D", "default": None, "examples": ["x"]},
    {"const": {"b": 1, "a": [None, "ü\n"]}},
]


@pytest.mark.parametrize("schema", UNDERSTOOD, ids=json.dumps)
def test_what_a_schema_says_holds(llm: LLM, schema: dict[str, Any]) -> None:
    outputs = say(llm, json=schema, disable_any_whitespace=True)
    ended = [output.text for output in outputs if output.finish_reason == "stop"]
    assert len(ended) >= 2
    for text in ended:
        jsonschema.validate(json.loads(text), schema)


# --- tags in free text ------------------------------------------------------------------------------------------------

TOOL = {
    "type": "object",
    "properties": {"n": SMALL},
    "required": ["n"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=one>", "schema": TOOL, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "#", "schema": SMALL, "end": ""},
    ],
    "triggers": ["<f=", "#"],
}


@pytest.mark.parametrize("given", [TAGS, json.dumps(TAGS)], ids=["dict", "text"])
def test_tags_have_their_form_and_text_between_them_is_free(llm: LLM, given: Any) -> None:
    letters = dict.fromkeys(llm.get_tokenizer().encode("<f=#"), 8.0)
    form = StructuredOutputsParams(structural_tag=given, disable_any_whitespace=True)
    params = SamplingParams(
        n=24, seed=3, max_tokens=60, ignore_eos=True, structured_outputs=form, logit_bias=letters, temperature=0.8
    )
    texts = [output.text for output in generate(llm, [5, 6, 7], params)[0].outputs]
    tag = re.compile(r'<f=(?:one>\{"n":[0-3]\}</f>|two>(?:true|false)</f>)|#[0-3]')
    found = 0
    for text in texts:
        rest = text
        while place := re.search("<f=|#", rest):
            rest = rest[place.start() :]
            whole = tag.match(rest)
            if whole is None:
                assert is_begun(rest), text
                break
            found += 1
            rest = rest[whole.end() :]
    assert found >= 24


def is_begun(text: str) -> bool:
    """Whether a text that was cut is the beginning of a tag."""
    wholes = [f'<f=one>{{"n":{n}}}</f>' for n in range(4)] + ["<f=two>true</f>", "<f=two>false</f>"]
    return any(whole.startswith(text) for whole in [*wholes, "#0"])


def test_a_trigger_that_begins_another_one_opens_the_tags_of_both(llm: LLM) -> None:
    begins = ["<a", "<b"]
    structures = [{"begin": begin, "schema": {"const": 1}, "end": ">"} for begin in begins]
    form = StructuredOutputsParams(structural_tag={"structures": structures, "triggers": ["<a", "<"]})
    more = {llm.get_tokenizer().encode("<")[0]: 100.0}
    params = SamplingParams(n=12, seed=3, max_tokens=4, structured_outputs=form, logit_bias=more)
    texts = {output.text for output in generate(llm, [5, 6, 7], params)[0].outputs}
    assert texts == {"<a1>", "<b1>"}


def test_text_without_tags_ends_as_the_model_likes(llm: LLM) -> None:
    form = StructuredOutputsParams(structural_tag=TAGS)
    params = SamplingParams(max_tokens=8, temperature=0, structured_outputs=form, logit_bias={257: 100.0})
    (output,) = generate(llm, [5, 6, 7], params)[0].outputs
    assert (output.token_ids, output.finish_reason) == ([257], "stop")
