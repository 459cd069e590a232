"""The attention part of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels, Attention, Heads, Norm, RopeTables
from pyvllm.layers.linear import Linear, Normed
from pyvllm.layers.norm import NormSpec, empty_norm, norm_slots

NormedOver: TypeAlias = Literal["head", "each_head", "width"]


@dataclass(frozen=True, kw_only=True)
class QueryKeyNorm:
    """The norm of queries and of keys, before their rotation."""

    norm: NormSpec
    over: NormedOver = "head"
    """head: each head is normed, all with the same weights; each_head: each with its own; width: all heads as one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerStep:
    """What a layer gets of a step beside hidden states. T: tokens of the step, R: those whose results are wanted."""

    angles: object
    """What `kernels.angles` gave for the layer's rotation."""
    kv_layer: Tensor
    """The layer's KV memory `[N, 2, K, B, D]`."""
    plan: object
    """What `kernels.plan` gave for the layer's attention."""
    kernels: AnyKernels
    rows: Tensor | None = None
    """[R] tokens whose results are wanted; of the others only keys and values are stored. None: all."""


class SelfAttention:
    """Projections around the paged attention of one layer. T: tokens of a step."""

    def __init__(
        self,
        size: int,
        attention: Attention,
        *,
        qkv_bias: bool,
        o_bias: bool,
        clip: float | None,
        qk_norm: QueryKeyNorm | None,
        rope: RopeTables | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`clip`: queries, keys and values are cut off at it and at -`clip`. `rope` is shared by layers."""
        q_size, kv_size = (heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads))
        self._qkv = Linear.empty(size, q_size, kv_size, kv_size, bias=qkv_bias, dtype=dtype, device=device)
        self._o = Linear.empty(q_size, size, bias=o_bias, dtype=dtype, device=device)
        self._clip = clip
        self._sinks: Tensor | None = None
        if attention.sinks:
            self._sinks = torch.empty(attention.num_heads, dtype=dtype, device=device)
        self._norms = None if qk_norm is None else _NORMS[qk_norm.over](qk_norm.norm, attention, dtype, device)
        query_norm, key_norm = self._norms.pair if isinstance(self._norms, _ByHead) else (None, None)
        self._before = None if isinstance(self._norms, _ByHead) else self._norms
        self._heads = Heads(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            query_norm=query_norm,
            key_norm=key_norm,
            rope=rope,
        )

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name, without the layer's prefix."""
        norms = {} if self._norms is None else self._norms.slots()
        norms |= {} if self._sinks is None else {"sinks": self._sinks}
        return self._qkv.slots("q", "k", "v") | self._o.slots("o") | norms

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`. Raises ValueError if the kernels lack a part of the attention."""
        if self._sinks is not None and not kernels.has_sinks:
            raise ValueError(f"the {kernels.name} kernels have no attention with sinks, which this model has")
        self._qkv.pack(kernels)
        self._o.pack(kernels)

    def __call__(self, x: Tensor | Normed, step: LayerStep) -> Tensor:
        """`x` [T, size] -> [T, size], or [R, size]."""
        return self._o(self._attend(x, step))

    def add_to(self, hidden: Tensor, x: Tensor | Normed, step: LayerStep) -> Tensor | None:
        """See `Linear.add_to`; `hidden` [T, size], or [R, size]."""
        return self._o.add_to(hidden, self._attend(x, step), step.kernels)

    def _attend(self, x: Tensor | Normed, step: LayerStep) -> Tensor:
        kernels, kv_layer, plan, rows = step.kernels, step.kv_layer, step.plan, step.rows
        qkv = self._qkv.of(x, kernels)
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        if self._before is not None:
            self._before.norm_(qkv, kernels)
        if rows is not None and not len(rows):
            kernels.rotate_and_store(qkv, self._heads, step.angles, kv_layer, plan)
            return qkv.new_empty(0, self._heads.num_heads * self._heads.head_dim)
        if self._sinks is None:
            context = kernels.attend(qkv, self._heads, step.angles, kv_layer, plan)
        else:
            query = kernels.rotate_and_store(qkv, self._heads, step.angles, kv_layer, plan)
            context = kernels.paged_attention_with_sinks(query, kv_layer, plan, self._sinks)
        return context if rows is None else context.index_select(0, rows)


class _ByHead:
    """The kernels norm heads together with the rotation."""

    def __init__(self, spec: NormSpec, attention: Attention, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self.pair = (
            empty_norm(spec, attention.head_dim, dtype=dtype, device=device),
            empty_norm(spec, attention.head_dim, dtype=dtype, device=device),
        )

    def slots(self) -> dict[str, Tensor]:
        return norm_slots(self._spec, q_norm=self.pair[0], k_norm=self.pair[1])


class _ByWidth:
    """All query heads are one vector, and so are all key heads."""

    def __init__(self, spec: NormSpec, attention: Attention, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._sizes = [heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads)]
        self._norms = [empty_norm(spec, size, dtype=dtype, device=device) for size in self._sizes]

    def slots(self) -> dict[str, Tensor]:
        return norm_slots(self._spec, q_norm=self._norms[0], k_norm=self._norms[1])

    def norm_(self, qkv: Tensor, kernels: AnyKernels) -> None:
        parts = torch.split(qkv[:, : sum(self._sizes)], self._sizes, 1)
        for part, norm in zip(parts, self._norms, strict=True):
            part.copy_(kernels.norm(part.contiguous(), norm))


class _ByEachHead:
    """Each head has a weight of its own: the quotient times a matrix of weights."""

    def __init__(self, spec: NormSpec, attention: Attention, dtype: torch.dtype, device: torch.device) -> None:
        self._num_heads, self._num_kv_heads = attention.num_heads, attention.num_kv_heads
        self._shape = (-1, attention.num_heads + attention.num_kv_heads, attention.head_dim)
        self._weight = torch.empty(self._shape[1:], dtype=dtype, device=device)
        ones = torch.ones(attention.head_dim, dtype=dtype, device=device)
        self._quotient = Norm(weight=ones, eps=spec.eps, centred=spec.centred)

    def slots(self) -> dict[str, Tensor]:
        queries = {f"q_norm.{head}": self._weight[head] for head in range(self._num_heads)}
        return queries | {f"k_norm.{head}": self._weight[self._num_heads + head] for head in range(self._num_kv_heads)}

    def norm_(self, qkv: Tensor, kernels: AnyKernels) -> None:
        turned = qkv[:, : self._weight.numel()]
        normed = kernels.norm(turned.reshape(self._shape), self._quotient)
        turned.copy_(normed.mul_(self._weight).flatten(1))


_Norms: TypeAlias = _ByHead | _ByWidth | _ByEachHead
_NORMS: Final[Mapping[NormedOver, Callable[[NormSpec, Attention, torch.dtype, torch.device], _Norms]]] = {
    "head": _ByHead,
    "width": _ByWidth,
    "each_head": _ByEachHead,
}
