"""Filling a model's parameters from a checkpoint, in two phases: compare every header with the model, then copy."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from pyvllm.checkpoint import StoredTensor, Tensors, WeightError, has_weights, open_gguf, open_safetensors, open_torch
from pyvllm.config import LoadFormat
from pyvllm.hub import ModelFiles
from pyvllm.mxfp4 import expand_mxfp4

__all__ = ["WeightError", "load_weights"]

logger = logging.getLogger("pyvllm")

_FLOATS: Final = ("float32", "float16", "bfloat16", "float64")
_SHOWN: Final = 10


class Unpacks(Protocol):
    """The part of a model's specification that loading needs."""

    def unpack(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """Checkpoint tensor -> (slot, tensor) pairs; [] for one that is known and not used, None for an unknown name.

        Works on meta tensors; raises ValueError or RuntimeError for a shape that it cannot take apart.
        """

    def lacks(self, name: str) -> bool:
        """Whether a checkpoint's tensor belongs to something that this model does not have at all, such as eyes."""

    def name_of(self, slot: str) -> str | None:
        """What a checkpoint calls the tensor that fills a slot, perhaps without a prefix; None if that is not known."""


def load_weights(
    spec: Unpacks,
    slots: Mapping[str, Tensor],
    source: ModelFiles,
    *,
    load_format: LoadFormat = "auto",
    progress: bool = False,
) -> None:
    """Fill every slot exactly once from the model's weights, converting to the slot's dtype and device.

    `slots` maps neutral names to the (views of) parameters; "head" is absent when it is tied to "embed".
    With `load_format` dummy nothing is read, and slots are filled with reproducible random numbers. `progress` shows a
    bar on stderr.

    Raises ValueError for a format that the model does not come in; FileNotFoundError naming a missing file; WeightError
    naming every tensor that is missing, unexpected, of the wrong shape or dtype. All of them are raised before any slot
    is written.
    """
    if load_format == "dummy":
        _fill_dummy(slots, std=source.config.get("initializer_range") or 0.02)
        return
    tensors = expand_mxfp4(_open(source, load_format))
    plan = _inspect(spec, slots, tensors, str(source.path))
    with torch.no_grad():
        for name in tqdm(plan.names, desc="Loading weights", unit="tensor", disable=not progress):
            for slot, part in plan.parts(spec, name, tensors[name]):
                slots[slot].copy_(part)
        for head in plan.tied_heads:
            _warn_if_different(head, plan.embed, tensors)


def _open(source: ModelFiles, load_format: LoadFormat) -> Tensors:
    if (source.gguf_file is not None) != (load_format == "gguf") and load_format != "auto":
        kind = "folder" if source.gguf_file is None else "GGUF file"
        raise ValueError(f"load_format is {load_format!r}, but {source.path} is a {kind}")
    if source.gguf_file is not None:
        return open_gguf(source.gguf_file)
    if load_format == "safetensors" or (load_format == "auto" and has_weights(source.path, ".safetensors")):
        return open_safetensors(source.path)
    if load_format == "auto" and not has_weights(source.path, ".bin"):
        return open_safetensors(source.path)  # raises, naming what is looked for first
    return open_torch(source.path)


@dataclass
class _Plan:
    """What is read, and what is wrong. `used` maps a slot to the checkpoint name that fills it."""

    names: list[str] = field(default_factory=list)
    used: dict[str, str] = field(default_factory=dict)
    tied_heads: list[str] = field(default_factory=list)
    head_is_embed: bool = False
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def embed(self) -> str:
        return self.used["embed"]

    def parts(self, spec: Unpacks, name: str, tensor: StoredTensor) -> list[tuple[str, Tensor]]:
        data = tensor.read()
        if self.head_is_embed and name == self.embed:
            return [("embed", data)]
        return spec.unpack(name, data) or []


def _inspect(spec: Unpacks, slots: Mapping[str, Tensor], tensors: Tensors, where: str) -> _Plan:
    plan = _Plan()
    skipped: list[str] = []
    for name, tensor in tensors.items():
        try:
            parts = spec.unpack(name, torch.empty(tensor.shape, device="meta"))
        except (ValueError, RuntimeError) as error:
            plan.mismatched.append(f"{name}: found {list(tensor.shape)}, which cannot be taken apart: {error}")
            continue
        if parts is None or any(slot not in slots for slot, _ in parts):
            plan.unexpected.append(name)
        elif parts:
            _match(plan, name, tensor, parts, slots)
        elif not spec.lacks(name):
            skipped.append(name)
    _tie(plan, skipped, slots, tensors)
    plan.missing = [_describe_slot(slot, plan, spec) for slot in slots if slot not in plan.used]
    problems = [
        f"{len(names)} {what}: {'; '.join(names[:_SHOWN])}{'; …' if len(names) > _SHOWN else ''}"
        for what, names in (
            ("missing", plan.missing),
            ("unexpected", plan.unexpected),
            ("of the wrong shape or dtype", plan.mismatched),
        )
        if names
    ]
    if problems:
        raise WeightError(f"{where}: the tensors do not fit the model. " + ". ".join(problems))
    return plan


def _match(
    plan: _Plan, name: str, tensor: StoredTensor, parts: list[tuple[str, Tensor]], slots: Mapping[str, Tensor]
) -> None:
    """Enter one checkpoint tensor into the plan, with whatever is wrong with it."""
    plan.names.append(name)
    if tensor.dtype not in _FLOATS:
        plan.mismatched.append(f"{name}: found dtype {tensor.dtype}, expected one of {', '.join(_FLOATS)}")
    for slot, part in parts:
        if part.shape != slots[slot].shape:
            plan.mismatched.append(f"{name}: expected {list(slots[slot].shape)}, found {list(part.shape)} for {slot}")
        if slot in plan.used:
            plan.mismatched.append(f"{name}: fills {slot}, which {plan.used[slot]} fills already")
        plan.used[slot] = name


def _tie(plan: _Plan, skipped: list[str], slots: Mapping[str, Tensor], tensors: Tensors) -> None:
    """Tied models: the stored heads to compare with the embedding, or the one that stands in for it.

    A head is any skipped matrix as wide as the embedding. Checkpoints that store one of two shared tensors may keep
    the head's name.
    """
    if "head" in slots or "embed" not in slots:
        return
    width = slots["embed"].shape[1]
    heads = [name for name in skipped if len(tensors[name].shape) == 2 and tensors[name].shape[1] == width]
    if "embed" in plan.used:
        plan.tied_heads = heads
    elif len(heads) == 1:
        plan.head_is_embed = True
        stored = tensors[heads[0]]
        _match(plan, heads[0], stored, [("embed", torch.empty(stored.shape, device="meta"))], slots)


def _warn_if_different(head: str, embed: str, tensors: Tensors) -> None:
    if tensors[head].shape == tensors[embed].shape and torch.equal(tensors[head].read(), tensors[embed].read()):
        return
    logger.warning("the config ties %s to %s, but the stored tensors differ; %s is ignored", head, embed, head)


def _describe_slot(slot: str, plan: _Plan, spec: Unpacks) -> str:
    """A missing slot, with its checkpoint name: that which it has in other layers, prefix and all, if there is one."""
    if slot == "head":
        return f"head ({spec.name_of(slot)}; the config does not tie it to the embedding)"
    if match := re.match(r"layers\.(\d+)\.(.+)", slot):
        for used, name in plan.used.items():
            other = re.match(r"layers\.(\d+)\.(.+)", used)
            if other and other[2] == match[2]:
                return f"{name.replace(f'.{other[1]}.', f'.{match[1]}.', 1)} ({slot})"
    known = spec.name_of(slot)
    return slot if known is None else f"{known} ({slot})"


def _fill_dummy(slots: Mapping[str, Tensor], *, std: float) -> None:
    """Norm weights 1, all else normal(0, std) from a seed of the slot's name, so that every rank draws the same."""
    with torch.no_grad():
        for slot, tensor in slots.items():
            if "norm" in slot and not slot.endswith(".bias"):
                tensor.fill_(1.0)
                continue
            generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(slot.encode()))
            tensor.normal_(0.0, std, generator=generator)
