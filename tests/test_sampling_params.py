"""`SamplingParams`: names, defaults, and what is refused before a request goes anywhere."""

import dataclasses
import functools
import math
import sys
from typing import Any, cast

import numpy as np
import pytest
import torch

from pyvllm import BeamSearchParams, ParameterError, SamplingParams
from pyvllm.arguments import field_docs
from pyvllm.sampling_params import RequestOutputKind


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (16, 0, [], [])
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_every_field_is_documented() -> None:
    assert set(field_docs(SamplingParams)) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(field_docs(BeamSearchParams)) == {field.name for field in dataclasses.fields(BeamSearchParams)}


BAD: list[tuple[str, list[Any]]] = [
    ("n", [0, -1, 1.5, "2", True, 10**6]),
    ("best_of", [0, -1, 1.5, "2"]),
    ("presence_penalty", [-2.01, 2.01, math.nan, math.inf, "x"]),
    ("frequency_penalty", [-2.01, 2.01, math.nan, -math.inf]),
    ("repetition_penalty", [0, -1, math.nan, math.inf]),
    ("temperature", [-0.1, math.nan, math.inf, -math.inf, 1e999, "0.7"]),
    ("top_p", [-1, 1.01, math.nan, "x"]),
    ("top_k", [-2, 1.5, "1"]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("seed", [1.5, "1", 1 << 64]),
    ("stop", [[""], "", [1], 5, "\ud800"]),
    ("stop_regex", [["("], "a*", [""], "a$", 5, [1], "(a{1000}){1000}", "\ud800"]),
    ("bad_words", [[""], "", [1], 5, "\ud800"]),
    ("truncate_prompt_tokens", [0, -2, 1.5, "7"]),
    ("logits_processors", [5, "f", [1]]),
    ("spaces_between_special_tokens", ["yes", 1]),
    ("stop_token_ids", [["a"], [1.5], 5, "", "1", b"1", {}, [True], [[1]]]),
    ("max_tokens", [0, -1, 1.5, "3"]),
    ("min_tokens", [-1, 17, 0.5]),
    ("logprobs", [-2, 1.5, "1"]),
    ("prompt_logprobs", [-2, 1.5]),
    ("logit_bias", [{3: 101}, {3: -100.5}, {3: math.nan}, {3: "x"}, {"abc": 1}, [1]]),
    ("allowed_token_ids", [[], ["x"], 7, b"1"]),
    ("length_penalty", [math.nan, 2.0]),
    ("early_stopping", [True, "never", "sometimes"]),
    ("output_kind", [7, "DELTA"]),
    ("use_beam_search", ["yes", 1]),
    ("detokenize", ["yes", 0]),
    ("skip_special_tokens", ["yes", 1]),
    ("include_stop_str_in_output", ["no", 0]),
    ("ignore_eos", ["no", 0]),
    ("structured_outputs", [{"regex": "a"}, "a", True]),
    ("guided_decoding", [{"regex": "a"}, "a", True]),
]


def test_every_field_can_be_wrong() -> None:
    assert {field for field, _ in BAD} == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD for value in values])
def test_bad_values_name_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    message = str(caught.value)
    assert message.startswith(f"{field} must be ")
    assert ", got " in message
    assert "\n" not in message
    assert len(message) < 300
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [1.5, "x", math.nan, -0.25, True])
def test_the_message_has_the_range(value: Any) -> None:
    shown = "NaN" if value is math.nan else repr(value)
    with pytest.raises(ParameterError, match=f"^top_p must be a number from 0 to 1, got {shown}$") as caught:
        SamplingParams(top_p=value)
    assert caught.value.value is value


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"temperature": 1e-30},
        {"temperature": 999999},
        {"n": 3, "temperature": 0},
        {"max_tokens": None},
        {"logit_bias": {}},
        {"logit_bias": {3: -100}},
        {"seed": -1},
        {"stop": [str(i) for i in range(100)]},
        {"logprobs": -1, "prompt_logprobs": 0},
    ],
)
def test_what_vllm_refuses_but_is_sound_is_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"use_beam_search": True, "best_of": 4}, "temperature"),
        ({"use_beam_search": True, "temperature": 0}, "best_of"),
        ({"use_beam_search": True, "best_of": 4, "temperature": 0, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "best_of": 4, "temperature": 0, "top_k": 5}, "top_k"),
        ({"stop": ["x"], "detokenize": False}, "stop"),
        ({"stop_regex": ["x"], "detokenize": False}, "stop_regex"),
        ({"best_of": 3, "n": 1, "output_kind": RequestOutputKind.DELTA}, "best_of"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**fields)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("make", [iter, tuple, np.array, torch.tensor])
