"""Fast torch for CPUs.

A decode step gathers the blocks of many sequences into one contiguous buffer and attends to them in one batch, the
query heads of a KV head standing in for query tokens. Linear layers keep their weights as oneDNN wants them.

Symbols as in `interface.py`; further b sequences of a group, n blocks and C = n * B columns of padded context, Q query
tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pyvllm.kernels import cpu_sampling
from pyvllm.kernels.interface import Attention, Kernels, LinearFunction
from pyvllm.kernels.plain_sampling import LogprobRows
from pyvllm.step import Flags, StepView

# Elements of padding (columns * K * D) that cost about as much as one more group of sequences.
_GROUP_COST = 1 << 18
# Up to this many elements of K, fused attention beats four separate operations in half precision.
_FUSED_LIMIT = 1 << 18
# Scores that a chunk with a bias or cap computes at once.
_TILE_SCORES = 1 << 21
# Rows that packed weights are laid out for: measured, as good for 1 and for 512 as what is made for those.
_PACK_ROWS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Sequences with one query token each, and contexts of similar length."""

    rows: Tensor | None
    """[b] int64: their places in the step; None: this group is all of them, in order."""
    gather: Tensor
    """[2 * b * K * n] int64: rows of the layer's KV memory seen as [N * 2 * K, B * D]; keys first."""
    buffer: Tensor
    """[2 * b * K * n, B * D]: where each layer gathers them."""
    mask: Tensor
    """[b, 1 or K, 1 or G, C]: added to the scores."""
    fused: bool
    """Whether attention is one operation; the mask has its dtype then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A sequence with several query tokens."""

    start: int
    end: int
    """Its query tokens are [start, end)."""
    gather: Tensor
    """[2 * K * n] int64, as in `DecodeGroup`, blocks that no query token sees left out."""
    distance: Tensor
    """[1, Q, c] int64: query position - key position, c being the context without what pads its last block."""
    mask: Tensor | None
    """[Q, c] for fused attention; None: causal from the first key on, or not fused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPlan:
    """What a step's layers share."""

    attention: Attention
    num_tokens: int
    num_decodes: int
    kv_rows: Tensor
    """[T * 2 * K] int64: rows of the layer's KV memory seen as [N * 2 * K * B, D] that the step writes."""
    groups: list[DecodeGroup]
    chunks: list[Chunk]


