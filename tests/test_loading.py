"""From arguments to an engine: dtypes, end-of-sequence ids, defaults, where tokenizer and template come from."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm import LLM, SamplingParams
from pyvllm.config import EngineArgs
from pyvllm.generation import default_sampling_params, eos_token_ids, read_generation_config
from pyvllm.hub import resolve_model
from pyvllm.loading import choose_device, resolve_dtype
from tests.conftest import TinyCheckpoint

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("llama")


@pytest.mark.parametrize(
    ("dtype", "config", "expected"),
    [
        ("auto", {"dtype": "float32"}, torch.float32),
        ("auto", {"torch_dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"dtype": "torch.float16"}, torch.bfloat16),
        ("auto", {}, torch.float32),  # that of the stored weights
        ("half", {"dtype": "float32"}, torch.float16),
        ("float", {"dtype": "bfloat16"}, torch.float32),
    ],
)
def test_dtype(folder: Path, dtype: Any, config: dict[str, Any], expected: torch.dtype) -> None:
    args = EngineArgs(model=str(folder), dtype=dtype)
    assert resolve_dtype(args, config, resolve_model(str(folder)), CPU) is expected


def test_dtype_of_dummy_weights_and_of_unsupported_configs(folder: Path) -> None:
    files = resolve_model(str(folder))
    assert resolve_dtype(EngineArgs(model="m", load_format="dummy"), {}, files, CPU) is torch.bfloat16
    with pytest.raises(ValueError, match=r"config field dtype is 'float8', supported: half, .*; set dtype"):
        resolve_dtype(EngineArgs(model="m"), {"dtype": "float8"}, files, CPU)


def test_a_change_of_dtype_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pyvllm"):
        resolve_dtype(EngineArgs(model="m"), {"dtype": "float16"}, resolve_model(str(folder)), CPU)
    assert "running in bfloat16: float16, in which the model is stored, is slow on a CPU" in caplog.text


def test_float16_stays_on_a_gpu(folder: Path) -> None:
    files, device = resolve_model(str(folder)), torch.device("cuda")
    assert resolve_dtype(EngineArgs(model="m"), {"dtype": "float16"}, files, device) is torch.float16


def test_device_is_a_gpu_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(EngineArgs(model="m")) == choose_device(EngineArgs(model="m", device="cpu")) == CPU
    with pytest.raises(ValueError, match="device is 'cuda', but torch finds no GPU"):
        choose_device(EngineArgs(model="m", device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (
        choose_device(EngineArgs(model="m")).type == choose_device(EngineArgs(model="m", device="cuda")).type == "cuda"
    )
    assert choose_device(EngineArgs(model="m", device="cpu")) == CPU


def test_quantised_gguf_runs_in_bfloat16(smollm2: Path) -> None:
    files = resolve_model(str(smollm2))
    assert resolve_dtype(EngineArgs(model="m"), files.config, files, CPU) is torch.bfloat16


def test_end_of_sequence_ids() -> None:
    assert eos_token_ids([7], {"eos_token_id": 2}, {"eos_token_id": [2, 5]}) == [7, 2, 5]
    assert eos_token_ids([2], {"eos_token_id": None}, {}) == [2]
    assert eos_token_ids([], {}, {}) == []
    for bad in ("x", -1, [1.5], [None], True):
        with pytest.raises(ValueError, match="eos_token_id of the model must be null, an id or a list of ids, got"):
            eos_token_ids([], {"eos_token_id": bad})


def test_defaults_are_those_of_the_file_and_of_overrides(caplog: pytest.LogCaptureFixture) -> None:
    config = {"temperature": 0.5, "top_k": None, "do_sample": True, "max_new_tokens": 7}
    with caplog.at_level(logging.INFO, "pyvllm"):
        params = default_sampling_params(EngineArgs(model="m", override_generation_config={"top_p": 0.9}), config)
    assert params == SamplingParams(temperature=0.5, max_tokens=7, top_p=0.9)
    assert "default sampling parameters of this model: {'temperature': 0.5, " in caplog.text
    assert default_sampling_params(EngineArgs(model="m", generation_config="vllm"), config) == SamplingParams()
    with pytest.raises(ValueError, match=r"generation_config .*: top_p must be a number from 0 to 1, got 9"):
        default_sampling_params(EngineArgs(model="m"), {"top_p": 9})


def test_generation_config_of_another_folder(tmp_path: Path) -> None:
    args = EngineArgs(model="m", generation_config=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"generation_config is .* is not a file"):
        read_generation_config(args, {"top_k": 1})
    path = tmp_path / "generation_config.json"
    path.write_text('{"top_k": 2}')
    assert read_generation_config(args, {"top_k": 1}) == {"top_k": 2}
    for bad, message in (("[1]", "holds a list, must hold an object"), ("{", "not valid JSON")):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            read_generation_config(args, None)


def with_generation_config(folder: Path, target: Path, **fields: Any) -> str:
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return str(target)


def test_b066_defaults_from_generation_config(folder: Path, tmp_path: Path) -> None:
    model = with_generation_config(
        folder, tmp_path / "m", temperature=0.0001, top_k=1, top_p=None, max_new_tokens=5, eos_token_id=[257, 5]
    )
    with LLM(model, **OPTIONS) as llm:
        defaults = llm.get_default_sampling_params()
        assert defaults == SamplingParams(temperature=0.0001, top_k=1, max_tokens=5)
        defaults.temperature = 3.0
        assert llm.get_default_sampling_params().temperature == 0.0001
        (output,) = llm.generate("the", use_tqdm=False)
        greedy = llm.generate("the", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0]
        assert output.outputs[0].token_ids == greedy.outputs[0].token_ids
        (output,) = llm.generate(
            "the", SamplingParams(temperature=0, max_tokens=5, logit_bias={5: 100}), use_tqdm=False
        )
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 5)
    with LLM(model, **OPTIONS, generation_config="vllm", override_generation_config={"top_p": 0.5}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_p=0.5)
        (output,) = llm.generate(
            "the", SamplingParams(temperature=0, max_tokens=5, logit_bias={5: 100}), use_tqdm=False
        )
        assert output.outputs[0].stop_reason == 5


def test_b101_end_of_sequence_from_all_sources(folder: Path, tmp_path: Path) -> None:
    model = with_generation_config(folder, tmp_path / "m", eos_token_id=[257, 5], pad_token_id=None)
    config = json.loads((Path(model) / "config.json").read_text())
    (Path(model) / "config.json").write_text(json.dumps(config | {"eos_token_id": 6, "pad_token_id": None}))
    with LLM(model, **OPTIONS) as llm:
        for token, reason in ((257, None), (5, 5), (6, 6)):
            params = SamplingParams(temperature=0, max_tokens=5, logit_bias={token: 100})
            completion = llm.generate("the", params, use_tqdm=False)[0].outputs[0]
            assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([token], "stop", reason)


def test_overrides_edit_the_config_before_the_model_is_chosen(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Unknown"]}))
    with LLM(str(model), hf_overrides={"architectures": ["LlamaForCausalLM"]}, **OPTIONS) as llm:
        assert len(llm.generate("the", use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_tokenizer_and_template_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}?")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*; pass tokenizer, or skip_tokenizer_init=True"):
        LLM(str(model), **OPTIONS)
    with LLM(str(model), tokenizer=str(folder), chat_template=str(tmp_path / "t.jinja"), **OPTIONS) as llm:
        (output,) = llm.chat([{"role": "user", "content": "why"}], use_tqdm=False)
        assert output.prompt == "why?"


def test_automatic_length_is_what_the_pool_holds(folder: Path) -> None:
    options = OPTIONS | {"num_gpu_blocks_override": 5, "block_size": 8}
    with LLM(str(folder), max_model_len="auto", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 40 - 3
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(ValueError, match="40"):
            llm.generate([1] * 40, params, use_tqdm=False)


def test_start_does_not_touch_the_pool(folder: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 2 << 30, "swap_space": 1}
    with LLM(str(folder), device="cpu", dtype="float32", **sizes) as llm:
        llm.generate("the", use_tqdm=False)
        assert resident_bytes() - before < 1 << 30


def test_statistics_are_logged_if_wanted(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYVLLM_LOG_STATS_INTERVAL", "0")
    with caplog.at_level(logging.INFO, "pyvllm"), LLM(str(folder), **OPTIONS, disable_log_stats=False) as llm:
        llm.generate("the", use_tqdm=False)
    assert "tokens/s, running 1, waiting 0" in caplog.text
    monkeypatch.setenv("PYVLLM_LOG_STATS_INTERVAL", "often")
    with pytest.raises(ValueError, match="PYVLLM_LOG_STATS_INTERVAL must be a number of seconds, got 'often'"):
        LLM(str(folder), **OPTIONS, disable_log_stats=False)
