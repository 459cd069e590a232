"""Files of a checkpoint: every layout gives the same tensors, damage is named, and nothing in them is run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pyvllm.weights import WeightError, load_weights
from tests.small_weights import SAVE, STEM, Spec, check, load, make_slots, make_state, save_shards, source, untouched


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("layout", ["one file", "shards", "shards without index"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_fills_every_slot(
    suffix: str, layout: str, stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = {name: tensor.to(stored) for name, tensor in make_state().items()}
    if layout == "one file":
        SAVE[suffix](state, tmp_path / f"{STEM[suffix]}{suffix}")
    else:
        save_shards(tmp_path, state, suffix, index=layout == "shards")
    slots = make_slots(dtype=dtype)
    load_weights(Spec(), slots, source(tmp_path))
    check(slots, state)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_named(suffix: str, index: bool, tmp_path: Path) -> None:
    save_shards(tmp_path, make_state(), suffix, index=index)
    name = f"{STEM[suffix]}-00002-of-00003{suffix}"
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"1 weight files are missing: {name}"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "{}/x.safetensors", "a/x.safetensors", "a\\x.safetensors", "..", "", 3]
)
def test_s049_shards_are_plain_names_inside_the_folder(name: str | int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    for place in (tmp_path, folder / "a"):
        save_file(make_state(), place / "x.safetensors")
    name = name.format(tmp_path) if isinstance(name, str) else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(make_state(), name)}))
    with pytest.raises(
        WeightError, match=r"index\.json: tensor 'model\.embed_tokens\.weight' is placed in .* same folder"
    ):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\xff"])
def test_broken_index_is_named(content: str, tmp_path: Path) -> None:
    save_shards(tmp_path, make_state()).write_bytes(content.encode("latin-1"))
    with pytest.raises(WeightError, match=r"model\.safetensors\.index\.json: not an index of shards"):
        load(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    state = make_state()
    index = save_shards(tmp_path, state)
    placed = json.loads(index.read_text())["weight_map"]
    # The same tensor in two shards: the index decides, not the order of the files.
    first, third = (tmp_path / f"model-0000{i}-of-00003.safetensors" for i in (1, 3))
    name = next(key for key, file in placed.items() if file == third.name)
    shard = {key: state[key] for key, file in placed.items() if file == first.name}
    save_file(shard | {name: torch.zeros_like(state[name])}, first)
    check(load(tmp_path), state)
    index.unlink()
    with pytest.raises(WeightError, match=rf"tensor '{name}' is in {first.name} and in {third.name}"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": placed | {"model.extra": third.name}}))
    with pytest.raises(WeightError, match=rf"{third.name}: tensor 'model\.extra' is not there"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_truncated_or_corrupt_file_is_named(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"{STEM[suffix]}{suffix}"
    SAVE[suffix](make_state(), path)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in (0, 5, 100, len(whole) // 2, len(whole) - 1)]
    damaged.append(b"\xff" * 8 + whole[8:])
    if suffix == ".safetensors":
        damaged += [whole + b"x", whole[:8] + b"?" + whole[9:]]
    for content in damaged:
        path.write_bytes(content)
        slots = make_slots()
        with pytest.raises(WeightError, match=path.name):
            load_weights(Spec(), slots, source(tmp_path))
        assert untouched(slots)


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_s042_unpickling_runs_no_code(zipped: bool, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "pytorch_model.bin"
    torch.save(make_state() | {"x": Marker(marker)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightError, match=r"pytorch_model\.bin: not a torch file of tensors alone"):
        load(tmp_path)
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the trap works
    assert marker.exists()


def test_bin_must_hold_a_dict_of_tensors(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin: holds a list"):
        load(tmp_path)
    torch.save({"model": make_state()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin: entry 'model' is a dict"):
        load(tmp_path)


def test_other_files_beside_the_weights_are_ignored(tmp_path: Path) -> None:
    state = make_state()
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"tok_embeddings.weight": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(
        FileNotFoundError, match=r"no weights found .*consolidated\.safetensors is the authors' own format"
    ):
        load(tmp_path)
    save_shards(tmp_path, state, index=False)
    check(load(tmp_path), state)
    save_file(state, tmp_path / "model.safetensors")  # one whole file goes before shards
    check(load(tmp_path), state)
