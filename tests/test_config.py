"""Engine configuration: what is refused, with which words, and what defaults become."""

import argparse
import dataclasses
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any, cast

import pytest

from pyvllm.arguments import field_docs
from pyvllm.config import (
    DEVICE_DEFAULTS,
    EngineArgs,
    limit_to_pool,
    parse_length,
    resolve_max_model_len,
    resolve_step_limits,
)
from pyvllm.logging import configure_logging
from pyvllm.memory import GIB, available_memory_bytes, cpu_pool_bytes, pool_sizes

CPU = DEVICE_DEFAULTS["cpu"]


def engine_args(**options: Any) -> EngineArgs:
    return EngineArgs.from_options("m", options)


@pytest.mark.parametrize(
    ("value", "length"),
    [(4096, 4096), ("4096", 4096), ("16k", 16_000), ("16K", 16_384), ("1.5k", 1500), ("auto", None), (-1, None)],
)
def test_lengths_are_numbers_or_words(value: object, length: int | None) -> None:
    assert parse_length("max_model_len", value) == length
    engine_args(max_model_len=value)


@pytest.mark.parametrize("value", [0, -2, True, 1.5, "0", "x", "k", "", "1.0001k", "inf", "nan", [1]])
def test_bad_lengths_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be a number of tokens of at least 1.*got "):
        engine_args(max_model_len=value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "int8", r"dtype must be one of auto, half, .*, got 'int8'"),
        ("load_format", "zip", r"load_format must be one of auto, .*, got 'zip'"),
        ("preemption_mode", "drop", r"preemption_mode must be one of auto, swap, recompute, got 'drop'"),
        ("scheduling_policy", "lifo", r"scheduling_policy must be one of fcfs, priority, got 'lifo'"),
        ("block_size", 0, r"block_size must be an integer from 1 to \d+, got 0"),
        ("gpu_memory_utilization", 1.5, r"gpu_memory_utilization must be a number above 0 and at most 1, got 1.5"),
        ("gpu_memory_utilization", 0, r"gpu_memory_utilization must be .* got 0"),
        ("gpu_memory_gib", -1, r"gpu_memory_gib must be None or a number of GiB above 0, got -1"),
        ("device", "tpu", r"device must be one of auto, cuda, cpu, got 'tpu'"),
        ("max_num_seqs", 0, r"max_num_seqs must be an integer from 1 .* got 0"),
        ("max_num_seqs", True, r"max_num_seqs must be an integer from 1 .* got True"),
        ("max_num_seqs", 1 << 31, r"max_num_seqs must be an integer from 1 to 2147483647, got 2147483648"),
        ("swap_space", "4", r"swap_space must be None or a number of GiB .* got '4'"),
        ("max_num_batched_tokens", 0, r"max_num_batched_tokens must be an integer from 1 to \d+, got 0"),
        ("kv_cache_memory_bytes", 0, r"kv_cache_memory_bytes must be an integer of at least 1, got 0"),
        ("num_gpu_blocks_override", -1, r"num_gpu_blocks_override must be an integer from 1 .* got -1"),
        ("swap_space", -1, r"swap_space must be None or a number of GiB from 0 .* got -1"),
        ("swap_space", float("nan"), r"swap_space must be .* got nan"),
        ("max_logprobs", -2, r"max_logprobs must be an integer from -1 to 2147483647, got -2"),
        ("hf_overrides", [1], r"hf_overrides must be None or a dict, got \[1\]"),
    ],
)
def test_errors_name_field_value_and_range(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_args(**{field: value})


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("enforce_eager", ["false", 0, None], "True or False"),
        ("enable_prefix_caching", [None, 1], "True or False"),
        ("skip_tokenizer_init", ["no"], "True or False"),
        ("async_scheduling", [0, "yes"], "None, True or False"),
        ("tokenizer", [5, b"x", ""], "None or a string that is not empty"),
        ("chat_template", [False, ["x"], ""], "None or a string that is not empty"),
        ("revision", [1], "None or a string that is not empty"),
        ("generation_config", [None, {}], "a string that is not empty"),
    ],
)
def test_kinds_are_checked(field: str, values: list[object], expected: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{field} must be {expected}, got {value!r}")):
            engine_args(**{field: value})


def test_paths_become_text() -> None:
    args = EngineArgs(model=cast(str, Path("a/b")), tokenizer=cast(str, Path("c")), chat_template=cast(str, Path("d")))
    assert (args.model, args.tokenizer, args.chat_template) == ("a/b", "c", "d")


def test_a_token_of_the_wrong_kind_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"^hf_token must be None, True, False or a string$"):
        engine_args(hf_token=b"secret")


