"""Every sampling parameter that requests may have: a value with what it does to the text, and values that are wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyvllm.sampling_params import SamplingParams, StructuredOutputsParams
from tests.server.conftest import SAY
from tests.some_processors import even, saying

PROMPT = "the rain in"
"""Of all rows. Said again it is the tokens " the", "in" and single letters."""
LETTERS = list(range(64, 72))
"""Ids of a to h."""
SOME_IDS = list(range(0, 320, 4))
"""So many ends that beams end at different lengths."""
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "best_of": 4, "temperature": 0, "seed": None}
TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}], "triggers": ["<"]}
OFTEN_TAGS = {"logit_bias": {"27": 30}}
"""Many of them: the id is that of <."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FUNCTIONS = {"say": saying, "even": even}
"""What the servers of the tests know by name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A field of a request."""

    name: str
    good: Any
    wrong: list[tuple[Any, str]]
    """Values, and what their messages have after the field's name."""
    beside: dict[str, Any] = field(default_factory=dict)
    """Further fields, with and without it."""
    says: str | None = None
    """The text there is with it, where that is known."""
    changes: bool = True
    """Whether the text, or its end, is another without it."""
    offline: dict[str, Any] | None = None
    """The same for `SamplingParams`, if it has another name or another shape there."""
    demo: bool = True
    """Whether the demo server has it."""

    @property
    def without(self) -> dict[str, Any]:
        """A request without the field."""
        return {"temperature": 1, "seed": 5, "max_tokens": 24} | self.beside

    @property
    def params(self) -> SamplingParams:
        """What the request with it asks, as programs say it that have the engine in their own process."""
        given = self.without | (self.offline or {self.name: self.good})
        given["logits_processors"] = [FUNCTIONS[name] for name in given.get("logits_processors", [])]
        return SamplingParams(**given)


def _form(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**fields)}


_MANY = [
    (["a"] * 1025, "must be at most 1024 words of 16384 characters together, got '1025 of 1025'"),
    ("a" * 16385, "got '1 of 16385'"),
]
_FLAG = [("x", "must be True or False, got 'x'"), (1, "must be True or False, got 1")]
_IDS = [([320], "must hold ids from 0 to 319 (the model's vocabulary), got 320"), ("abc", "must be a list of integers")]
_PENALTY = [(2.01, "must be a number from -2 to 2, got 2.01"), ("x", "must be a number from -2 to 2, got 'x'")]
_SHARE = [(1.01, "must be a number from 0 to 1, got 1.01"), (-0.5, "must be a number from 0 to 1, got -0.5")]

