"""The one decoder: it executes any `ModelSpec`."""

from __future__ import annotations

import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels, Norm, RopeTables
from pyvllm.layers.attention import SelfAttention
from pyvllm.layers.linear import Linear
from pyvllm.layers.mlp import GatedMLP
from pyvllm.layers.norm import empty_norm
from pyvllm.layers.rope import rope_tables
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
            rope = rope_tables(spec.rope, num_positions=max_model_len, dtype=dtype, device=device)
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

    def forward(self, step: StepView, previous: Tensor, kv_layers: list[Tensor], kernels: AnyKernels) -> Tensor:
        """Hidden states [T, d] of the step's tokens, whose KV is written to `kv_layers` `[N, 2, K, B, D]` each.

        `previous` [rows of the step before] int32: what negative token ids stand for.
        """
        plans = [kernels.plan(step, attention, kv_layers[0]) for attention in self._attentions]
        angles = kernels.angles(self._rope, step.positions)
        hidden = kernels.embed(step.token_ids, previous, self._embed)
        delta = None
        for layer, kind, kv_layer in zip(self._layers, self._kinds, kv_layers, strict=True):
            if delta is None:
                normed = kernels.norm(hidden, layer.norm1)
            else:
                normed = kernels.add_norm(hidden, delta, layer.norm1)
            delta = layer(hidden, normed, angles, kv_layer, plans[kind], kernels)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: Tensor, kernels: AnyKernels) -> Tensor:
        """Of rows `[R, d]` of what `forward` gave: `[R, V]`, in the model's dtype."""
        return self._head(kernels.norm(hidden, self._final_norm))


class _Layer:
    def __init__(
        self, spec: ModelSpec, layer: int, rope: RopeTables | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        head_norms = None
        if spec.head_norms:
            head_norms = (_norm(spec, spec.head_dim, dtype, device), _norm(spec, spec.head_dim, dtype, device))
        self.norm1 = _norm(spec, spec.hidden_size, dtype, device)
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
        norms = {"norm1": self.norm1.weight, "norm2": self._norm2.weight}
        return norms | self._attention.slots() | self._mlp.slots()

    def pack(self, kernels: AnyKernels) -> None:
        self._attention.pack(kernels)
        self._mlp.pack(kernels)

    def __call__(
        self, hidden: Tensor, normed: Tensor, angles: object, kv_layer: Tensor, plan: object, kernels: AnyKernels
    ) -> Tensor:
        """What the layer adds to `hidden` [T, d], but for what its attention adds, which is in `hidden` already.

        `normed`: `norm1` of `hidden`.
        """
        delta = self._attention(normed, angles, kv_layer, plan, kernels)
        return self._mlp(kernels.add_norm(hidden, delta, self._norm2), kernels)


def _norm(spec: ModelSpec, size: int, dtype: torch.dtype, device: torch.device) -> Norm:
    return empty_norm(
        size, eps=spec.norm_eps, weight_in_float32=spec.norm_weight_in_float32, dtype=dtype, device=device
    )