def test_empty_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model must be a folder, a file or a name, got ''"):
        EngineArgs(model="")


def test_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"unknown engine argument 'max_modle_len'; did you mean max_model_len\?"):
        engine_args(max_modle_len=1)
    with pytest.raises(TypeError, match="unknown engine argument 'zzz'; known are tokenizer, "):
        engine_args(zzz=1)


@pytest.mark.parametrize("name", ["max_context_len_to_capture", "max_seq_len_to_capture", "use_v2_block_manager"])
def test_old_arguments_only_warn(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"{name}=8 has no effect any more"):
        assert engine_args(**{name: 8}) == engine_args()


def test_no_warning_without_old_arguments() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = engine_args(seed=1)
        assert dataclasses.replace(args, seed=2).seed == 2


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(engine_args(hf_token="secret"))


def test_every_field_is_documented_and_has_a_flag() -> None:
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(field_docs(EngineArgs)) == names
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    flags = {option for action in parser._actions for option in action.option_strings}
    assert {"--" + name.replace("_", "-") for name in names} <= flags


def test_flags_become_fields() -> None:
    line = (
        "--model m --max-model-len 16k --no-enable-prefix-caching --swap-space 0.5 --max-num-seqs 3 "
        "--dtype float32 --async-scheduling --hf-token true"
    )
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--other", default=1)
    args = parser.parse_args([*line.split(), "--hf-overrides", '{"vocab_size": 7}'])
    assert EngineArgs.from_cli_args(args) == EngineArgs(
        model="m",
        max_model_len="16k",
        enable_prefix_caching=False,
        swap_space=0.5,
        max_num_seqs=3,
        dtype="float32",
        async_scheduling=True,
        hf_token=True,
        hf_overrides={"vocab_size": 7},
    )


def test_no_flags_are_the_defaults() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert EngineArgs.from_cli_args(parser.parse_args(["--model", "m"])) == EngineArgs(model="m")


def test_length_beyond_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYVLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    with pytest.raises(ValueError, match=r"max_model_len must be at most 2048, .* got 4096"):
        resolve_max_model_len(engine_args(max_model_len=4096), native=2048)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert resolve_max_model_len(engine_args(max_model_len=4096), native=2048) == 4096
    assert resolve_max_model_len(engine_args(), native=2048) == 2048


def test_more_than_the_usual_length_has_to_be_asked_for() -> None:
    assert resolve_max_model_len(engine_args(), native=2048, usual=512) == 512
    assert resolve_max_model_len(engine_args(max_model_len="auto"), native=2048, usual=512) == 2048
    assert resolve_max_model_len(engine_args(max_model_len=600), native=2048, usual=512) == 600


