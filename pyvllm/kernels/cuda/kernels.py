"""`CudaKernels`: those in Triton, but for what is written in CUDA C++ and serves the shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels.cuda import compile as cuda_compile
from pyvllm.kernels.cuda import decode, prefill
from pyvllm.kernels.cuda import gated_linear as wide
from pyvllm.kernels.cuda import linear as skinny
from pyvllm.kernels.interface import LinearFunction
from pyvllm.kernels.plain import Heads, Norm
from pyvllm.kernels.triton import attention as paged
from pyvllm.kernels.triton.attention import AttentionPlan
from pyvllm.kernels.triton.attention_config import num_processors
from pyvllm.kernels.triton.kernels import TritonKernels

_HOPPER: Final = (9, 0)
# Measured on an H200: attention in Triton is as fast with more sequences.
_FEW_SEQUENCES: Final = 8
_SILU: Final = ("silu", "swish")


def reason_against(device: torch.device) -> str | None:
    """Why these kernels do not run on a device, for a log line; None: they do."""
    if device.type != "cuda":
        return f"{device.type} is no GPU of NVIDIA's"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != _HOPPER:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, not that of Hopper, 9.0"
    return cuda_compile.missing()


class CudaKernels(TritonKernels):
    """See the package. Decode steps of a padded size may be captured in a CUDA graph once they have run.

    A layer of a decode step with few rows is five kernels: norm and projection; attention with what is before it;
    output matrix and sum; norm, gate and up; down and sum. With more rows gate, up and activation are one.
    """

    name = "cuda"

    @contextmanager
    def compile_ahead(self) -> Iterator[None]:
        """See `Kernels.compile_ahead`."""
        with super().compile_ahead(), cuda_compile.compile_ahead():
            yield

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> LinearFunction:
        """See `Kernels.pack_linear`."""
        return PackedLinear(weight=weight, bias=bias)

    def norm_linear(self, hidden: Tensor, of: Norm, linear: LinearFunction) -> Tensor:
        """`linear` of the norm of `hidden` `[T, size]`: `[T, out]`."""
        if isinstance(linear, PackedLinear) and linear.serves(hidden, of):
            return skinny.skinny_linear(hidden, linear.weight, bias=linear.bias, norm=of)
        return linear(self.norm(hidden, of))

    def norm_gated(self, hidden: Tensor, of: Norm, linear: LinearFunction, activation: str) -> Tensor:
        """activation(gate) * up of what `norm_linear` gives, gates first: `[T, out / 2]`."""
        if activation in _SILU and isinstance(linear, PackedLinear):
            if linear.serves(hidden, of):
                return skinny.skinny_linear(hidden, linear.weight, bias=linear.bias, norm=of, gated=True)
            x = self.norm(hidden, of)
            return wide.gated_linear(x, linear.weight) if linear.is_wide(x) else self.gated(linear(x), activation)
        return self.gated(self.norm_linear(hidden, of, linear), activation)

    def linear_add(self, hidden: Tensor, x: Tensor, linear: LinearFunction) -> Tensor | None:
        """Add `linear(x)` to `hidden` `[T, out]` in place, or return it, to be added by what comes next."""
        if isinstance(linear, PackedLinear) and hidden.is_contiguous():
            if linear.serves(x):
                skinny.skinny_linear(x, linear.weight, bias=linear.bias, residual=hidden)
                return None
            if linear.bias is None and hidden.dtype == x.dtype and x.dtype.itemsize == 2:
                # Of 8,192 rows the norm that follows takes half as long.
                torch.addmm(hidden, x, linear.weight.t(), out=hidden)
                return None
        return linear(x)

    def attend(self, qkv: Tensor, heads: Heads, angles: Any, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """`rotate_and_store`, then `paged_attention` of what it gives."""
        fused = plan.prefill is None and len(qkv) <= _FEW_SEQUENCES and decode.serves(plan, kv_layer)
        if not fused or not decode.supports_heads(heads, qkv.dtype):
            query = self.rotate_and_store(qkv, heads, angles, kv_layer, plan)
            return self.paged_attention(query, kv_layer, plan)
        output = qkv.new_empty(len(qkv), heads.num_heads * heads.head_dim)
        decode.fused_decode_attention(qkv, heads, kv_layer, output, plan)
        return output

    def paged_attention(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See `Kernels.paged_attention`."""
        decodes = len(query) <= _FEW_SEQUENCES and decode.serves(plan, kv_layer)
        prefills = prefill.serves(plan, kv_layer)
        if not decodes and not prefills:
            return super().paged_attention(query, kv_layer, plan)
        others = replace(plan, decode=None if decodes else plan.decode, prefill=None if prefills else plan.prefill)
        output = paged.paged_attention(query, kv_layer, others)
        if decodes:
            decode.decode_attention(query, kv_layer, output, plan)
        if prefills:
            prefill.prefill_attention(query, kv_layer, output, plan)
        return output


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLinear:
    """x @ weight.T + bias: by `skinny_linear` for few rows, else by cuBLAS."""

    weight: Tensor
    """`[N, K]`."""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`[M, K]` -> `[M, N]`."""
        if self.serves(x):
            return skinny.skinny_linear(x, self.weight, bias=self.bias)
        return functional.linear(x, self.weight, self.bias)

    def serves(self, x: Tensor, of: Norm | None = None) -> bool:
        """Whether `skinny_linear` does for this `x`, with a norm of it before."""
        return skinny.serves(x, self.weight) and (of is None or skinny.supports_norm(of, x.dtype))

    def is_wide(self, x: Tensor) -> bool:
        """Whether `gated_linear` does for this `x`, and faster than cuBLAS; the weight is a gate and what it scales."""
        if self.bias is not None or not wide.serves(x, self.weight):
            return False
        m, k = x.shape
        return wide.pays(m, len(self.weight) // 2, k, multiprocessors=num_processors(x.device))
