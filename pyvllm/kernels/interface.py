"""What a set of kernels offers to the model code.

Symbols in shapes: T tokens of a step, S sequences, H query heads, K KV heads, G = H / K query heads that share a KV
head, D head size, N blocks of a pool, B tokens of a block, L layers.

KV memory of one layer is `[N, 2, K, B, D]`, index 1 telling keys from values: the tokens of one block and head lie
together, and so does all of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from torch import Tensor
from torch.nn import functional

from pyvllm.kernels import plain, plain_sampling
from pyvllm.kernels.plain import ACTIVATIONS, Heads, Norm, RopeTables
from pyvllm.kernels.plain_sampling import LogprobRows
from pyvllm.step import Flags, StepView


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What attention computes: softmax over the keys k <= q of a sequence of `cap(scale * q . k) + bias`, times values.

    Layers that are equal in this share a plan.
    """

    num_heads: int
    """Query heads H."""
    num_kv_heads: int
    """KV heads K; divides H. Query head h uses KV head h // (H / K)."""
    head_dim: int
    """D."""
    scale: float
    """Factor of the scores, 1 / sqrt(D) as a rule."""
    window: int | None = None
    """Keys that a query sees, itself included; None: all before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)`."""
    alibi_slopes: tuple[float, ...] | None = None
    """One for each query head: the bias is `-slope * (query position - key position)`."""
    sinks: bool = False
    """Each query head has one more score, which no value belongs to: `paged_attention_with_sinks` is called."""


LinearFunction: TypeAlias = Callable[[Tensor], Tensor]
"""x `[M, in]` -> `[M, out]`."""

PlanT = TypeVar("PlanT")