ROWS = [
    Row(name="n", good=3, wrong=[(0, "must be an integer from 1 to 16384, got 0")]),
    Row(name="best_of", good=5, wrong=[(0, "must be None or an integer from n to 16384, got 0 with n = 1")]),
    Row(name="presence_penalty", good=2.0, wrong=_PENALTY, beside={"allowed_token_ids": LETTERS}),
    Row(name="frequency_penalty", good=2.0, wrong=_PENALTY, beside={"allowed_token_ids": LETTERS}),
    Row(name="repetition_penalty", good=3.0, wrong=[(0, "must be a finite number above 0, got 0")]),
    Row(name="temperature", good=0, wrong=[(2.5, "must be a number from 0 to 2, got 2.5"), (-1, "must be a finite")]),
    Row(name="top_p", good=0.1, wrong=_SHARE),
    Row(name="min_p", good=0.9, wrong=_SHARE),
    Row(name="top_k", good=1, wrong=[(-2, "must be -1 or 0 (off), or an integer of at least 1, got -2")]),
    Row(name="seed", good=6, wrong=[(1.5, "must be None or a 64-bit integer, got 1.5")]),
    Row(
        name="stop",
        good=["ai"],
        wrong=[
            ([""], "must be a string or a list of strings, Unicode and not empty, got"),
            (["a"] * 65, "must be at most 64 strings"),
        ],
        beside=SAY,
        says="the r",
    ),
    Row(name="stop_token_ids", good=[64], wrong=_IDS, beside=SAY, says="the r"),
    Row(
        name="stop_regex",
        good="r[a-h]+",
        wrong=[("(", 'must be a regular expression (unclosed group), got ["("]')],
        beside=SAY,
        says="the ",
    ),
    Row(name="include_stop_str_in_output", good=True, wrong=_FLAG, beside=SAY | {"stop": "ai"}, says="the rai"),
    Row(
        name="bad_words",
        good=["a", "bc", "h"],
        wrong=[
            ([""], "must be a string or a list of strings, Unicode and not empty"),
            (5, "must be a string or a list of strings"),
            *_MANY,
        ],
        beside={"allowed_token_ids": LETTERS},
    ),
    Row(name="ignore_eos", good=True, wrong=_FLAG, beside=SAY, says=PROMPT),
    Row(
        name="truncate_prompt_tokens",
        good=3,
        wrong=[(-2, "input should be greater than or equal to -1, got -2")],
    ),
    Row(
        name="max_tokens",
        good=3,
        wrong=[(-1, "must be None or an integer of at least 1, got -1"), (600, "must be at most ")],
        beside=SAY,
        says="the r",
    ),
    Row(
        name="min_tokens",
        good=4,
        wrong=[(25, "must be an integer from 0 to max_tokens, got 25 with max_tokens = 24"), (-1, "got -1")],
        beside={"logit_bias": {"257": 100}, "temperature": 0},
        offline={"min_tokens": 4, "logit_bias": {257: 100}},
    ),
    Row(name="skip_special_tokens", good=False, wrong=_FLAG, beside={"allowed_token_ids": [64, 258, 259]}),
    Row(name="spaces_between_special_tokens", good=False, wrong=_FLAG, changes=False),
    Row(
        name="logit_bias",
        good={"64": 100},
        wrong=[
            ({"320": 1}, "must hold ids from 0 to 319"),
            ({"1": 101}, "must be a dict of token ids to numbers from -100 to 100, got 101 for 1"),
        ],
        offline={"logit_bias": {64: 100}},
        says="a" * 24,
    ),
    Row(
        name="allowed_token_ids",
        good=[65],
        wrong=[*_IDS, ([], "must be None or a list of integers, not empty, got []")],
        says="b" * 24,
    ),
    Row(
        name="logits_processors",
        good=["even"],
        wrong=[
            (["tests.some_processors:even"], "(say, even, settled, failing), got 'tests.some_processors:even'"),
            (
                "even",
                "must be a list of at most 64 names of the server's functions (say, even, settled, failing), got ",
            ),
        ],
    ),
    Row(name="use_beam_search", good=True, wrong=_FLAG, beside={"best_of": 4, "n": 2, "temperature": 0}),
    Row(
        name="length_penalty",
        good=-2.0,
        wrong=[("x", "must be a finite number, got 'x'")],
        beside=BEAMS | {"stop_token_ids": SOME_IDS},
    ),
    *(
        Row(
            name="early_stopping",
            good=good,
            wrong=[("x", 'must be True, False or "never", got')],
            beside=BEAMS | {"stop_token_ids": SOME_IDS, "length_penalty": penalty},
        )
        for good, penalty in ((True, 3.0), ("never", 1.0))
    ),
    Row(
        name="structured_outputs",
        good={"choice": ["red", "green"]},
        wrong=[
            ({"regex": 5}, "must be a form whose regex is a string, got 5"),
            ({"regex": {}}, "must be a form whose regex is a string, got {}"),
            ({"regex": "a", "choice": ["b"]}, "must be given exactly one of json, regex, choice, grammar, json_object"),
            ({}, "must be given exactly one of"),
            ({"json": {"enum": ["x" * 300_000]}}, ".json must have at most 262144 bytes, got 300013"),
        ],
        offline=_form(choice=["red", "green"]),
    ),
    *(
        Row(name="structured_outputs", good=form, wrong=[], offline=_form(**form))
        for form in (
            {"regex": "[0-9]{3}"},
            {"grammar": 'root ::= "x" [0-9]'},
            {"json": SCHEMA, "disable_any_whitespace": True},
            {"json_object": True},
        )
    ),
    Row(
        name="response_format",
        good={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        wrong=[({"type": "json_schema"}, "must have a JSON schema"), ({"type": "x"}, "input should be 'text', ")],
        offline=_form(json=SCHEMA),
        demo=False,
    ),
    Row(
        name="response_format",
        good={"type": "json_object"},
        wrong=[],
        offline=_form(json_object=True),
        demo=False,
    ),
    *(
        Row(
            name=name,
            good=good,
            wrong=[],
            beside=OFTEN_TAGS,
            offline=_form(structural_tag=TAGS) | {"logit_bias": {27: 30}},
            demo=demo,
        )
        for name, good, demo in (
            ("structured_outputs", {"structural_tag": TAGS}, True),
            ("response_format", {"type": "structural_tag"} | TAGS, False),
        )
    ),
    *(
        Row(
            name=f"guided_{kind}",
            good=value,
            wrong=[(5, "input should be "), (wrong, message)],
            offline=_form(**{kind: value}),
            demo=False,
        )
        for kind, value, wrong, message in (
            ("json", SCHEMA, "{", "guided_json must be a JSON schema, got no JSON: "),
            ("regex", "[0-9]{3}", "(", "guided_regex cannot be used: "),
            ("choice", ["red", "green"], [], "guided_choice must hold 1 to 4096 strings"),
            ("grammar", 'root ::= "x" [0-9]', "root ::= (", "guided_grammar cannot be used: "),
        )
    ),
]
