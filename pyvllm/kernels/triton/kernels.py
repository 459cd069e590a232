"""`TritonKernels`: the interface, each method one launch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from pyvllm.kernels.interface import Attention, Kernels
from pyvllm.kernels.plain import Heads, Norm, RopeTables
from pyvllm.kernels.plain_sampling import LogprobRows
from pyvllm.kernels.triton import activation as elementwise
from pyvllm.kernels.triton import attention as paged
from pyvllm.kernels.triton import blocks, compiling, embed, norm, sampling, sampling_logprobs, sampling_penalties
from pyvllm.kernels.triton import heads as head_kernels
from pyvllm.kernels.triton.attention import AttentionPlan
from pyvllm.step import Flags, StepView


class TritonKernels(Kernels[AttentionPlan]):
    """See the package. Decode steps of a padded size may be captured in a CUDA graph."""

    name = "triton"
    cascades = True
    has_sinks = True

    def compile_ahead(self) -> AbstractContextManager[None]:
        """See `Kernels.compile_ahead`."""
        return compiling.compile_ahead()

    def graph_kind(self, step: StepView) -> int:
        """See `Kernels.graph_kind`."""
        return paged.cascade_kind(step)

    def plan(self, step: StepView, attention: Attention, kv_layer: Tensor) -> AttentionPlan:
        """See `Kernels.plan`."""
        return paged.plan_attention(step, attention, kv_layer)

    def write_kv(self, kv_layer: Tensor, key_value: Tensor, plan: AttentionPlan) -> None:
        """See `Kernels.write_kv`."""
        paged.write_kv(kv_layer, key_value, plan)

    def paged_attention(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See `Kernels.paged_attention`."""
        return paged.paged_attention(query, kv_layer, plan)

    def paged_attention_with_sinks(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor) -> Tensor:
        """See `Kernels.paged_attention_with_sinks`."""
        return paged.paged_attention(query, kv_layer, plan, sinks)

    def embed(self, token_ids: Tensor, previous: Tensor, table: Tensor) -> Tensor:
        """See `Kernels.embed`."""
        return embed.embed(token_ids, previous, table)

    def norm(self, x: Tensor, of: Norm) -> Tensor:
        """See `Kernels.norm`."""
        return norm.norm(x, of)

    def add_norm(self, hidden: Tensor, delta: Tensor, of: Norm) -> Tensor:
        """See `Kernels.add_norm`."""
        return norm.add_norm(hidden, delta, of)

    def angles(self, rope: RopeTables | None, positions: Tensor) -> object:
        """The positions: the kernel looks angles up itself."""
        return positions

    def rotate_and_store(self, qkv: Tensor, heads: Heads, angles: Any, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See `Kernels.rotate_and_store`."""
        return head_kernels.rotate_and_store(qkv, heads, angles, kv_layer, plan.slot_mapping)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """See `Kernels.activate`."""
        return elementwise.activate(x, activation)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels.gated`."""
        return elementwise.gated(gate_up, activation)

    def copy_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        """See `Kernels.copy_blocks`."""
        blocks.copy_blocks(pool, pairs)

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Tensor) -> None:
        """See `Kernels.swap_blocks`."""
        blocks.swap_blocks(source, target, pairs)

    def penalise_(self, values: Tensor, step: StepView, previous: Tensor | None) -> None:
        """See `Kernels.penalise_`."""
        sampling_penalties.penalise_(values, step, previous)

    def pick(self, values: Tensor, row_params: Tensor, flags: Flags, vocab_size: int) -> Tensor:
        """See `Kernels.pick`."""
        return sampling.pick(values, row_params, flags, vocab_size)

    def best(self, values: Tensor, count: int, wanted: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """See `Kernels.best`."""
        return sampling_logprobs.best(values, count, wanted, vocab_size)

    def logprobs(self, logits: Tensor, tokens: Tensor, wanted: Tensor, max_top: int, vocab_size: int) -> LogprobRows:
        """See `Kernels.logprobs`."""
        return sampling_logprobs.logprobs(logits, tokens, wanted, max_top, vocab_size)
