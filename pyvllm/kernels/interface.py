"""What a set of kernels offers to the model code.

Symbols in shapes: T tokens of a step, S sequences, H query heads, K KV heads, G = H / K query heads that share a KV
head, D head size, N blocks of a pool, B tokens of a block, L layers.

KV memory of one layer is `[N, 2, K, B, D]`, index 1 telling keys from values: the tokens of one block and head lie
together, and so does all of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor
from torch.nn import functional

from pyvllm.step import StepView


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What attention computes: softmax over the keys k <= q of a sequence of `cap(scale * q . k) + bias`, times values.

    Layers that are equal in this share a plan.
    """

    num_heads: int
    """Query heads H."""
    num_kv_heads: int
    """KV heads K; divides H. Query head h uses KV head h // (H / K)."""
    head_dim: int
    """D."""
    scale: float
    """Factor of the scores, 1 / sqrt(D) as a rule."""
    window: int | None = None
    """Keys that a query sees, itself included; None: all before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)`."""
    alibi_slopes: tuple[float, ...] | None = None
    """One for each query head: the bias is `-slope * (query position - key position)`."""


LinearFunction: TypeAlias = Callable[[Tensor], Tensor]
"""x `[M, in]` -> `[M, out]`."""

PlanT = TypeVar("PlanT")


class Kernels(ABC, Generic[PlanT]):
    """One implementation of all that differs between devices.

    `PlanT` is what it prepares once a step and all layers share: index tensors, masks, work lists. What is not abstract
    is plain torch and right on any device.
    """

    name: str

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> LinearFunction:
        """The function `x @ weight.T + bias`, from weight `[out, in]` in the order that this device reads best.

        The caller drops `weight` then, unless it is needed for something else.
        """
        return partial(functional.linear, weight=weight, bias=bias)

    @abstractmethod
    def plan(self, step: StepView, attention: Attention, kv_layer: Tensor) -> PlanT:
        """Prepare a step of at least one token. `kv_layer` is any layer's KV memory: its shape and dtype count."""

    @abstractmethod
    def write_kv(self, kv_layer: Tensor, key_value: Tensor, plan: PlanT) -> None:
        """Store keys and values `[T, 2, K, D]` at the step's slots of `kv_layer` `[N, 2, K, B, D]`."""

    @abstractmethod
    def paged_attention(self, query: Tensor, kv_layer: Tensor, plan: PlanT) -> Tensor:
        """Attention of `query` `[T, H, D]` over the sequences' blocks: `[T, H * D]`. The step's KV is written before.

        Rows of padding tokens are finite and have no meaning.
        """

    def copy_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        """Copy blocks inside a pool `[L, N, 2, K, B, D]`, one after another: `pairs` `[n, 2]` of source, target."""
        for source, target in pairs.tolist():
            pool[:, target].copy_(pool[:, source])

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Tensor) -> None:
        """Copy blocks between two pools `[L, N, 2, K, B, D]`: `pairs` `[n, 2]` of a source's and a target's block."""
        for source_block, target_block in pairs.tolist():
            target[:, target_block].copy_(source[:, source_block])


AnyKernels: TypeAlias = Kernels[Any]
"""Model code hands a plan back to the kernels that made it and never looks inside."""
