"""How checkpoints keep parameters: names, and several parameters in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint's tensor that is not simply one parameter. Fields apply in their order."""

    slots: tuple[str, ...]
    """The parameters it holds; N stands for the layer's number, E for the expert's."""
    transposed: bool = False
    """A matrix is kept as [in, out]."""
    experts: int | None = None
    """It holds as many tensors of this kind, one an expert (or whatever E numbers), along a first dimension."""
    groups: int = 1
    """Its rows are `groups` times: some rows of the first slot, some of the second, and so on."""
    rows: tuple[int, ...] = ()
    """How many rows of each slot a group has; empty: there is one slot."""
    plus: float = 0.0
    """Added to all elements."""
    unit_rows: bool = False
    """Each row is divided by its length."""

    def unpack(self, tensor: Tensor, numbers: Mapping[str, int], suffix: str) -> list[tuple[str, Tensor]]:
        """(slot, tensor) pairs. `numbers`: those in the name, by letter; `suffix` is added to each slot.

        Raises RuntimeError for a shape that cannot be taken apart.
        """
        if self.experts is None:
            return self._of_one(tensor, numbers, suffix)
        pairs = []
        for expert, part in enumerate(torch.split(tensor, [1] * self.experts)):
            pairs += self._of_one(part[0], dict(numbers) | {"E": expert}, suffix)
        return pairs

    def _of_one(self, tensor: Tensor, numbers: Mapping[str, int], suffix: str) -> list[tuple[str, Tensor]]:
        if self.transposed and tensor.dim() > 1:
            tensor = tensor.transpose(-1, -2)
        parts = [tensor]
        if self.rows:
            grouped = tensor.reshape(self.groups, sum(self.rows), *tensor.shape[1:])
            parts = [part.flatten(0, 1) for part in torch.split(grouped, list(self.rows), 1)]
        if self.plus:
            parts = [part.float() + self.plus for part in parts]
        if self.unit_rows:
            parts = [functional.normalize(part.float()) for part in parts]
        return [(with_numbers(slot, numbers) + suffix, part) for slot, part in zip(self.slots, parts, strict=True)]


def numbered(name: str) -> tuple[str, dict[str, int]]:
    """`layers.3.experts.7.w1` -> (`layers.N.experts.E.w1`, N 3 and E 7). Letters in a name stand for no number."""
    pieces, numbers = name.split("."), {}
    letters = iter("NE")
    for i, piece in enumerate(pieces):
        if piece in ("N", "E"):
            pieces[i] = f"{piece}?"
        elif piece.isdecimal() and (letter := next(letters, None)) is not None:
            pieces[i], numbers[letter] = letter, int(piece)
    return ".".join(pieces), numbers


def with_numbers(slot: str, numbers: Mapping[str, int]) -> str:
    """`layers.N.q` -> `layers.3.q` for N 3."""
    return ".".join(str(numbers[piece]) if piece in numbers else piece for piece in slot.split("."))


def fused_qkv(num_heads: int, num_kv_heads: int, head_dim: int, *, groups: int = 1, transposed: bool = False) -> Stored:
    """q, k and v in one tensor. `groups`: 1 for all q, all k, all v; K for a KV head's q, its k, its v, and so on."""
    rows = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    return Stored(
        slots=("layers.N.q", "layers.N.k", "layers.N.v"),
        groups=groups,
        rows=tuple(count // groups for count in rows),
        transposed=transposed,
    )
