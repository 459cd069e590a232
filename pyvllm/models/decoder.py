"""The one decoder: it executes any `ModelSpec`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels import AnyKernels
from pyvllm.layers.attention import SelfAttention
from pyvllm.layers.linear import Linear
from pyvllm.layers.mlp import GatedMLP
from pyvllm.layers.norm import RMSNorm
from pyvllm.layers.rope import Rope
from pyvllm.models.spec import ModelSpec
from pyvllm.step import StepView


class Decoder:
    """Embedding, layers, final norm and output matrix. Weights are unset until the slots are filled.

    Symbols: T tokens of a step, R rows of logits, d hidden size, V vocabulary.
    """

    def __init__(self, spec: ModelSpec, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """`max_model_len`: positions are below it."""
        self.spec = spec
        self._embed = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        rope = None
        if spec.rope is not None:
            rope = Rope(spec.rope, num_positions=max_model_len, dtype=dtype, device=device)
        self._rope = rope
        self._layers = [_Layer(spec, layer, rope, dtype, device) for layer in range(spec.num_layers)]
        self._final_norm = _norm(spec, spec.hidden_size, dtype, device)
        self._head = Linear(self._embed if spec.tied else torch.empty_like(self._embed))
        by_layer = [spec.attention(layer) for layer in range(spec.num_layers)]
        self._attentions = list(dict.fromkeys(by_layer))
        self._kinds = [self._attentions.index(attention) for attention in by_layer]

    def slots(self) -> dict[str, Tensor]:
        """Neutral name -> view of the parameter, matrices as [out, in]; a tied model has no `head`.

        Raises `RuntimeError` after `pack`.
        """
        slots = {"embed": self._embed}
        for i, layer in enumerate(self._layers):
            slots |= {f"layers.{i}.{name}": slot for name, slot in layer.slots().items()}
        slots["final_norm"] = self._final_norm.weight
        return slots if self.spec.tied else slots | self._head.slots("head")

    def pack(self, kernels: AnyKernels) -> None:
        """Hand the matrices, now filled, to the kernels, which may keep them in another layout."""
        for layer in self._layers:
            layer.pack(kernels)
        self._head.pack(kernels)

    def forward(self, token_ids: Tensor, step: StepView, kv_layers: list[Tensor], kernels: AnyKernels) -> Tensor:
        """Hidden states [T, d] of `token_ids` [T], whose KV is written to `kv_layers` `[N, 2, K, B, D]` each."""
        plans = [kernels.plan(step, attention, kv_layers[0]) for attention in self._attentions]
        angles = self._rope.at(step.positions) if self._rope is not None else None
        hidden = functional.embedding(token_ids, self._embed)
        for layer, kind, kv_layer in zip(self._layers, self._kinds, kv_layers, strict=True):
            layer(hidden, angles, kv_layer, plans[kind], kernels)
        return self._final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, d]` -> `[R, V]`, in the model's dtype."""
        return self._head(hidden)


class _Layer:
    def __init__(
        self, spec: ModelSpec, layer: int, rope: Rope | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        head_norms = None
        if spec.head_norms:
            head_norms = (_norm(spec, spec.head_dim, dtype, device), _norm(spec, spec.head_dim, dtype, device))
        self._norm1 = _norm(spec, spec.hidden_size, dtype, device)
        self._attention = SelfAttention(
            spec.hidden_size,
            spec.attention(layer),
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            head_norms=head_norms,
            rope=rope,
            dtype=dtype,
            device=device,
        )
        self._norm2 = _norm(spec, spec.hidden_size, dtype, device)
        self._mlp = GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            activation=spec.activation,
            bias=spec.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def slots(self) -> dict[str, Tensor]:
        norms = {"norm1": self._norm1.weight, "norm2": self._norm2.weight}
        return norms | self._attention.slots() | self._mlp.slots()

    def pack(self, kernels: AnyKernels) -> None:
        self._attention.pack(kernels)
        self._mlp.pack(kernels)

    def __call__(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor] | None, kv_layer: Tensor, plan: object, kernels: AnyKernels
    ) -> None:
        """Add to `hidden` [T, d] in place."""
        hidden.add_(self._attention(self._norm1(hidden), angles, kv_layer, plan, kernels))
        hidden.add_(self._mlp(self._norm2(hidden)))


def _norm(spec: ModelSpec, size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(size, eps=spec.norm_eps, weight_in_float32=spec.norm_weight_in_float32, dtype=dtype, device=device)
