"""The one decoder: it executes any `ModelSpec`."""

from __future__ import annotations

import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels, RopeTables
from pyvllm.layers.attention import LayerStep, SelfAttention
from pyvllm.layers.block import ARRANGEMENTS, Block
from pyvllm.layers.embedding import Embedding
from pyvllm.layers.head import Head
from pyvllm.layers.mlp import GatedMLP, PlainMLP
from pyvllm.layers.moe import Experts
from pyvllm.layers.norm import empty_norm
from pyvllm.layers.rope import rope_tables
from pyvllm.models.spec import ModelSpec
from pyvllm.step import StepView


class Decoder:
    """Embedding, layers, final norm and output matrix. Weights are unset until the slots are filled.

    Symbols: T tokens of a step, R rows of logits, d hidden size, V vocabulary.
    """

    def __init__(self, spec: ModelSpec, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """`max_model_len`: positions are below it. Raises ValueError if the model has not learned so many."""
        if spec.position_offset is not None and max_model_len > spec.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {max_model_len}, must be at most {spec.max_position_embeddings}: the model has "
                "learned no further positions"
            )
        self.spec = spec
        self._embedding = Embedding(
            spec.vocab_size,
            spec.hidden_size,
            table_size=spec.embed_size,
            num_positions=spec.max_position_embeddings,
            position_offset=spec.position_offset,
            scale=spec.embed_scale,
            norm=spec.norm if spec.embed_norm else None,
            dtype=dtype,
            device=device,
        )
        ropes = list(dict.fromkeys(spec.ropes))
        self._ropes = [
            None if rope is None else rope_tables(rope, num_positions=max_model_len, dtype=dtype, device=device)
            for rope in ropes
        ]
        self._rope_kinds = [ropes.index(rope) for rope in spec.ropes]
        self._layers = [
            _layer(spec, layer, self._ropes[kind], dtype, device) for layer, kind in enumerate(self._rope_kinds)
        ]
        self._head = Head(
            self._embedding.table,
            spec.hidden_size,
            tied=spec.tied,
            bias=spec.head_bias,
            norm=spec.norm if spec.final_norm else None,
            scale=spec.logit_scale,
            softcap=spec.logit_softcap,
        )
        by_layer = [spec.attention(layer) for layer in range(spec.num_layers)]
        self._attentions = list(dict.fromkeys(by_layer))
        self._kinds = [self._attentions.index(attention) for attention in by_layer]

    def slots(self) -> dict[str, Tensor]:
        """Neutral name -> view of the parameter, matrices as [out, in]; a tied model has no `head`.

        Raises `RuntimeError` after `pack`.
        """
        slots = self._embedding.slots()
        for i, layer in enumerate(self._layers):
            slots |= {f"layers.{i}.{name}": slot for name, slot in layer.slots().items()}
        return slots | self._head.slots()

    def pack(self, kernels: AnyKernels) -> None:
        """Hand the matrices, now filled, to the kernels, which may keep them in another layout."""
        self._embedding.pack(kernels)
        for layer in self._layers:
            layer.pack(kernels)
        self._head.pack(kernels)

    def forward(
        self,
        step: StepView,
        previous: Tensor,
        kv_layers: list[Tensor],
        kernels: AnyKernels,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, d] of the step's tokens, whose KV is written to `kv_layers` `[N, 2, K, B, D]` each.

        `previous` [rows of the step before] int32: what negative token ids stand for. `rows` [R]: tokens whose states
        are wanted, [R, d]: the last layer does no more for the others than to store their keys and values.
        """
        plans = [kernels.plan(step, attention, kv_layers[0]) for attention in self._attentions]
        angles = [kernels.angles(rope, step.positions) for rope in self._ropes]
        hidden, delta = self._embedding(step, previous, kernels), None
        last = len(self._layers) - 1
        for i, (layer, rope, kind) in enumerate(zip(self._layers, self._rope_kinds, self._kinds, strict=True)):
            of_step = LayerStep(
                angles=angles[rope],
                kv_layer=kv_layers[i],
                plan=plans[kind],
                kernels=kernels,
                rows=rows if i == last else None,
            )
            hidden, delta = layer(hidden, delta, of_step)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: Tensor, kernels: AnyKernels) -> Tensor:
        """Of rows `[R, d]` of what `forward` gave: `[R, V]`, in the model's dtype."""
        return self._head(hidden, kernels)


def _layer(spec: ModelSpec, layer: int, rope: RopeTables | None, dtype: torch.dtype, device: torch.device) -> Block:
    attention = SelfAttention(
        spec.hidden_size,
        spec.attention(layer),
        qkv_bias=spec.qkv_bias,
        o_bias=spec.o_bias,
        clip=spec.clip_qkv,
        qk_norm=spec.qk_norm,
        rope=rope,
        dtype=dtype,
        device=device,
    )
    norms = {name: empty_norm(spec.norm, spec.hidden_size, dtype=dtype, device=device) for name in spec.norms}
    return ARRANGEMENTS[spec.arrangement](
        attention,
        _mlp(spec, layer, dtype, device),
        norm=spec.norm,
        norms=norms,
        residual_scale=spec.residual_scale,
    )


def _mlp(spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device) -> GatedMLP | PlainMLP | Experts:
    if spec.experts is not None and layer in spec.experts.layers:
        return Experts(spec.hidden_size, spec.experts, activation=spec.activation, dtype=dtype, device=device)
    return (GatedMLP if spec.gated else PlainMLP)(
        spec.hidden_size,
        spec.intermediate_size,
        activation=spec.activation,
        bias=spec.mlp_bias,
        dtype=dtype,
        device=device,
    )
