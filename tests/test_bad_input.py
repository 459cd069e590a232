"""Bad input is a `ValueError` (or `FileNotFoundError`) with the field, the value and what is allowed; others go on."""

import copy
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from pyvllm import LLM, BeamSearchParams, ParameterError, SamplingParams
from tests.async_requests import PATIENCE_S
from tests.conftest import TinyCheckpoint

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_gpu_blocks_override": 32,
    "block_size": 8,
    "max_model_len": 128,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
VOCABULARY = 320


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, prompt: Any) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([1, 2, VOCABULARY], rf"prompt_token_ids\[\d\] must be from 0 to {VOCABULARY - 1} .* got {VOCABULARY}"),
    ([-1], rf"prompt_token_ids\[\d\] must be from 0 to {VOCABULARY - 1} .* got -1"),
    ([1 << 31], rf"prompt_token_ids\[\d\] must be from 0 to {VOCABULARY - 1} .* got {1 << 31}"),
    ([1 << 70], rf"prompt_token_ids\[\d\] must be from 0 to {VOCABULARY - 1} .* got {1 << 70}"),
    ([1.5], r"prompt_token_ids must be a list of integers, got 1\.5"),
    ([True], "prompt_token_ids must be a list of integers, got True"),
    ([1, None], "prompt_token_ids must be a list of integers, got None"),
    ({"prompt_token_ids": ["1"]}, "prompt_token_ids must be a list of integers, got '1'"),
    ({"text": "x"}, r"prompt must be a dict of prompt, prompt_token_ids, cache_salt, got \['text'\]"),
    ({"cache_salt": "x"}, "prompt must be a dict with prompt or prompt_token_ids, got "),
    ({"prompt": 5}, "prompt must be a string, got 5"),
    ({"prompt": "x", "cache_salt": 5}, "cache_salt must be a string, got 5"),
    ({1: 2, "x": 3, "prompt": "a"}, r"prompt must be a dict of prompt, prompt_token_ids, cache_salt, got \[1, 'x'\]"),
    ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list of integers, got 'abc'"),
    ("a\ud800", "prompt has a lone surrogate at index 1: it is not Unicode"),
    ({"prompt": "\ud800", "prompt_token_ids": [1]}, "prompt has a lone surrogate at index 0"),
    ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt has a lone surrogate at index 0"),
    ([1] * 128, r"128.*127|127.*128"),
    ([1] * 1000, "1000.*12[78]|12[78].*1000"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokens(llm, prompt)
    with pytest.raises(ValueError, match=rf"prompts\[1\]: .*({message})"):
        tokens(llm, ["the", prompt, "in"])
    assert llm._calls is not None
    assert not llm._calls.engine.has_unfinished()
    assert len(tokens(llm, "the")) == 6


def test_last_id_and_longest_prompt_are_accepted(llm: LLM) -> None:
    assert len(tokens(llm, [VOCABULARY - 1])) == 6
    assert len(tokens(llm, [1] * 127)) == 1


@pytest.mark.parametrize("prompt", [5, b"x", bytearray(b"x"), memoryview(b"x"), None, object(), 1.5])
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="prompt"):
        tokens(llm, prompt)
    with pytest.raises(TypeError, match=r"prompts\[1\]: a prompt must be str, token ids or a dict"):
        tokens(llm, ["the", prompt])


@pytest.mark.parametrize("prompts", [np.array(1), torch.tensor(1), (text for text in "ab"), {"a"}])
def test_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompts must be str, token ids, a dict, or a list of these, got "):
        tokens(llm, prompts)