class Kernels(ABC, Generic[PlanT]):
    """One implementation of all that differs between devices.

    `PlanT` is what it prepares once a step and all layers share: index tensors, masks, work lists. What is not abstract
    is plain torch and right on any device.
    """

    name: str
    cascades: bool = False
    """Whether a plan's cascades make attention faster; without it they change nothing."""

    waits_are_free: bool = False
    """Whether the host may look at values, and shapes depend on them, at no cost: nothing runs beside the host."""

    def graph_kind(self, step: StepView) -> Hashable:
        """What decides, beside a step's padded size, which work its layers launch: a graph serves one kind."""
        return None

    def compile_ahead(self) -> AbstractContextManager[None]:
        """While it is entered, work handed to these kernels need not run: what it takes to run it is prepared."""
        return nullcontext()

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> LinearFunction:
        """The function `x @ weight.T + bias`, from weight `[out, in]` in the order that this device reads best.

        The caller drops `weight` then, unless it is needed for something else.
        """
        return partial(functional.linear, weight=weight, bias=bias)

    @abstractmethod
    def plan(self, step: StepView, attention: Attention, kv_layer: Tensor) -> PlanT:
        """Prepare a step of at least one token. `kv_layer` is any layer's KV memory: its shape and dtype count."""

    @abstractmethod
    def write_kv(self, kv_layer: Tensor, key_value: Tensor, plan: PlanT) -> None:
        """Store keys and values `[T, 2, K, D]` at the step's slots of `kv_layer` `[N, 2, K, B, D]`."""

    @abstractmethod
    def paged_attention(self, query: Tensor, kv_layer: Tensor, plan: PlanT) -> Tensor:
        """Attention of `query` `[T, H, D]` over the sequences' blocks: `[T, H * D]`. The step's KV is written before.

        Rows of padding tokens are finite and have no meaning.
        """

    has_sinks: ClassVar[bool] = False
    """Whether there is `paged_attention_with_sinks`."""

    def paged_attention_with_sinks(self, query: Tensor, kv_layer: Tensor, plan: PlanT, sinks: Tensor) -> Tensor:
        """`paged_attention` whose softmax has one more term for each query head, `exp(sinks[h])` of `sinks` `[H]`.

        Raises ValueError where `has_sinks` is false.
        """
        raise ValueError(f"the {self.name} kernels have no attention with sinks")

    def embed(self, token_ids: Tensor, previous: Tensor, table: Tensor) -> Tensor:
        """Rows of `table` `[V, size]` for `token_ids` `[T]` int32, -1 - i standing for `previous[i]`: `[T, size]`."""
        return functional.embedding(plain.resolve(token_ids, previous), table)

    def norm(self, x: Tensor, of: Norm) -> Tensor:
        """`[..., size]` -> the same shape, a new tensor."""
        return plain.norm(x, of)

    def add_norm(self, hidden: Tensor, delta: Tensor, of: Norm) -> Tensor:
        """Add `delta` to `hidden` in place, both `[T, size]`; returns the norm of the sum, a new tensor."""
        return plain.norm(hidden.add_(delta), of)

    def angles(self, rope: RopeTables | None, positions: Tensor) -> object:
        """What `rotate_and_store` needs to know of a step's `positions` `[T]` int32; made once a step.

        With `rope` None nobody looks at it.
        """
        if rope is None:
            return None
        return rope.cos.index_select(0, positions)[:, None], rope.sin.index_select(0, positions)[:, None]

    def rotate_and_store(self, qkv: Tensor, heads: Heads, angles: Any, kv_layer: Tensor, plan: PlanT) -> Tensor:
        """From `qkv` `[T, (H + 2K) * D]`, which may be overwritten, to queries `[T, H, D]`, keys and values stored.

        `angles`: what `angles` made of `heads.rope`; `kv_layer`, `plan` as for `write_kv`.
        """
        every = qkv.view(len(qkv), -1, heads.head_dim)
        query, key_value = every[:, : heads.num_heads], every[:, heads.num_heads :]
        if heads.query_norm is not None:
            query.copy_(plain.norm(query, heads.query_norm))
        if heads.key_norm is not None:
            key = key_value[:, : heads.num_kv_heads]
            key.copy_(plain.norm(key, heads.key_norm))
        if heads.rope is not None:
            turned = every[:, : heads.num_heads + heads.num_kv_heads]
            plain.rotate_(turned, *angles, interleaved=heads.rope.interleaved)
        self.write_kv(kv_layer, key_value.view(len(qkv), 2, heads.num_kv_heads, -1), plan)
        return query

    def attend(self, qkv: Tensor, heads: Heads, angles: Any, kv_layer: Tensor, plan: PlanT) -> Tensor:
        """`rotate_and_store`, then `paged_attention` of what it gives: `[T, H * D]`."""
        return self.paged_attention(self.rotate_and_store(qkv, heads, angles, kv_layer, plan), kv_layer, plan)

    def norm_linear(self, hidden: Tensor, of: Norm, linear: LinearFunction) -> Tensor:
        """`linear`, which `pack_linear` made, of the norm of `hidden` `[M, size]`: `[M, out]`."""
        return linear(self.norm(hidden, of))

    def norm_gated(self, hidden: Tensor, of: Norm, linear: LinearFunction, activation: str) -> Tensor:
        """activation(gate) * up of what `norm_linear` gives, gates first: `[M, out / 2]`."""
        return self.gated(self.norm_linear(hidden, of, linear), activation)

    def linear_add(self, hidden: Tensor, x: Tensor, linear: LinearFunction) -> Tensor | None:
        """Add `linear(x)` to `hidden` `[M, out]` in place, or return it, to be added by what comes next."""
        return linear(x)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """A key of `ACTIVATIONS`, element by element: the same shape, `x` may be overwritten."""
        return ACTIVATIONS[activation](x)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up of `[T, 2 * size]`, gates first: `[T, size]`."""
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def penalise_(self, values: Tensor, step: StepView, previous: Tensor | None) -> None:
        """Apply the step's repetition, frequency and presence penalties to `values` `[R, V]` float32.

        A token may be listed more than once; its counts add up. `previous`: what negative ids stand for, as in `embed`.
        """
        plain_sampling.penalise_(values, step, previous)

    def pick(self, values: Tensor, row_params: Tensor, flags: Flags, vocab_size: int) -> Tensor:
        """One token a row: `[R]` int32.

        `values` `[R, >= V]`, any float type, not changed: transformed logits, of which the first `vocab_size` = V
        columns count. `row_params` `[R, fields]` int32 and `flags`: as in the plan. Rows of temperature 0 take the
        greatest value, the lowest id among equals. The others draw from what min_p, top_k and top_p leave of
        `value / temperature`, with the noise that `pyvllm/noise.py` specifies. Without a finite value the token is 0.
        """
        return plain_sampling.pick(values, row_params, flags, vocab_size)

    def log_softmax_(self, values: Tensor, wanted: Tensor) -> None:
        """Replace by their log-softmax the rows of `values` `[R, V]` float32 where `wanted` `[R]` bool holds."""
        plain_sampling.log_softmax_(values, wanted)

    def best(self, values: Tensor, count: int, wanted: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """The greatest of the first `vocab_size` = V columns of `values` `[R, >= V]` in order, ties: lower id first.

        Values `[R, count]` float32 and ids `[R, count]` int32, without meaning in rows that `wanted` `[R]` bool leaves
        out.
        """
        return plain_sampling.best_rows(values, count, vocab_size)

    def logprobs(self, logits: Tensor, tokens: Tensor, wanted: Tensor, max_top: int, vocab_size: int) -> LogprobRows:
        """Log-probabilities of `tokens` `[R]` int32, and of the `max_top` (at most V) most probable ones.

        `logits` `[R, >= V]`, any float type, not changed. Rows that `wanted` `[R]` bool leaves out are 0.
        """
        return plain_sampling.logprob_rows(logits, tokens, wanted, max_top, vocab_size)

    def copy_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        """Copy blocks inside a pool `[L, N, 2, K, B, D]`, one after another: `pairs` `[n, 2]` of source, target."""
        for source, target in pairs.tolist():
            pool[:, target].copy_(pool[:, source])

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Tensor) -> None:
        """Copy blocks between two pools `[L, N, 2, K, B, D]`: `pairs` `[n, 2]` of a source's and a target's block."""
        for source_block, target_block in pairs.tolist():
            target[:, target_block].copy_(source[:, source_block])


AnyKernels: TypeAlias = Kernels[Any]
"""Model code hands a plan back to the kernels that made it and never looks inside."""