def test_ids_become_a_list(make: Any) -> None:
    for kind in (SamplingParams, functools.partial(BeamSearchParams, beam_width=2, max_tokens=2)):
        params = kind(stop_token_ids=make([7, 8]), allowed_token_ids=make([8]))
        assert (params.stop_token_ids, params.allowed_token_ids) == ([7, 8], [8])
        assert all(type(token_id) is int for token_id in params.stop_token_ids or [])
    assert BeamSearchParams(beam_width=2, max_tokens=2, stop_token_ids=None).stop_token_ids == []


@pytest.mark.parametrize(("value", "shown"), [(True, "True"), ("never", '"never"')])
def test_early_stopping_is_shown_as_it_was_given(value: Any, shown: str) -> None:
    with pytest.raises(ParameterError, match=f"early_stopping must be False without use_beam_search, got {shown}"):
        SamplingParams(early_stopping=value)


@pytest.mark.parametrize("field", ["stop_token_ids", "n", "top_p", "logit_bias", "stop_regex", "logits_processors"])
def test_a_long_value_is_not_shown_whole(field: str) -> None:
    value = cast(Any, "(" * 10**6)
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 400
    assert caught.value.value in (value, [value])


def test_a_string_becomes_a_list() -> None:
    params = SamplingParams(stop="x", stop_regex="y", bad_words=cast(Any, "z"))
    assert (params.stop, params.stop_regex, params.bad_words) == (["x"], ["y"], ["z"])
    assert (SamplingParams().stop_regex, SamplingParams().bad_words) == ([], [])


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["x"], logit_bias={1: 2.0}, use_beam_search=True, best_of=2, temperature=0)
    copied = params.clone()
    assert copied == params
    assert isinstance(copied.stop, list)
    copied.stop.append("y")
    assert params.stop == ["x"]


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_beam_parameters_become_sampling_parameters() -> None:
    beams = BeamSearchParams(
        beam_width=4, max_tokens=8, length_penalty=0.5, early_stopping="never", stop="x", stop_regex="y"
    )
    params = beams.to_sampling_params()
    assert (params.use_beam_search, params.best_of, params.n, params.temperature) == (True, 4, 4, 0.0)
    assert (params.length_penalty, params.early_stopping, params.stop) == (0.5, "never", ["x"])
    assert params.stop_regex == ["y"]
    assert BeamSearchParams(beam_width=4, max_tokens=8, num_return_sequences=2).to_sampling_params().n == 2
    assert not BeamSearchParams(beam_width=1, max_tokens=8).to_sampling_params().use_beam_search


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1 to 16384, got 0"),
        ({"beam_width": 2.0}, "beam_width must be an integer from 1 to 16384, got 2.0"),
        ({"num_return_sequences": 5}, "num_return_sequences must be None or an integer from 1 to beam_width"),
        ({"temperature": 0.5}, "temperature must be 0 in a beam search, got 0.5"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"length_penalty": math.nan}, "length_penalty must be"),
        ({"stop": [""]}, "stop must be a string or a list of strings, Unicode and not empty"),
    ],
)
def test_bad_beam_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        BeamSearchParams(**({"beam_width": 4, "max_tokens": 8} | fields))


def test_parameters_need_neither_torch_nor_transformers() -> None:
    import subprocess

    script = "import sys, pyvllm; pyvllm.SamplingParams(); print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
