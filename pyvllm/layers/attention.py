"""The attention part of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels, Attention, Heads, Norm, RopeTables
from pyvllm.layers.linear import Linear


class SelfAttention:
    """Projections around the paged attention of one layer. T: tokens of a step."""

    def __init__(
        self,
        size: int,
        attention: Attention,
        *,
        qkv_bias: bool,
        o_bias: bool,
        head_norms: tuple[Norm, Norm] | None,
        rope: RopeTables | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`head_norms`: of each query and each key head. `rope` is shared by layers."""
        q_size, kv_size = (heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads))
        self._qkv = Linear.empty(size, q_size, kv_size, kv_size, bias=qkv_bias, dtype=dtype, device=device)
        self._o = Linear.empty(q_size, size, bias=o_bias, dtype=dtype, device=device)
        query_norm, key_norm = head_norms or (None, None)
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
        slots = self._qkv.slots("q", "k", "v") | self._o.slots("o")
        norms = {"q_norm": self._heads.query_norm, "k_norm": self._heads.key_norm}
        slots |= {name: norm.weight for name, norm in norms.items() if norm is not None}
        return slots

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`."""
        self._qkv.pack(kernels)
        self._o.pack(kernels)

    def __call__(self, x: Tensor, angles: object, kv_layer: Tensor, plan: object, kernels: AnyKernels) -> Tensor:
        """`x` [T, size] -> [T, size]. `angles`: what `kernels.angles` gave; `plan`: what `kernels.plan` gave."""
        query = kernels.rotate_and_store(self._qkv(x), self._heads, angles, kv_layer, plan)
        return self._o(kernels.paged_attention(query, kv_layer, plan))
