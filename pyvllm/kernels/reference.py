"""Plain torch, on any device: the specification that all other kernels are tested against.

Written to be read, one sequence at a time. Symbols as in `interface.py`; further Q query tokens and C tokens of
context of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pyvllm.kernels.interface import Attention, Kernels
from pyvllm.step import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePlan:
    """The step's sequences, on the host."""

    attention: Attention
    block_size: int
    slots: Tensor
    """[T] int64; -1 in padding."""
    queries: list[tuple[int, int]]
    """Of each sequence, its first query token and the one after its last."""
    seq_lens: list[int]
    """Of each sequence, the tokens of its context, its query tokens included."""
    block_tables: list[Tensor]
    """Of each sequence, its blocks: int64."""


class ReferenceKernels(Kernels[ReferencePlan]):
    """See the module."""

    name = "reference"
    has_sinks = True

    def plan(self, step: StepView, attention: Attention, kv_layer: Tensor) -> ReferencePlan:
        """See `Kernels.plan`."""
        starts = step.query_start_loc.tolist()[: step.num_seqs + 1]
        offsets = step.block_table_offsets.tolist()
        return ReferencePlan(
            attention=attention,
            block_size=kv_layer.shape[3],
            slots=step.slot_mapping.long(),
            queries=list(pairwise(starts)),
            seq_lens=step.seq_lens.tolist()[: step.num_seqs],
            block_tables=[step.block_table_ids[offsets[i] : offsets[i + 1]].long() for i in range(step.num_seqs)],
        )

    def write_kv(self, kv_layer: Tensor, key_value: Tensor, plan: ReferencePlan) -> None:
        """See `Kernels.write_kv`."""
        real = plan.slots >= 0
        slots = plan.slots[real]
        kv_layer[slots // plan.block_size, :, :, slots % plan.block_size] = key_value[real]

    def paged_attention(self, query: Tensor, kv_layer: Tensor, plan: ReferencePlan) -> Tensor:
        """See `Kernels.paged_attention`."""
        return self._attention(query, kv_layer, plan, None)

    def paged_attention_with_sinks(self, query: Tensor, kv_layer: Tensor, plan: ReferencePlan, sinks: Tensor) -> Tensor:
        """See `Kernels.paged_attention_with_sinks`."""
        return self._attention(query, kv_layer, plan, sinks)

    def _attention(self, query: Tensor, kv_layer: Tensor, plan: ReferencePlan, sinks: Tensor | None) -> Tensor:
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for (start, end), seq_len, blocks in zip(plan.queries, plan.seq_lens, plan.block_tables, strict=True):
            # [n, 2, K, B, D] -> [2, C, K, D]
            context = kv_layer[blocks].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :seq_len]
            output[start:end] = _attend(query[start:end], context[0], context[1], plan.attention, sinks)
        return output.flatten(1)


def _attend(query: Tensor, key: Tensor, value: Tensor, attention: Attention, sinks: Tensor | None) -> Tensor:
    """The last Q positions of one sequence: `query` [Q, H, D], `key` and `value` [C, K, D] -> [Q, H, D]; in float32."""
    group = attention.num_heads // attention.num_kv_heads
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,chd->hqc", query.float(), key) * attention.scale
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    key_position = torch.arange(len(key), device=query.device)
    distance = key_position[-len(query) :, None] - key_position  # [Q, C]
    if attention.alibi_slopes is not None:
        scores -= torch.tensor(attention.alibi_slopes, device=query.device)[:, None, None] * distance
    hidden = distance < 0
    if attention.window is not None:
        hidden |= distance >= attention.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(query), 1)], -1)
    weights = torch.softmax(scores, dim=-1)[..., : len(key)]
    return torch.einsum("hqc,chd->qhd", weights, value).to(query.dtype)
