"""`logits_processors` over HTTP: functions of the server's start, by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pyvllm.cli import main
from tests.server.answers import CHAT, COMPLETIONS, body_of, both, whole
from tests.server.conftest import Served
from tests.server.test_errors import assert_error

PATHS = (COMPLETIONS, CHAT)


@pytest.mark.parametrize("path", PATHS)
def test_they_are_called_in_their_order(server: Served, path: str) -> None:
    fields = {"max_tokens": 3, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    for names, script in ((["say"], "abc"), (["even", "say"], "abc"), (["say", "even"], "aac")):
        for answer in both(server, path, body_of(path, script, logits_processors=names, **fields)):
            assert answer.choices[0].token_ids == [64 + "abc".index(letter) for letter in script]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "value",
    [
        *(["other"], ["say", "other"], ["tests.some_processors:saying"], ["os:system"], ["say"] * 65),
        *("say", {"say": 1}, 5, [5], [["say"]]),
    ],
)
def test_anything_but_known_names_is_refused(server: Served, path: str, value: Any) -> None:
    message = assert_error(server.post(path, body_of(path, "a", logits_processors=value)), 400, "logits_processors")
    assert "names of the server's functions (say, even, settled, failing), got " in message


def test_there_may_be_none(other_server: Served) -> None:
    assert whole(other_server, COMPLETIONS, {"prompt": "a", "logits_processors": []}).texts
    response = other_server.post(COMPLETIONS, {"prompt": "a", "logits_processors": ["say"]})
    assert "(it has none), got 'say'" in assert_error(response, 400, "logits_processors")


@pytest.mark.parametrize("path", PATHS)
def test_one_that_fails_ends_its_request_alone_and_is_logged(server: Served, path: str) -> None:
    size = len(server.log.read_text())
    body = body_of(path, "abc", logits_processors=["failing"], ignore_eos=True)
    response = server.post(path, body)
    assert "raised" not in assert_error(response, 500, "logits_processors")
    streamed = server.post(path, body | {"stream": True})
    error, end = streamed.text.split("\n\n")[-3:-1]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert end == "data: [DONE]"
    assert server.log.read_text()[size:].count("RuntimeError('no third token')") == 2
    assert whole(server, path, body | {"logits_processors": ["say"], "temperature": 0}).texts[0].startswith("abc")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--logits-processors=mine=my_module:thing", "logits_processors['mine'] must be a function, got 5"),
        ("--middleware=my_module.thing", "middleware must be classes or coroutine functions, got 'my_module.thing'"),
    ],
)
def test_modules_in_the_working_directory_are_found(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    message: str,
) -> None:
    (tmp_path / "my_module.py").write_text("thing = 5")
    monkeypatch.chdir(tmp_path)
    # As an installed `pyvllm` has it, which does not look there by itself.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    assert main(["serve", str(tiny_llama), "--port", "0", "--device", "cpu", flag]) == 2
    assert message in capsys.readouterr().err
