"""The attention part of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels, Attention
from pyvllm.layers.linear import Linear
from pyvllm.layers.norm import RMSNorm
from pyvllm.layers.rope import Rope


class SelfAttention:
    """Projections around the paged attention of one layer.

    Symbols: T tokens, H query heads, K KV heads, D head size.
    """

    def __init__(
        self,
        size: int,
        attention: Attention,
        *,
        qkv_bias: bool,
        o_bias: bool,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
        rope: Rope | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`head_norms`: of each query and each key head. `rope` is shared by layers."""
        self._num_heads, self._num_kv_heads = attention.num_heads, attention.num_kv_heads
        q_size, kv_size = (heads * attention.head_dim for heads in (self._num_heads, self._num_kv_heads))
        self._qkv = Linear.empty(size, q_size, kv_size, kv_size, bias=qkv_bias, dtype=dtype, device=device)
        self._o = Linear.empty(q_size, size, bias=o_bias, dtype=dtype, device=device)
        self._head_norms = head_norms
        self._rope = rope
        self._heads_shape = (self._num_heads + 2 * self._num_kv_heads, attention.head_dim)

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name, without the layer's prefix."""
        slots = self._qkv.slots("q", "k", "v") | self._o.slots("o")
        if self._head_norms is not None:
            slots |= {"q_norm": self._head_norms[0].weight, "k_norm": self._head_norms[1].weight}
        return slots

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`."""
        self._qkv.pack(kernels)
        self._o.pack(kernels)

    def __call__(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, kv_layer: Tensor, plan: object, kernels: AnyKernels
    ) -> Tensor:
        """`x` [T, size] -> [T, size]. `angles`: what `Rope.at` gave; `plan`: what `kernels.plan` gave."""
        heads = self._qkv(x).view(-1, *self._heads_shape)
        query, key_value = heads[:, : self._num_heads], heads[:, self._num_heads :]
        if self._head_norms is not None:
            key = key_value[:, : self._num_kv_heads]
            query.copy_(self._head_norms[0](query))
            key.copy_(self._head_norms[1](key))
        if self._rope is not None and angles is not None:
            self._rope.rotate_(heads[:, : self._num_heads + self._num_kv_heads], angles)
        kernels.write_kv(kv_layer, key_value.view(len(x), 2, self._num_kv_heads, -1), plan)
        return self._o(kernels.paged_attention(query, kv_layer, plan))
