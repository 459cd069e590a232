"""What a checkpoint on disk contains: every tensor's shape and dtype from the headers alone, its data on demand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pyvllm import gguf

_SAFETENSORS_DTYPES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class WeightError(ValueError):
    """A checkpoint that is damaged or does not fit the model; the message names the files and tensors."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint. `read` maps or decodes the data (on the CPU); until then nothing is read."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    read: Callable[[], Tensor]


Tensors = Mapping[str, StoredTensor]
"""Checkpoint name -> tensor, in file order."""


def open_safetensors(folder: Path) -> Tensors:
    """The tensors of a folder's safetensors files: one file, shards with an index, or shards alone.

    Raises FileNotFoundError naming a missing file, WeightError naming a damaged one.
    """
    return _open_folder(folder, stem="model", suffix=".safetensors", open_file=_open_safetensors_file)


def open_torch(folder: Path) -> Tensors:
    """The tensors of a folder's `.bin` files (`torch.save`d), read with `weights_only` and in no other way.

    Raises FileNotFoundError naming a missing file, WeightError naming one that is damaged or holds other than tensors.
    """
    return _open_folder(folder, stem="pytorch_model", suffix=".bin", open_file=_open_torch_file)


def open_gguf(file: gguf.GgufFile) -> Tensors:
    """The tensors of a GGUF file under their Hugging Face names and in Hugging Face layout."""
    return {
        gguf.hf_name(name): StoredTensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            file=file.path,
            read=partial(gguf.read_hf, file, name),
        )
        for name, tensor in file.tensors.items()
        if name != gguf.ROPE_FREQS
    }


def has_weights(folder: Path, suffix: str) -> bool:
    """Whether the folder holds weights with this suffix: a model file, shards, or an index of them."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    return (folder / f"{stem}{suffix}.index.json").is_file() or bool(_weight_files(folder, suffix))


def _weight_files(folder: Path, suffix: str) -> list[Path]:
    # "consolidated" files repeat the weights under other names; adapters and optimizer states are not the model.
    other = ("consolidated", "adapter_", "training_args", "optimizer", "scheduler", "rng_state")
    return [path for path in sorted(folder.glob(f"*{suffix}")) if not path.name.startswith(other)]


def _open_folder(
    folder: Path, *, stem: str, suffix: str, open_file: Callable[[Path], Iterator[tuple[str, StoredTensor]]]
) -> Tensors:
    single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
    placed: Mapping[str, str] = {}
    if single.is_file():
        files = [single]
    elif index.is_file():
        placed = _read_index(index)
        files = [folder / name for name in dict.fromkeys(placed.values())]
    else:
        files = _weight_files(folder, suffix)
        _check_series(folder, files)
    if not files:
        raise FileNotFoundError(_no_weights(folder, suffix))
    if missing := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(f"{folder}: {len(missing)} weight files are missing: {', '.join(missing[:10])}")
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in open_file(path):
            if placed.get(name, path.name) != path.name:
                continue  # the index takes it from another shard
            if name in tensors:
                raise WeightError(f"{folder}: tensor {name!r} is in {tensors[name].file.name} and in {path.name}")
            tensors[name] = tensor
    for name, file_name in placed.items():
        if name not in tensors:
            raise WeightError(f"{folder / file_name}: tensor {name!r} is not there, {index.name} places it there")
    return tensors


def _no_weights(folder: Path, suffix: str) -> str:
    others = sorted(path.name for path in folder.glob("consolidated*"))
    hint = f"; {', '.join(others[:3])} is the authors' own format: convert it to Hugging Face's" if others else ""
    return f"{folder}: no weights found (*{suffix}){hint}"


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(placed, dict) or not placed:
            raise ValueError("weight_map must be an object with at least one entry")
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{path}: not an index of shards: {error!r}") from error
    for name, file_name in placed.items():
        # A shard is a plain name inside the folder, whatever the platform's separators.
        plain = isinstance(file_name, str) and file_name not in ("", ".", "..") and "\0" not in file_name
        if not plain or PurePosixPath(file_name).name != file_name or PureWindowsPath(file_name).name != file_name:
            raise WeightError(f"{path}: tensor {name!r} is placed in {file_name!r}, must be a file of the same folder")
    return placed


def _check_series(folder: Path, files: list[Path]) -> None:
    """Shards named `…-00001-of-00003…` without an index: each of the series must be there."""
    for path in files:
        if match := re.fullmatch(r"(.+-)(\d+)-of-(\d+)(\.\w+)", path.name):
            head, digits, total, suffix = match.groups()
            names = [f"{head}{i:0{len(digits)}}-of-{total}{suffix}" for i in range(1, int(total) + 1)]
            if missing := [name for name in names if not (folder / name).is_file()]:
                raise FileNotFoundError(f"{folder}: {len(missing)} weight files are missing: {', '.join(missing[:10])}")


def _open_safetensors_file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        # The header is checked against the file's size here; tensors are views of the mapped file.
        file: Any = safe_open(path, framework="pt", device="cpu")
        for name in file.keys():  # noqa: SIM118 - not a dict
            part = file.get_slice(name)
            dtype = part.get_dtype()
            yield (
                name,
                StoredTensor(
                    shape=tuple(part.get_shape()),
                    dtype=_SAFETENSORS_DTYPES.get(dtype, dtype),
                    file=path,
                    read=partial(file.get_tensor, name),
                ),
            )
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path}: truncated or corrupt safetensors file: {error}") from error


def _open_torch_file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load has no common error; whichever it is, the file is refused
        reason = str(error).strip().split("\n")[0][:200]
        raise WeightError(f"{path}: not a torch file of tensors alone, or truncated: {reason}") from error
    if not isinstance(state, dict):
        raise WeightError(f"{path}: holds a {type(state).__name__}, must hold a dict of tensors")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise WeightError(f"{path}: entry {name!r} is a {type(tensor).__name__}, must be a tensor")
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield name, StoredTensor(shape=tuple(tensor.shape), dtype=dtype, file=path, read=tensor.detach)
