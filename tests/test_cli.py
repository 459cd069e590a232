"""The command line: what it prints, where, and with which exit status."""

import io
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyvllm import LLM, SamplingParams, __version__
from pyvllm.cli import main
from tests.async_requests import PATIENCE_S
from tests.conftest import TinyCheckpoint

FLAGS = ["--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "64", "--temperature", "0"]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: TinyCheckpoint) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def texts(model: str) -> dict[str, str]:
    """Prompt -> what the model makes of it in 9 tokens."""
    prompts = ["the", "in the end", "rain"]
    with LLM(model, device="cpu", dtype="float32", num_gpu_blocks_override=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


def run(*arguments: str) -> int:
    return main([*arguments])


def test_generate_prints_a_lone_text_alone(
    model: str, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", model, "-p", "the", "--max-tokens", "9", *FLAGS) == 0
    printed = capsys.readouterr()
    assert printed.out == texts["the"] + "\n"
    assert "error" not in printed.err.lower()


def test_generate_prints_several_in_order(
    model: str, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [argument for prompt in texts for argument in ("-p", prompt)]
    assert run("generate", model, *prompts, "--max-tokens", "9", *FLAGS) == 0
    expected = "\n".join(f"[{i}/3] {prompt}\n{text}\n" for i, (prompt, text) in enumerate(texts.items(), 1))
    assert capsys.readouterr().out == expected


def test_generate_n_and_best_of(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for flag in FLAGS if flag not in ("--temperature", "0")]
    assert run("generate", model, "-p", "the", "--n", "2", "--seed", "3", "--max-tokens", "4", *flags) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("[1/2] the\n")
    assert "\n[2/2] the\n" in printed
    assert run("generate", model, "-p", "the", "--best-of", "3", "--max-tokens", "4", *flags) == 0
    assert "[1/" not in capsys.readouterr().out


def test_generate_a_text_of_a_form(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    form = '{"choice": ["heads", "tails"]}'
    assert run("generate", model, "-p", "the", "--structured-outputs", form, "--max-tokens", "9", *FLAGS) == 0
    assert capsys.readouterr().out in ("heads\n", "tails\n")
    assert run("generate", model, "-p", "the", "--structured-outputs", '{"regex": "("}', *FLAGS) == 2
    assert "structured_outputs.regex cannot be used" in capsys.readouterr().err


def test_generate_with_functions_on_logits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--logits-processors={name}=tests.some_processors:{name}" for name in ("saying", "next_one")]
    assert run("generate", model, "-p", "abc", flags[0], *FLAGS) == 0
    assert capsys.readouterr().out == "abc\n"
    assert run("generate", model, "-p", "abc", *flags, "--max-tokens", "3", *FLAGS) == 0
    assert capsys.readouterr().out == "bcd\n"


def test_generate_from_a_file_and_from_stdin(
    model: str,
    texts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(texts) + "\n")
    assert run("generate", model, "-f", str(path), "--max-tokens", "9", *FLAGS) == 0
    assert capsys.readouterr().out.startswith(f"[1/3] the\n{texts['the']}\n\n[2/3] in the end\n")
    for given in ("the", "the\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        assert run("generate", model, "--max-tokens", "9", *FLAGS) == 0
        assert capsys.readouterr().out == texts["the"] + "\n"


def test_a_line_of_a_file_is_a_prompt_whatever_is_in_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a\u2028b\x0cc\r\n\nd", encoding="utf-8")
    assert run("generate", model, "-f", str(path), "--max-tokens", "1", *FLAGS) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("[1/2] a\u2028b\x0cc\n")
    assert "[2/2] d\n" in printed


def test_closed_streams(model: str) -> None:
    command = f"{sys.executable} -m pyvllm"
    for arguments, status, message in (
        (f"generate {model} --device cpu -p the >&-", 1, "pyvllm: error: standard output is closed\n"),
        (f"generate {model} <&-", 2, "pyvllm: error: a prompt must be given: -p TEXT, -f FILE, or on stdin\n"),
        (f"chat {model} --device cpu <&-", 0, ""),
    ):
        done = subprocess.run(["sh", "-c", f"{command} {arguments}"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (status, message)


def test_text_appears_as_it_is_made(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Screen())
    assert run("generate", model, "-p", "the", "--max-tokens", "9", "--ignore-eos", *FLAGS) == 0
    assert len([text for text in writes if text.strip()]) > 4


def test_chat_asks_and_answers(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model, device="cpu", dtype="float32", num_gpu_blocks_override=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=5)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
        first = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "why"}]
        second = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    flags = ["--max-tokens", "5", "--system-prompt", "be", *FLAGS]
    assert run("chat", model, "-q", "hi", *flags) == 0
    assert capsys.readouterr().out == first + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nwhy\n/exit\nnot asked\n"))
    assert run("chat", model, *flags) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_chat_goes_on_after_a_question_that_is_too_long(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 600 + "\nhi\n"))
    assert run("chat", model, "--max-tokens", "5", *FLAGS) == 0
    printed = capsys.readouterr()
    assert "pyvllm: error: " in printed.err
    assert len(printed.out) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "missing/model", "-p", "x"], "model 'missing/model' not found; tried: local path"),
        (["generate", "-p", "x"], "a model must be given"),
        (["generate", "M", "-p", "x", "--top-p", "1.5"], "top_p must be a number from 0 to 1, got 1.5"),
        (["generate", "M", "-p", "x", "--block-size", "0"], "block_size must be an integer from 1"),
        (["generate", "M", "-p", "x" * 600, "--device", "cpu"], "max_model_len"),
        (["generate", "M", "-f", "/nowhere.txt"], "/nowhere.txt"),
        (["generate", "M", "-f", sys.executable], f"{sys.executable} is not UTF-8"),
        (["generate", "M", "--model", "N", "-p", "x"], "two models are given, "),
        (["chat", "M", "-q", "x", "--device", "cpu", "--chat-template", "{{ raise_exception('no') }}"], "no"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    model: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(*[model if argument == "M" else argument for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pyvllm: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "M", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["generate", "M", "--logit-bias", "{"], "argument --logit-bias: not JSON"),
        (["generate", "M", "--logit-bias", '{"a": 1}'], "argument --logit-bias: bad key"),
        (["generate", "M", "--structured-outputs", "{"], "argument --structured-outputs: not JSON"),
        (["generate", "M", "--structured-outputs", '{"form": 1}'], "unexpected keyword argument 'form'"),
        (
            ["generate", "M", "--structured-outputs", '{"regex": 1}'],
            "structured_outputs must be a form whose regex is a string, got 1",
        ),
        (
            ["generate", "M", "--logits-processors", "f"],
            "argument --logits-processors: must be name=value or a JSON object",
        ),
        (["generate", "M", "--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["generate", "M", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["generate", "M", "--logprobs", "3"], "unrecognized arguments: --logprobs"),  # only text is printed
        (["sing"], "invalid choice: 'sing'"),
        ([], "required"),
    ],
)
def test_bad_flags_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_debug_shows_where_an_error_comes_from() -> None:
    with pytest.raises(ValueError, match="a model must be given"):
        run("generate", "-p", "x", "--debug")


def test_version_and_help_are_quick(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pyvllm {__version__}\n"
    script = (
        "import sys\nfrom pyvllm.cli import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nset()\n")
    assert "--max-model-len VALUE" in done.stdout
    assert "--presence-penalty VALUE" in done.stdout


def test_module_runs_as_a_program(model: str, texts: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pyvllm", "generate", model, "-p", "the", "--max-tokens", "9", *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == texts["the"] + "\n"
    assert done.stderr == ""


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_generate(long_llama: Path) -> None:
    command = [sys.executable, "-m", "pyvllm", "generate", str(long_llama), "-p", "the", "--n", "2", "--ignore-eos"]
    flags = ["--max-tokens", "60000", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "8192"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, *flags], **pipes) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"[1/2] the\n"
            assert child.stdout.read(1)  # Now it generates, which would take minutes.
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=PATIENCE_S)
            assert child.returncode == 130
            assert b"Traceback" not in errors
        finally:
            child.kill()