class CpuKernels(Kernels[CpuPlan]):
    """See the module."""

    name = "cpu"
    has_sinks = True
    waits_are_free = True

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> LinearFunction:
        """See `Kernels.pack_linear`."""
        if not _packs(weight.dtype):
            return super().pack_linear(weight, bias)
        linear = torch.ops.mkldnn._linear_pointwise.default
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), _PACK_ROWS)

        def apply(x: Tensor) -> Tensor:
            output: Tensor = linear(x, packed, bias, "none", [], "")
            return output

        return apply

    def plan(self, step: StepView, attention: Attention, kv_layer: Tensor) -> CpuPlan:
        """See `Kernels.plan`."""
        _, _, num_kv_heads, block_size, _ = kv_layer.shape
        slots = step.slot_mapping[: step.num_tokens].long()
        first_row = slots // block_size * (2 * num_kv_heads * block_size) + slots % block_size
        kv_rows = first_row[:, None] + torch.arange(0, 2 * num_kv_heads * block_size, block_size)
        return CpuPlan(
            attention=attention,
            num_tokens=step.num_tokens,
            num_decodes=step.num_decodes,
            kv_rows=kv_rows.flatten(),
            groups=_decode_groups(step, attention, kv_layer),
            chunks=_chunks(step, attention, kv_layer),
        )

    def write_kv(self, kv_layer: Tensor, key_value: Tensor, plan: CpuPlan) -> None:
        """See `Kernels.write_kv`."""
        head_dim = kv_layer.shape[-1]
        rows = key_value[: plan.num_tokens].reshape(-1, head_dim)
        kv_layer.view(-1, head_dim).index_copy_(0, plan.kv_rows, rows)

    def paged_attention(self, query: Tensor, kv_layer: Tensor, plan: CpuPlan) -> Tensor:
        """See `Kernels.paged_attention`."""
        return self._attention(query, kv_layer, plan, None)

    def paged_attention_with_sinks(self, query: Tensor, kv_layer: Tensor, plan: CpuPlan, sinks: Tensor) -> Tensor:
        """See `Kernels.paged_attention_with_sinks`."""
        return self._attention(query, kv_layer, plan, sinks.float().view(kv_layer.shape[2], -1, 1))

    def _attention(self, query: Tensor, kv_layer: Tensor, plan: CpuPlan, sinks: Tensor | None) -> Tensor:
        """`sinks` [K, G, 1] float32."""
        block_rows = kv_layer.view(-1, kv_layer.shape[3] * kv_layer.shape[4])
        if plan.groups and plan.groups[0].rows is None and plan.num_decodes == len(query):
            return _attend_group(query, block_rows, plan.groups[0], plan.attention, sinks).flatten(1)
        output = query.new_zeros(query.shape)
        for group in plan.groups:
            rows = slice(plan.num_decodes) if group.rows is None else group.rows
            output[rows] = _attend_group(query[rows], block_rows, group, plan.attention, sinks)
        for chunk in plan.chunks:
            tokens = slice(chunk.start, chunk.end)
            output[tokens] = _attend_chunk(query[tokens], block_rows, chunk, plan.attention, sinks)
        return output.flatten(1)

    def pick(self, values: Tensor, row_params: Tensor, flags: Flags, vocab_size: int) -> Tensor:
        """See `Kernels.pick`."""
        return cpu_sampling.pick(values, row_params, flags, vocab_size)

    def log_softmax_(self, values: Tensor, wanted: Tensor) -> None:
        """See `Kernels.log_softmax_`."""
        cpu_sampling.log_softmax_(values, wanted)

    def best(self, values: Tensor, count: int, wanted: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """See `Kernels.best`."""
        return cpu_sampling.best(values, count, wanted, vocab_size)

    def logprobs(self, logits: Tensor, tokens: Tensor, wanted: Tensor, max_top: int, vocab_size: int) -> LogprobRows:
        """See `Kernels.logprobs`."""
        return cpu_sampling.logprobs(logits, tokens, wanted, max_top, vocab_size)


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes this dtype natively here. Its packed weights are tried on x86 only."""
    if not torch._C._has_mkldnn or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


# --- once a step ------------------------------------------------------------------------------------------------------


def _decode_groups(step: StepView, attention: Attention, kv_layer: Tensor) -> list[DecodeGroup]:
    if step.num_decodes == 0:
        return []
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    seq_lens = step.seq_lens[: step.num_decodes].long()
    first_block = _first_visible(seq_lens, 1, attention) // block_size
    num_blocks = (seq_lens + block_size - 1) // block_size - first_block
    start = step.block_table_offsets[: step.num_decodes].long() + first_block
    groups = []
    for rows in _similar(num_blocks, num_kv_heads * block_size * head_dim):
        lens, first, count, begin = (
            (x if rows is None else x[rows]) for x in (seq_lens, first_block, num_blocks, start)
        )
        # Padding repeats the sequence's own last block: no request reads another's memory.
        column = torch.minimum(torch.arange(int(count.max())), count[:, None] - 1)
        gather = _gather_rows(step.block_table_ids[begin[:, None] + column], num_kv_heads)
        position = first[:, None] * block_size + torch.arange(column.shape[1] * block_size)
        mask = _mask((lens[:, None] - 1 - position)[:, None], attention)
        num_keys = mask.shape[0] * num_kv_heads * mask.shape[3]
        plain = attention.softcap is None and not attention.sinks
        fused = kv_layer.dtype != torch.float32 and num_keys * head_dim <= _FUSED_LIMIT and plain
        groups.append(
            DecodeGroup(
                rows=rows,
                gather=gather,
                buffer=kv_layer.new_empty(len(gather), block_size * head_dim),
                mask=mask.to(kv_layer.dtype) if fused else mask,
                fused=fused,
            )
        )
    return groups


def _similar(num_blocks: Tensor, block_elements: int) -> list[Tensor | None]:
    """Split sequences by length so that padding never costs more than splitting, and at most about doubles the work.

    `num_blocks` [b] int64. `block_elements`: elements of the keys of one block. Returns the sequences of each group,
    the longest first; None: all in one.
    """
    lens = num_blocks.numpy()  # small arrays cost numpy less
    longest, shortest, count = lens.max(), lens.min(), len(lens)
    if 2 * shortest > longest or count * (longest - shortest) * block_elements <= _GROUP_COST:
        return [None]
    order = np.argsort(-lens, kind="stable")
    lens, followers = lens[order], count - np.arange(count)
    bounds = [0]
    while True:
        longest = lens[bounds[-1]]
        splits = (2 * lens <= longest) & (followers * (longest - lens) * block_elements > _GROUP_COST)
        first = int(splits.argmax())
        if not splits[first]:
            break
        bounds.append(first)
    if len(bounds) == 1:
        return [None]
    return [torch.from_numpy(order[begin:end]) for begin, end in pairwise([*bounds, count])]


def _chunks(step: StepView, attention: Attention, kv_layer: Tensor) -> list[Chunk]:
    _, _, num_kv_heads, block_size, _ = kv_layer.shape
    sequences = range(step.num_decodes, step.num_seqs)
    starts, seq_lens, offsets = (x.tolist() for x in (step.query_start_loc, step.seq_lens, step.block_table_offsets))
    chunks = []
    for i in sequences:
        start, end, seq_len = starts[i], starts[i + 1], seq_lens[i]
        query_position = torch.arange(seq_len - (end - start), seq_len)
        first_block = int(_first_visible(torch.tensor(seq_len), end - start, attention)) // block_size
        distance = query_position[:, None] - torch.arange(first_block * block_size, seq_len)
        causal = end - start == seq_len and (attention.window is None or attention.window >= seq_len)
        masked = _is_fusible(attention) and not causal
        chunks.append(
            Chunk(
                start=start,
                end=end,
                gather=_gather_rows(
                    step.block_table_ids[None, offsets[i] + first_block : offsets[i + 1]], num_kv_heads
                ),
                distance=distance[None],
                mask=_mask(distance[None], attention)[0, 0].to(kv_layer.dtype) if masked else None,
            )
        )
    return chunks


def _is_fusible(attention: Attention) -> bool:
    """Whether a chunk's scores need no more than one mask for all heads."""
    return attention.softcap is None and attention.alibi_slopes is None and not attention.sinks


def _first_visible(seq_lens: Tensor, query_len: int, attention: Attention) -> Tensor:
    """Position of the first key that one of the last `query_len` tokens sees."""
    if attention.window is None:
        return torch.zeros_like(seq_lens)
    return (seq_lens - query_len - attention.window + 1).clamp_min(0)


def _gather_rows(blocks: Tensor, num_kv_heads: int) -> Tensor:
    """Blocks [b, n] -> rows [2 * b * K * n] of [N * 2 * K, B * D], in the order of [2, b, K, n]."""
    key_value_head = torch.arange(2 * num_kv_heads).view(2, 1, num_kv_heads, 1)
    return (blocks.long()[:, None] * (2 * num_kv_heads) + key_value_head).flatten()


def _mask(distance: Tensor, attention: Attention) -> Tensor:
    """What is added to scores at `distance` [b, Q, C] = query position - key position: [b, 1, Q, C] float32.

    With ALiBi [b, K, G * Q, C].
    """
    hidden = distance < 0
    if attention.window is not None:
        hidden |= distance >= attention.window
    mask = torch.zeros(distance.shape).masked_fill_(hidden, float("-inf"))[:, None]
    if attention.alibi_slopes is None:
        return mask
    slopes = torch.tensor(attention.alibi_slopes).view(attention.num_kv_heads, -1, 1, 1)
    return (mask[:, None] - slopes * distance[:, None, None]).flatten(2, 3)


# --- once a layer -----------------------------------------------------------------------------------------------------


def _attend_group(
    query: Tensor, block_rows: Tensor, group: DecodeGroup, attention: Attention, sinks: Tensor | None
) -> Tensor:
    """`query` [b, H, D] -> [b, H, D]."""
    torch.index_select(block_rows, 0, group.gather, out=group.buffer)
    split = (2, len(query), attention.num_kv_heads, group.mask.shape[-1], attention.head_dim)
    key, value = group.buffer.view(split).unbind(0)
    folded = query.reshape(len(query), attention.num_kv_heads, -1, attention.head_dim)
    if group.fused:
        output = functional.scaled_dot_product_attention(folded, key, value, group.mask, scale=attention.scale)
    else:
        output = _attend(folded, key, value, group.mask, attention, sinks)
    return output.reshape(query.shape)


def _attend_chunk(
    query: Tensor, block_rows: Tensor, chunk: Chunk, attention: Attention, sinks: Tensor | None
) -> Tensor:
    """`query` [Q, H, D] -> [Q, H, D]."""
    num_keys = chunk.distance.shape[-1]
    context = block_rows.index_select(0, chunk.gather)
    context = context.view(2, 1, attention.num_kv_heads, -1, attention.head_dim)[:, :, :, :num_keys]
    key, value = context.unbind(0)
    by_head = query.transpose(0, 1)[None]  # [1, H, Q, D]
    if _is_fusible(attention):
        output = functional.scaled_dot_product_attention(
            by_head, key, value, chunk.mask, is_causal=chunk.mask is None, scale=attention.scale, enable_gqa=True
        )
        return output[0].transpose(0, 1)
    tiles = []
    tile = max(1, _TILE_SCORES // (attention.num_heads * num_keys))
    for part, distance in zip(torch.split(by_head, tile, 2), torch.split(chunk.distance, tile, 1), strict=True):
        folded = part.reshape(1, attention.num_kv_heads, -1, attention.head_dim)  # [1, K, G * tile, D]
        mask = _mask(distance, attention)
        if mask.shape[2] != folded.shape[2]:
            mask = mask.repeat(1, 1, folded.shape[2] // mask.shape[2], 1)
        tile_sinks = None if sinks is None else sinks.repeat_interleave(part.shape[2], 1)
        tiles.append(_attend(folded, key, value, mask, attention, tile_sinks).view(part.shape))
    return torch.cat(tiles, 2)[0].transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, attention: Attention, sinks: Tensor | None
) -> Tensor:
    """`query` [b, K, M, D], `key` and `value` [b, K, C, D], `mask` broadcast to [b, K, M, C] -> [b, K, M, D].

    `sinks` [K, M, 1] float32.
    """
    batch = query.shape[0] * query.shape[1]
    scores = _scores(query.reshape(batch, -1, query.shape[3]), key.reshape(batch, -1, key.shape[3]))
    scores = scores.view(*query.shape[:3], -1)
    scale = attention.scale
    if attention.softcap is not None:
        scores = torch.tanh_(scores.mul_(scale / attention.softcap))
        scale = attention.softcap
    scores = torch.add(mask, scores, alpha=scale)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, -1)], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]].to(value.dtype)
    output = torch.bmm(weights.view(batch, *weights.shape[2:]), value.reshape(batch, -1, value.shape[3]))
    return output.view(query.shape)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """`query` [n, M, D] times `key` [n, C, D]: [n, M, C] float32."""
    if query.dtype == torch.float16:  # slow either way, and large scores would overflow
        return torch.bmm(query.float(), key.float().transpose(1, 2))
    key = key.transpose(1, 2)
    scores = torch.bmm(query, key)
    if query.dtype == torch.float32:
        return scores
    # Products are summed in float32, but rounded when stored. What rounding took off comes from a second pass, which is
    # cheaper than to convert all keys.
    lost = torch.baddbmm(scores, query, key, beta=-1)
    return scores.float().add_(lost)