def test_b023_pool_smaller_than_one_request() -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 4096 tokens, but the KV pool holds only 128 \(8 blocks"):
        limit_to_pool(engine_args(max_model_len=4096), max_model_len=4096, num_blocks=8, block_size=16)
    assert limit_to_pool(engine_args(max_model_len="auto"), max_model_len=4096, num_blocks=8, block_size=16) == 128
    assert limit_to_pool(engine_args(max_model_len=128), max_model_len=128, num_blocks=8, block_size=16) == 128


def test_b024_whole_prompts_need_a_budget() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens must be at least max_model_len \(64\) .* got 16"):
        resolve_step_limits(engine_args(max_num_batched_tokens=16, enable_chunked_prefill=False), 64, CPU)
    assert resolve_step_limits(engine_args(max_num_batched_tokens=16), 64, CPU).max_num_batched_tokens == 16
    limits = resolve_step_limits(engine_args(enable_chunked_prefill=False), 10_000, CPU)
    assert limits.max_num_batched_tokens == 10_000


def test_defaults_are_those_of_the_device() -> None:
    limits = {name: resolve_step_limits(engine_args(), 64, defaults) for name, defaults in DEVICE_DEFAULTS.items()}
    assert (limits["cpu"].max_num_seqs, limits["cpu"].max_num_batched_tokens) == (256, 4096)
    assert (limits["cuda"].max_num_seqs, limits["cuda"].max_num_batched_tokens) == (1024, 8192)


def pool(args: EngineArgs, *, available_bytes: int = 16 * GIB, max_model_len: int = 1024) -> tuple[int, int]:
    source, num_bytes = cpu_pool_bytes(
        args, block_size=16, block_bytes=1 << 20, max_model_len=max_model_len, available_bytes=available_bytes
    )
    sizes = pool_sizes(args, num_bytes, source=source, block_size=16, block_bytes=1 << 20)
    return sizes.num_gpu_blocks, sizes.num_cpu_blocks


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYVLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_environment")
def test_pool_of_a_cpu_is_a_quarter_of_free_memory_up_to_4_gib() -> None:
    assert pool(engine_args(), available_bytes=8 * GIB) == (2048, 2048)
    assert pool(engine_args(), available_bytes=64 * GIB) == (4096, 4096)


@pytest.mark.usefixtures("no_environment")
def test_pool_is_no_larger_than_all_sequences_need() -> None:
    assert pool(engine_args(max_num_seqs=2), max_model_len=160) == (20, 20)


@pytest.mark.usefixtures("no_environment")
def test_pool_grows_for_one_longest_request_if_half_of_free_memory_allows() -> None:
    assert pool(engine_args(), available_bytes=16 * GIB, max_model_len=6 * 16 * 1024)[0] == 6 * 1024
    assert pool(engine_args(), available_bytes=8 * GIB, max_model_len=6 * 16 * 1024)[0] == 2048


def test_pool_sizes_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert pool(engine_args()) == (8192, 4096)
    monkeypatch.setenv("PYVLLM_CPU_KVCACHE_SPACE", "0.5")
    assert pool(engine_args()) == (512, 512)
    assert pool(engine_args(kv_cache_memory_bytes=3 << 20)) == (3, 3)
    assert pool(engine_args(kv_cache_memory_bytes=3 << 20, swap_space=1)) == (3, 1024)
    assert pool(engine_args(num_gpu_blocks_override=7, swap_space=0)) == (7, 0)


def test_more_slots_than_int32_has_are_refused() -> None:
    most = ((1 << 31) - 1) // 16
    assert pool(engine_args(num_gpu_blocks_override=most, block_size=16, swap_space=0)) == (most, 0)
    with pytest.raises(ValueError, match=rf"num_gpu_blocks_override must be at most {most} .* got {most + 1}"):
        pool(engine_args(num_gpu_blocks_override=most + 1, block_size=16))


def test_pool_too_small_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes must be at least 1048576 bytes, .* got 9"):
        pool(engine_args(kv_cache_memory_bytes=9))
    monkeypatch.setenv("PYVLLM_CPU_KVCACHE_SPACE", "lots")
    with pytest.raises(ValueError, match="PYVLLM_CPU_KVCACHE_SPACE must be a number of GiB above 0, got 'lots'"):
        pool(engine_args())


def test_free_memory_is_known() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50


def test_files_in_the_cache_are_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 1000 kB\n",
        "/sys/fs/cgroup/memory.max": "500000\n",
        "/sys/fs/cgroup/memory.current": "450000\n",
        "/sys/fs/cgroup/memory.stat": "anon 50000\nfile 400000\ninactive_file 300000\nactive_file 90000\n",
    }

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_memory_bytes() == 500_000 - 450_000 + 390_000
    del files["/sys/fs/cgroup/memory.stat"]
    assert available_memory_bytes() == 50_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_memory_bytes() == 1_024_000


@pytest.mark.parametrize("content", [None, "x", "{}", json.dumps({"version": 1, "handlers": 5})])
def test_a_bad_configuration_of_logging_is_named(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "logging.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("PYVLLM_LOGGING_CONFIG_PATH", str(path))
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _: False)
    with pytest.raises(ValueError, match=f"PYVLLM_LOGGING_CONFIG_PATH={path}: no configuration of logging: "):
        configure_logging()
