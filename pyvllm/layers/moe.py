"""Mixture of experts: each token is sent through a few of many gated MLPs.

Symbols: T tokens of a step, d hidden size, E experts, k experts of a token, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels import AnyKernels
from pyvllm.layers.linear import Linear, Normed
from pyvllm.layers.mlp import GatedMLP

Gate: TypeAlias = Callable[[Tensor], Tensor]
"""From gates and values `[T, 2 * I]`, gates first, to `[T, I]`."""


@dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """Instead of activation(gate) * up: gate * sigmoid(alpha * gate) * (up + 1), both cut off at `limit`."""

    alpha: float
    limit: float
    """Gates have no lower bound."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of a model, and how tokens choose among them."""

    num_experts: int
    """E."""
    top_k: int
    """k: those with the highest scores, which are a softmax over all."""
    intermediate_size: int
    """I."""
    normalise: bool
    """A token's k scores are divided by their sum."""
    bias: bool = False
    """Of the scores and of the experts."""
    clamped_gate: ClampedGate | None = None
    """None: the model's activation."""
    shared_size: int | None = None
    """Width of an MLP that every token goes through besides."""
    shared_gate: bool = False
    """What it gives is multiplied by the sigmoid of a learned score."""
    layers: frozenset[int]
    """Layers that have experts; others have one MLP."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """The parameters of all experts."""

    gate_up: Tensor
    """[E, 2 * I, d], gates first."""
    down: Tensor
    """[E, d, I]."""
    gate_up_bias: Tensor | None
    """[E, 2 * I]."""
    down_bias: Tensor | None
    """[E, d]."""


class Experts:
    """Sum over a token's experts of score * expert(x), plus the shared one."""

    def __init__(
        self, size: int, spec: ExpertsSpec, *, activation: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`size`: d."""
        self._spec = spec
        self._activation = activation
        self._router = Linear.empty(size, spec.num_experts, bias=spec.bias, dtype=dtype, device=device)
        count, width = spec.num_experts, spec.intermediate_size
        down = torch.empty(count, size, width, dtype=dtype, device=device)
        self._weights: ExpertWeights | None = ExpertWeights(
            gate_up=down.new_empty(count, 2 * width, size),
            down=down,
            gate_up_bias=down.new_empty(count, 2 * width) if spec.bias else None,
            down_bias=down.new_empty(count, size) if spec.bias else None,
        )
        self._packed: list[tuple[Linear, Linear]] = []
        self._shared: GatedMLP | None = None
        if spec.shared_size is not None:
            self._shared = GatedMLP(
                size, spec.shared_size, activation=activation, bias=False, dtype=dtype, device=device
            )
        self._shared_gate = None
        if spec.shared_gate:
            self._shared_gate = Linear.empty(size, 1, bias=False, dtype=dtype, device=device)

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name, without the layer's prefix. Raises `RuntimeError` once they are packed."""
        slots = self._router.slots("router")
        if self._shared is not None:
            slots |= {f"shared.{name}": slot for name, slot in self._shared.slots().items()}
        if self._shared_gate is not None:
            slots |= self._shared_gate.slots("shared_score")
        if self._weights is None:
            raise RuntimeError("the weights of the experts are packed and can no longer be read or written")
        for expert in range(self._spec.num_experts):
            gate_up, down = _one_expert(self._weights, expert)
            parts = gate_up.slots("gate", "up") | down.slots("down")
            slots |= {f"experts.{expert}.{name}": slot for name, slot in parts.items()}
        return slots

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`. Where shapes may depend on the routing, each expert is packed by itself."""
        self._router.pack(kernels)
        for part in (self._shared, self._shared_gate):
            if part is not None:
                part.pack(kernels)
        if self._weights is None or not kernels.waits_are_free:
            return
        self._packed = [_one_expert(self._weights, expert) for expert in range(self._spec.num_experts)]
        for gate_up, down in self._packed:
            gate_up.pack(kernels)
            down.pack(kernels)
        self._weights = None

    def add_to(self, hidden: Tensor, x: Tensor | Normed, kernels: AnyKernels) -> Tensor | None:
        """See `Linear.add_to`."""
        return self(x, kernels)

    def __call__(self, x: Tensor | Normed, kernels: AnyKernels) -> Tensor:
        """`[T, d]` -> `[T, d]`."""
        x = x.compute(kernels) if isinstance(x, Normed) else x
        if not len(x):
            return x
        scores = torch.softmax(self._router(x).float(), -1)
        weights, experts = torch.topk(scores, self._spec.top_k, -1)
        if self._spec.normalise:
            weights /= weights.sum(-1, keepdim=True)
        output = self._routed(x, weights, experts, kernels)
        if self._shared is not None:
            shared = self._shared(x, kernels)
            output += shared if self._shared_gate is None else shared * torch.sigmoid(self._shared_gate(x))
        return output

    def _routed(self, x: Tensor, weights: Tensor, experts: Tensor, kernels: AnyKernels) -> Tensor:
        gate: Gate = partial(kernels.gated, activation=self._activation)
        if self._spec.clamped_gate is not None:
            gate = partial(clamped_gate, of=self._spec.clamped_gate)
        if self._weights is None:
            return _one_by_one(x, weights, experts, self._packed, gate)
        # What the grouped product asks for: 16-byte rows of a dtype that it has a kernel for.
        aligned = x.shape[1] % 8 == 0 and self._spec.intermediate_size % 8 == 0
        form = sorted_by_expert if x.dtype == torch.bfloat16 and aligned else all_experts
        return form(x, weights, experts, self._weights, gate)


def clamped_gate(gate_up: Tensor, of: ClampedGate) -> Tensor:
    """See `ClampedGate`: `[T, 2 * I]`, gates first, -> `[T, I]`."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=of.limit), up.clamp(-of.limit, of.limit)
    return torch.sigmoid(gate * of.alpha).mul_(gate).mul_(up + 1)


def sorted_by_expert(x: Tensor, weights: Tensor, experts: Tensor, of: ExpertWeights, gate: Gate) -> Tensor:
    """Grouped products over tokens in the order of their experts; no shape depends on who goes where.

    `x` [T, d], `weights` [T, k] float32, `experts` [T, k] -> [T, d]; what experts give is added up in float32.
    """
    top_k, count = experts.shape[1], len(of.down)
    chosen = experts.flatten()
    by_expert, order = torch.sort(chosen, stable=True)  # experts and places of [T * k]
    ones = torch.ones_like(chosen, dtype=torch.int32)
    ends = ones.new_zeros(count).scatter_add_(0, chosen, ones).cumsum(0, dtype=torch.int32)
    inner = functional.grouped_mm(x.index_select(0, order // top_k), of.gate_up.transpose(1, 2), offs=ends)
    if of.gate_up_bias is not None:
        inner += of.gate_up_bias.index_select(0, by_expert)
    outer = functional.grouped_mm(gate(inner), of.down.transpose(1, 2), offs=ends)
    if of.down_bias is not None:
        outer += of.down_bias.index_select(0, by_expert)
    back = outer.index_select(0, torch.argsort(order)).view(*experts.shape, -1)
    output = torch.zeros_like(x, dtype=torch.float32)
    for choice in range(top_k):
        output.addcmul_(back[:, choice], weights[:, choice, None])
    return output.to(x.dtype)


def all_experts(x: Tensor, weights: Tensor, experts: Tensor, of: ExpertWeights, gate: Gate) -> Tensor:
    """Every expert sees every token, most of them with weight 0. Arguments as of `sorted_by_expert`."""
    dense = weights.new_zeros(len(x), len(of.down)).scatter_(1, experts, weights)
    output = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(of.down)):
        gate_up, down = _one_expert(of, expert)
        output.addcmul_(down(gate(gate_up(x))), dense[:, expert, None])
    return output.to(x.dtype)


def _one_by_one(x: Tensor, weights: Tensor, experts: Tensor, packed: list[tuple[Linear, Linear]], gate: Gate) -> Tensor:
    """Each expert that somebody chose, over its tokens alone."""
    output = torch.zeros_like(x, dtype=torch.float32)
    for expert in torch.unique(experts).tolist():
        rows, places = torch.nonzero(experts == expert, as_tuple=True)
        gate_up, down = packed[expert]
        part = down(gate(gate_up(x[rows])))
        output.index_add_(0, rows, part.float().mul_(weights[rows, places, None]))
    return output.to(x.dtype)


def _one_expert(of: ExpertWeights, expert: int) -> tuple[Linear, Linear]:
    """Views of one expert's parameters."""
    width = of.down.shape[2]
    gate_up_bias = None if of.gate_up_bias is None else of.gate_up_bias[expert]
    down_bias = None if of.down_bias is None else of.down_bias[expert]
    gate_up = Linear(of.gate_up[expert], gate_up_bias, out_sizes=(width, width))
    return gate_up, Linear(of.down[expert], down_bias)
