"""A layer: attention, MLP and norms in one of several arrangements.

Hidden states are what layers add to. What the last part of a layer adds is handed on as `delta`, so that the next norm
adds it and norms in one kernel. T: tokens of a step, d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from pyvllm.kernels import AnyKernels, Norm
from pyvllm.layers.attention import LayerStep, SelfAttention
from pyvllm.layers.linear import Normed
from pyvllm.layers.mlp import GatedMLP, PlainMLP
from pyvllm.layers.moe import Experts
from pyvllm.layers.norm import NormSpec, norm_slots


class Block:
    """x becomes x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(
        self,
        attention: SelfAttention,
        mlp: GatedMLP | PlainMLP | Experts,
        *,
        norm: NormSpec,
        norms: Mapping[str, Norm],
        residual_scale: float,
    ) -> None:
        """`norms`, each of kind `norm`: norm1, norm2, attention_out_norm and mlp_out_norm, as far as there are such.
        `residual_scale`: factor of what attention and MLP add.
        """
        self._attention, self._mlp = attention, mlp
        self._norm = norm
        self._norm1, self._norm2 = norms.get("norm1"), norms.get("norm2")
        self._attention_out, self._mlp_out = norms.get("attention_out_norm"), norms.get("mlp_out_norm")
        self._scale = residual_scale

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name, without the layer's prefix."""
        norms = norm_slots(
            self._norm,
            norm1=self._norm1,
            norm2=self._norm2,
            attention_out_norm=self._attention_out,
            mlp_out_norm=self._mlp_out,
        )
        return norms | self._attention.slots() | self._mlp.slots()

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`."""
        self._attention.pack(kernels)
        self._mlp.pack(kernels)

    def __call__(self, hidden: Tensor, delta: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """`hidden` [T, d], which may be overwritten, and `delta`, still to be added to it -> the same two, [R, d]."""
        x = _normed(hidden, delta, self._norm1, step.kernels)
        hidden = _select(hidden, step.rows)
        if self._adds_as_it_is(self._attention_out):
            delta = self._attention.add_to(hidden, x, step)
        else:
            delta = self._attend(x, step)
        x = _normed(hidden, delta, self._norm2, step.kernels)
        if self._adds_as_it_is(self._mlp_out):
            return hidden, self._mlp.add_to(hidden, x, step.kernels)
        return hidden, self._feed(x, step.kernels)

    def _adds_as_it_is(self, norm: Norm | None) -> bool:
        return norm is None and self._scale == 1.0

    def _attend(self, x: Tensor | Normed, step: LayerStep) -> Tensor:
        return self._leave(self._attention(x, step), self._attention_out, step.kernels)

    def _feed(self, x: Tensor | Normed, kernels: AnyKernels) -> Tensor:
        return self._leave(self._mlp(x, kernels), self._mlp_out, kernels)

    def _leave(self, delta: Tensor, norm: Norm | None, kernels: AnyKernels) -> Tensor:
        if norm is not None:
            delta = kernels.norm(delta, norm)
        return delta if self._scale == 1.0 else delta.mul_(self._scale)


class ParallelBlock(Block):
    """x becomes x + attention(norm1(x)) + mlp(norm2(x)); without a norm2, both read norm1(x)."""

    def __call__(self, hidden: Tensor, delta: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `Block`."""
        normed = _add_norm(hidden, delta, self._norm1, step.kernels)
        delta = self._attend(normed, step)
        hidden = _select(hidden, step.rows)
        second = _select(normed, step.rows) if self._norm2 is None else step.kernels.norm(hidden, self._norm2)
        return hidden, delta.add_(self._feed(second, step.kernels))


class PostNormBlock(Block):
    """x becomes norm1(x + attention(x)), then norm2(x + mlp(x))."""

    def __call__(self, hidden: Tensor, delta: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `Block`."""
        if delta is not None:
            hidden = hidden.add_(delta)
        delta = self._attend(hidden, step)
        hidden = _add_norm(_select(hidden, step.rows), delta, self._norm1, step.kernels)
        return _add_norm(hidden, self._feed(hidden, step.kernels), self._norm2, step.kernels), None


class NormedResidualBlock(Block):
    """x becomes n + attention(n) of n = norm1(x), then n + mlp(n) of n = norm2(x)."""

    def __call__(self, hidden: Tensor, delta: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `Block`."""
        normed = _add_norm(hidden, delta, self._norm1, step.kernels)
        delta = self._attend(normed, step)
        normed = _add_norm(_select(normed, step.rows), delta, self._norm2, step.kernels)
        return normed, self._feed(normed, step.kernels)


ARRANGEMENTS: Final[Mapping[str, type[Block]]] = {
    "sequential": Block,
    "parallel": ParallelBlock,
    "post_norm": PostNormBlock,
    "normed_residual": NormedResidualBlock,
}


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _normed(hidden: Tensor, delta: Tensor | None, norm: Norm | None, kernels: AnyKernels) -> Tensor | Normed:
    """Add `delta` to `hidden` in place; returns the norm of the sum, or what it is to be made of."""
    if delta is None and norm is not None:
        return Normed(hidden=hidden, norm=norm)
    return _add_norm(hidden, delta, norm, kernels)


def _add_norm(hidden: Tensor, delta: Tensor | None, norm: Norm | None, kernels: AnyKernels) -> Tensor:
    """Add `delta` to `hidden` in place; returns the norm of the sum."""
    if norm is None:
        return hidden if delta is None else hidden.add_(delta)
    return kernels.norm(hidden, norm) if delta is None else kernels.add_norm(hidden, delta, norm)
