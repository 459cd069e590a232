"""A model and checkpoint of a few numbers, for the tests of loading weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pyvllm.config import LoadFormat
from pyvllm.gguf import read_gguf
from pyvllm.hub import ModelFiles
from pyvllm.weights import load_weights

VOCABULARY, WIDTH, LAYERS = 8, 4, 3


class Spec:
    """A small model with a fused checkpoint tensor (`qkv`), skipped names, and a head that may be tied."""

    def __init__(self, *, tied: bool = False) -> None:
        self.tied = tied

    def lacks(self, name: str) -> bool:
        return name.endswith(".inv_freq")

    def name_of(self, slot: str) -> str | None:
        return "lm_head.weight" if slot == "head" else None

    def unpack(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        if name == "model.embed_tokens.weight":
            return [("embed", tensor)]
        if name == "lm_head.weight":
            return [] if self.tied else [("head", tensor)]
        if name == "model.norm.weight":
            return [("final_norm", tensor)]
        if name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            if part == "qkv.weight":
                q, k, v = tensor.view(4, 2, WIDTH).split([2, 1, 1])
                return [(f"layers.{layer}.{x}", t.flatten(0, 1)) for x, t in (("q", q), ("k", k), ("v", v))]
            if part == "rotary_emb.inv_freq":
                return []
            if part in ("norm.weight", "norm.alias"):
                return [(f"layers.{layer}.norm1", tensor)]
            if part == "q.bias":
                return [(f"layers.{layer}.q.bias", tensor)]
        return None


def make_slots(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Slots as a decoder has them: q, k and v are views of one parameter. NaN marks what is not written."""

    def parameter(*shape: int) -> Tensor:
        return torch.nn.Parameter(torch.full(shape, torch.nan, dtype=dtype)).data

    slots = {"embed": parameter(VOCABULARY, WIDTH), "final_norm": parameter(WIDTH)}
    for layer in range(LAYERS):
        q, k, v = parameter(8, WIDTH).split([4, 2, 2])
        prefix = f"layers.{layer}"
        slots |= {f"{prefix}.q": q, f"{prefix}.k": k, f"{prefix}.v": v}
        slots |= {f"{prefix}.norm1": parameter(WIDTH), f"{prefix}.q.bias": parameter(WIDTH)}
    return slots if tied else slots | {"head": parameter(VOCABULARY, WIDTH)}


def make_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    state = {"model.embed_tokens.weight": values(VOCABULARY, WIDTH), "model.norm.weight": values(WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        state |= {f"{prefix}.qkv.weight": values(8, WIDTH), f"{prefix}.norm.weight": values(WIDTH)}
        state |= {f"{prefix}.q.bias": values(WIDTH), f"{prefix}.rotary_emb.inv_freq": values(2)}
    return state | {"lm_head.weight": values(VOCABULARY, WIDTH)}


def source(path: Path) -> ModelFiles:
    file = read_gguf(path) if path.suffix == ".gguf" else None
    return ModelFiles(
        name="tiny", path=path, config={"initializer_range": 0.05}, generation_config=None, gguf_file=file
    )


def load(path: Path, *, tied: bool = False, load_format: LoadFormat = "auto") -> dict[str, Tensor]:
    slots = make_slots(tied=tied)
    load_weights(Spec(tied=tied), slots, source(path), load_format=load_format)
    return slots


def check(slots: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for slot, tensor in slots.items():
        if slot.startswith("layers."):
            layer, part = slot.removeprefix("layers.").split(".", 1)
            if part in ("q", "k", "v"):
                rows = {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}[part]
                expected = state[f"model.layers.{layer}.qkv.weight"][rows]
            else:
                expected = state[f"model.layers.{layer}.{'norm.weight' if part == 'norm1' else part}"]
        else:
            names = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
            expected = state[names[slot]]
        assert torch.equal(tensor, expected.to(tensor.dtype)), slot


def untouched(slots: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isnan().all()) for tensor in slots.values())


Save = Callable[[dict[str, Tensor], Path], None]
SAVE: dict[str, Save] = {".safetensors": save_file, ".bin": torch.save}
STEM = {".safetensors": "model", ".bin": "pytorch_model"}


def save_shards(folder: Path, state: dict[str, Tensor], suffix: str = ".safetensors", *, index: bool = True) -> Path:
    """Three shards; the index."""
    names = list(state)
    placed: dict[str, str] = {}
    for i in range(3):
        file = f"{STEM[suffix]}-{i + 1:05}-of-00003{suffix}"
        SAVE[suffix]({name: state[name] for name in names[i::3]}, folder / file)
        placed |= dict.fromkeys(names[i::3], file)
    path = folder / f"{STEM[suffix]}{suffix}.index.json"
    if index:
        path.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return path
