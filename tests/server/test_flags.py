"""Flags of `pyvllm serve`, and the file that may hold them."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pyvllm.config import EngineArgs
from pyvllm.server import command
from pyvllm.server.config import ServerArgs


def _parse(*argv: str) -> tuple[EngineArgs, ServerArgs]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_flags(parser)
    return command.parsed_args(parser, parser.parse_args(argv))


def test_every_field_has_a_flag_and_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "PORT", "HTTP_TIMEOUT_KEEP_ALIVE"):
        monkeypatch.delenv(f"PYVLLM_{name}", raising=False)
        monkeypatch.delenv(f"VLLM_{name}", raising=False)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert {item.name for item in fields(ServerArgs)} <= {action.dest for action in parser._actions}
    engine_args, args = _parse("m")
    assert (engine_args.model, engine_args.disable_log_stats) == ("m", False)
    assert args == ServerArgs()
    assert (args.host, args.port, args.api_key, args.shutdown_timeout) == (None, 8000, [], 30.0)


def test_lists_are_given_in_each_of_their_ways() -> None:
    _, args = _parse("m", "--api-key", "a", "--api-key", "b", "c", "--allowed-origins", '["x", "y"]')
    assert args.api_key == ["a", "b", "c"]
    assert args.allowed_origins == ["x", "y"]
    _, args = _parse("--model", "m", "--served-model-name", "a", "b", "--allowed-methods", "GET", "POST")
    assert args.served_model_name == ["a", "b"]
    assert args.allowed_methods == ["GET", "POST"]


def test_functions_on_logits_are_named_in_each_of_their_ways(tmp_path: Path) -> None:
    expected = {"a": "m:f", "b": "m:g"}
    both = ("--logits-processors", "a=m:f", "--logits-processors", "b=m:g")
    for words in (both, ("--logits-processors", '{"a": "m:f", "b": "m:g"}'), (*both[:2], both[2], '{"b": "m:g"}')):
        assert _parse("m", *words)[0].logits_processors == expected
    file = tmp_path / "c.yaml"
    for text in ("{a: 'm:f', b: 'm:g'}", "['a=m:f', 'b=m:g']"):
        file.write_text(f"logits-processors: {text}")
        assert _parse("m", "--config", str(file))[0].logits_processors == expected
    assert _parse("m", "--config", str(file), *both[:2])[0].logits_processors == {"a": "m:f"}
    assert _parse("m")[0].logits_processors is None


@pytest.mark.parametrize("text", ["m:f", "=m:f", "a=", "", "{", '["a"]'])
def test_wrong_names_of_functions_on_logits(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("m", "--logits-processors", text)
    assert "argument --logits-processors: " in capsys.readouterr().err


def test_environment_is_used_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "old")
    monkeypatch.setenv("PYVLLM_PORT", "81")
    assert (_parse("m")[1].api_key, _parse("m")[1].port) == (["old"], 81)
    monkeypatch.setenv("PYVLLM_API_KEY", "new")
    assert _parse("m")[1].api_key == ["new"]
    assert _parse("m", "--api-key", "given")[1].api_key == ["given"]
    assert "new" not in repr(_parse("m")[1])
    monkeypatch.setenv("PYVLLM_API_KEY", "from-a-file\n")
    assert _parse("m")[1].api_key == ["from-a-file"]
    monkeypatch.setenv("PYVLLM_PORT", "x")
    with pytest.raises(ValueError, match="PYVLLM_PORT must be an integer, got 'x'"):
        _parse("m")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("port", value) for value in (-1, 65536, "x", True)],
        *[("api_key", value) for value in ([""], ["a b"], ["a\n"], [" "])],
        ("served_model_name", "a"),
        ("allow_credentials", 1),
        ("shutdown_timeout", -1),
        ("max_body_bytes", 0),
        ("uvicorn_log_level", "loud"),
        ("unknown_fields", "ignore"),
        ("ssl_cert_reqs", 3),
        ("host", 5),
        ("max_num_queued_reqs", 0),
        ("ssl_certfile", None),
    ],
)
def test_wrong_values_are_named(field: str, value: Any) -> None:
    options: dict[str, Any] = {field: value}
    if field == "ssl_certfile":
        options["ssl_keyfile"] = "key.pem"
    with pytest.raises(ValueError, match=rf"^{field} must be "):
        ServerArgs(**options)


def test_file_gives_what_the_command_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: from-file\nport: 81\nserved-model-name: [a, b]\nenable_prefix_caching: false\n"
        "hf-overrides: {x: 1}\ndtype: float32\nroot_path: null\n"
    )
    engine_args, args = _parse("--config", str(file))
    assert (engine_args.model, engine_args.dtype, engine_args.hf_overrides) == ("from-file", "float32", {"x": 1})
    assert (args.port, args.served_model_name, engine_args.enable_prefix_caching) == (81, ["a", "b"], False)
    engine_args, args = _parse("m", "--config", str(file), "--port", "82", "--served-model-name", "c")
    assert (engine_args.model, args.port, args.served_model_name) == ("m", 82, ["c"])


def test_file_may_have_every_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_flags(parser)
    names = {item.name for cls in (EngineArgs, ServerArgs) for item in fields(cls)} - {"model"}
    actions = {action.dest: action for action in parser._actions if action.dest in names}
    assert len(actions) > 60
    file = tmp_path / "c.yaml"

    def parse(*argv: str) -> tuple[EngineArgs, ServerArgs]:
        return command.parsed_args(parser, parser.parse_args(argv))

    for name, action in actions.items():
        flag = "--" + name.replace("_", "-")
        others = ["m", "--ssl-certfile", "c"] if name == "ssl_keyfile" else ["m"]
        for value in (True, 1, 1024, *(action.choices or ()), "auto", {"x": "a:b"}, "x", ["x", "y"]):
            words = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
            try:
                by_flag = parse(*others, flag, *([] if value is True else words))
            except (SystemExit, ValueError):
                continue
            file.write_text(json.dumps({flag.removeprefix("--"): value}))  # which is YAML too
            assert parse(*others, "--config", str(file)) == by_flag, name
            break
        else:
            pytest.fail(f"no value of {name} was taken: {capsys.readouterr().err}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("porrt: 1", "unknown entry 'porrt'; did you mean port"),
        ("served-model-names: x", "did you mean served-model-name"),
        ("enforce-eager: 5", "must be true or false, got 5"),
        ("- a", "must hold entries such as"),
        ("a: [", "not YAML"),
        ("config: x", "unknown entry 'config'"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_wrong_files_are_errors(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        _parse("m", "--config", str(file))


def test_two_models_and_none() -> None:
    with pytest.raises(ValueError, match="two models are given"):
        _parse("a", "--model", "b")
    with pytest.raises(ValueError, match="a model must be given"):
        _parse()
