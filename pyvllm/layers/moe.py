"""Mixture of experts: each token is sent through a few of many gated MLPs.

Symbols: T tokens of a step, d hidden size, E experts, k experts of a token, I width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels import AnyKernels
from pyvllm.layers.linear import Linear
from pyvllm.layers.mlp import GatedMLP


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
    shared_size: int | None = None
    """Width of an MLP that every token goes through besides."""
    shared_gate: bool = False
    """What it gives is multiplied by the sigmoid of a learned score."""
    layers: frozenset[int]
    """Layers that have experts; others have one MLP."""


class Experts:
    """Sum over a token's experts of score * expert(x), plus the shared one."""

    def __init__(
        self, size: int, spec: ExpertsSpec, *, activation: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`size`: d."""
        self._spec = spec
        self._activation = activation
        width, count = spec.intermediate_size, spec.num_experts
        self._router = Linear.empty(size, count, bias=False, dtype=dtype, device=device)
        self._gate_up: Tensor | None = torch.empty(count, 2 * width, size, dtype=dtype, device=device)
        self._down: Tensor | None = torch.empty(count, size, width, dtype=dtype, device=device)
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
        if self._gate_up is None or self._down is None:
            raise RuntimeError("the weights of the experts are packed and can no longer be read or written")
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            gate, up = gate_up.chunk(2)
            slots |= {f"experts.{expert}.gate": gate, f"experts.{expert}.up": up, f"experts.{expert}.down": down}
        return slots

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`. A CPU, which can afford shapes that depend on the routing, has each expert by itself."""
        self._router.pack(kernels)
        for part in (self._shared, self._shared_gate):
            if part is not None:
                part.pack(kernels)
        if self._gate_up is None or self._down is None or self._gate_up.device.type != "cpu":
            return
        pairs = zip(self._gate_up, self._down, strict=True)
        self._packed = [(Linear(gate_up), Linear(down)) for gate_up, down in pairs]
        for gate_up, down in self._packed:
            gate_up.pack(kernels)
            down.pack(kernels)
        self._gate_up = self._down = None

    def __call__(self, x: Tensor, kernels: AnyKernels) -> Tensor:
        """`[T, d]` -> `[T, d]`."""
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
        if self._gate_up is None or self._down is None:
            return _one_by_one(x, weights, experts, self._packed, self._activation, kernels)
        # What the grouped product asks for: 16-byte rows of a dtype that it has a kernel for.
        aligned = x.shape[1] % 8 == 0 and self._spec.intermediate_size % 8 == 0
        form = sorted_by_expert if x.dtype == torch.bfloat16 and aligned else all_experts
        return form(x, weights, experts, self._gate_up, self._down, self._activation, kernels)


def sorted_by_expert(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    kernels: AnyKernels,
) -> Tensor:
    """Grouped products over tokens in the order of their experts; no shape depends on who goes where.

    `x` [T, d], `weights` [T, k] float32, `experts` [T, k], `gate_up` [E, 2 * I, d], `down` [E, d, I] -> [T, d]; what
    experts give is added up in float32.
    """
    top_k, count = experts.shape[1], len(gate_up)
    chosen = experts.flatten()
    order = torch.argsort(chosen, stable=True)  # places of [T * k]
    ends = functional.one_hot(chosen, count).sum(0).cumsum(0).int()
    inner = functional.grouped_mm(x.index_select(0, order // top_k), gate_up.transpose(1, 2), offs=ends)
    outer = functional.grouped_mm(kernels.gated(inner, activation), down.transpose(1, 2), offs=ends)
    back = outer.index_select(0, torch.argsort(order)).view(*experts.shape, -1)
    output = torch.zeros_like(x, dtype=torch.float32)
    for choice in range(top_k):
        output.addcmul_(back[:, choice], weights[:, choice, None])
    return output.to(x.dtype)


def all_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    kernels: AnyKernels,
) -> Tensor:
    """Every expert sees every token, most of them with weight 0. Arguments as of `sorted_by_expert`."""
    dense = weights.new_zeros(len(x), len(gate_up)).scatter_(1, experts, weights)
    output = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(gate_up)):
        inner = kernels.gated(functional.linear(x, gate_up[expert]), activation)
        output.addcmul_(functional.linear(inner, down[expert]), dense[:, expert, None])
    return output.to(x.dtype)


def _one_by_one(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: list[tuple[Linear, Linear]],
    activation: str,
    kernels: AnyKernels,
) -> Tensor:
    """Each expert that somebody chose, over its tokens alone."""
    output = torch.zeros_like(x, dtype=torch.float32)
    for expert in torch.unique(experts).tolist():
        rows, places = torch.nonzero(experts == expert, as_tuple=True)
        gate_up, down = packed[expert]
        part = down(kernels.gated(gate_up(x[rows]), activation))
        output.index_add_(0, rows, part.float().mul_(weights[rows, places, None]))
    return output.to(x.dtype)