@pytest.mark.parametrize(
    ("prompts", "token_ids"),
    [
        (torch.tensor([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([torch.tensor([1]), torch.tensor([2])], [[1], [2]]),
        ([torch.tensor(1), np.int64(2)], [[1, 2]]),
        (np.array([[1, 2], [3, 4]], dtype=np.uint8), [[1, 2], [3, 4]]),
        ({"prompt_token_ids": torch.tensor([1, 2])}, [[1, 2]]),
        (np.array(["a", "a"]), [[64], [64]]),
    ],
)
def test_arrays_and_tensors(llm: LLM, prompts: Any, token_ids: list[list[int]]) -> None:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == token_ids


@pytest.mark.parametrize("prompts", [{"prompt": "a"}, [1, 2], ["a", 1]])
def test_texts_beside_token_ids(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompts must be text if there are prompt_token_ids too"):
        llm.generate(prompts, GREEDY, prompt_token_ids=[[1, 2]], use_tqdm=False)


@pytest.mark.parametrize("priority", [1, [1, 2], [], "1", [1.5], [None], [True], [1 << 63]])
def test_bad_priorities(llm: LLM, priority: Any) -> None:
    with pytest.raises(ParameterError, match="priority must be a ") as caught:
        llm.generate(["the"], GREEDY, priority=priority, use_tqdm=False)
    assert caught.value.parameter == "priority"
    assert len(llm.generate(["the", "in"], GREEDY, priority=cast(Any, np.array([2, 1])), use_tqdm=False)) == 2


def test_parameters_of_the_wrong_kind(llm: LLM) -> None:
    with pytest.raises(TypeError, match="params must be BeamSearchParams, got SamplingParams"):
        llm.beam_search("the", cast(Any, GREEDY))
    wrong: list[Any] = [{}, BeamSearchParams(beam_width=2, max_tokens=2)]
    for value in wrong:
        with pytest.raises(TypeError, match="sampling_params must be SamplingParams or a list of them, got "):
            llm.generate("the", value, use_tqdm=False)


def test_an_llm_is_not_copied(llm: LLM) -> None:
    for make in (copy.copy, copy.deepcopy, ForkingPickler.dumps):
        with pytest.raises(TypeError, match="an LLM cannot be copied or pickled"):
            make(llm)


def test_empty_prompt_without_bos(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "m")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["bos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(str(model), **OPTIONS) as llm:
        empty: list[Any] = ["", [], {"prompt": ""}, {"prompt_token_ids": []}]
        for prompt in empty:
            with pytest.raises(ParameterError, match=r"prompts\[1\]: prompt must be at least one token") as caught:
                tokens(llm, ["the", prompt])
            assert caught.value.parameter == "prompt"
        assert len(tokens(llm, "the")) == 6


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids"),
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"n": 16_000}, "n"),
        ({"stop_token_ids": list(range(VOCABULARY)), "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [257], "min_tokens": 1}, "min_tokens"),  # the end of sequence
        ({"allowed_token_ids": [5, 257], "stop_token_ids": [5], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_parameters_that_do_not_fit_the_model(llm: LLM, fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError, match=parameter) as caught:
        llm.generate("the", SamplingParams(**fields), use_tqdm=False)
    assert caught.value.parameter == parameter
    assert len(tokens(llm, "the")) == 6


def test_parameters_spoilt_after_construction(llm: LLM) -> None:
    params = GREEDY.clone()
    params.temperature = math.nan
    with pytest.raises(ParameterError, match="temperature must be"):
        llm.generate("the", params, use_tqdm=False)
    assert len(tokens(llm, "the")) == 6


def test_others_in_flight_are_not_disturbed(llm: LLM) -> None:
    expected = tokens(llm, "the")
    stream = llm.stream("the", GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        tokens(llm, [VOCABULARY])
    assert list(stream)[-1].outputs[0].token_ids == expected


def test_conversations_that_the_template_refuses(llm: LLM) -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="roles must alternate"):
        llm.chat(messages, chat_template=refusing, use_tqdm=False)
    other: list[Any] = [None, 5, "hi", {}, messages[0], ["x"], [messages, None], (message for message in messages)]
    for bad in ([], [{"role": "user", "content": [{"type": "audio"}]}], *other):
        with pytest.raises(ValueError, match=r"messages|content|audio"):
            llm.chat(bad, use_tqdm=False)
    wrong: dict[str, Any] = {"chat_template": 5, "tools": "x", "chat_template_kwargs": 5}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} must be None or a "):
            llm.chat(messages, use_tqdm=False, **{name: value})
    with pytest.raises(ValueError, match=r"add_generation_prompt|continue_final_message"):
        llm.chat(messages, continue_final_message=True, use_tqdm=False)
    assert len(tokens(llm, "the")) == 6


def test_unknown_model_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("missing/model", str(tmp_path / "nowhere"), str(tmp_path / "x.gguf")):
        with pytest.raises(FileNotFoundError, match=r"not found; tried: local path .*does not exist"):
            LLM(name)
    with pytest.raises(FileNotFoundError, match="not found; tried: local path"):
        LLM(cast(Any, tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        LLM(str(tmp_path))
    with pytest.raises(ValueError, match="/dev/null is neither a folder nor a file"):
        LLM("/dev/null")


@pytest.mark.parametrize(("size", "content"), [(0, b""), (100, b"GGUF"), (100, b"GGUF\x03\0\0\0" + b"\xff" * 60)])
def test_corrupt_gguf(tmp_path: Path, size: int, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content.ljust(size, b"\0"))
    with pytest.raises(ValueError, match=r"bad\.gguf"):
        LLM(str(path))


def test_truncated_gguf(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    with smollm2.open("rb") as whole:
        path.write_bytes(whole.read(smollm2.stat().st_size // 2))
    with pytest.raises(ValueError, match=r"half\.gguf.*truncated"):
        LLM(str(path))


def test_more_than_the_memory_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"[\d.]+ GiB of KV memory cannot be had: lower kv_cache_memory_bytes"):
        LLM(
            str(folder),
            **(OPTIONS | {"num_gpu_blocks_override": (1 << 31) // 8 - 1, "block_size": 8, "swap_space": 1e6}),
        )
    with pytest.raises(ValueError, match=r"the weights take \d+\.\d GiB in float32, but only \d+\.\d GiB of memory"):
        LLM(str(folder), hf_overrides={"vocab_size": 1 << 30}, load_format="dummy", **OPTIONS)


def test_unknown_architecture(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"NoSuchForCausalLM.*LlamaForCausalLM"):
        LLM(str(folder), hf_overrides={"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "max_model_len must be at most 512, .* got 513"),
        ({"num_gpu_blocks_override": 2, "max_model_len": 512}, r"max_model_len is 512 .* only 16 \(2 blocks"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16}, "max_num_batched_tokens must be at least"),
        ({"chat_template": "/nowhere/template.jinja"}, "template"),
        ({"generation_config": "/nowhere"}, "generation_config"),
        ({"override_generation_config": {"temperature": -1}}, "temperature must be"),
    ],
)
def test_engine_options_that_do_not_fit_the_model(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LLM(str(folder), **(OPTIONS | options))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_long_run_at_once(long_llama: Path) -> None:
    script = (
        "from pyvllm import LLM, SamplingParams\n"
        f"llm = LLM({str(long_llama)!r}, device='cpu', dtype='float32', num_gpu_blocks_override=8192, block_size=8)\n"
        "short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)\n"
        "expected = llm.generate('the', short, use_tqdm=False)[0].outputs[0].token_ids\n"
        "params = SamplingParams(temperature=0, max_tokens=60_000, ignore_eos=True)\n"
        "try:\n"
        "    print('running', flush=True)\n"
        "    llm.generate(['the'] * 8, params, use_tqdm=False)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "after = llm.generate('the', short, use_tqdm=False)[0].outputs[0].token_ids\n"
        "print('same' if after == expected else 'different', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "running\n"
            time.sleep(0.5)  # Any moment will do; most are in the middle of a step.
            child.send_signal(signal.SIGINT)
            # The run itself takes minutes.
            assert child.communicate(timeout=PATIENCE_S)[0] == "interrupted\nsame\n"
            assert child.returncode == 0
        finally:
            child.kill()
