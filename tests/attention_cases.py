"""Comparing the paged attention of `pyvllm.kernels.triton` with the reference, in the interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pyvllm.kernels import Attention
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.attention import AttentionPlan, paged_attention, plan_attention, write_kv
from pyvllm.kernels.triton.attention_config import AttentionConfig, CascadeConfig, DecodeConfig, PrefillConfig
from pyvllm.step import HEADER_LEN, Header, StepView
from tests.plans import Entry, plan_buffer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Without a GPU Triton interprets."""

SMALL = AttentionConfig(
    decode=DecodeConfig(programs_per_sm=16, min_tiles=1, max_tile=16),
    prefill=PrefillConfig(rows=16, max_tile=16),
    cascade=CascadeConfig(rows=16, programs_per_sm=8, min_tiles=1),
)
"""Cuts even short sequences in several pieces, on a device of one processor."""
UNSPLIT = AttentionConfig(decode=DecodeConfig(min_tiles=1 << 20, max_tile=16), prefill=SMALL.prefill)

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def tolerance_of(dtype: torch.dtype, max_seq_len: int) -> float:
    """In float32 the largest of thousands of scores is some 40 at a scale of 0.7, known to its last bits of 4e-6, and
    weights are no better; sums in another order add to that. Products in TF32 would err by 1e-2. Other types round more
    than all this.
    """
    return 1e-4 if dtype == torch.float32 and max_seq_len > 1000 else TOLERANCES[dtype]


MIXED = [(0, 1), (36, 1), (7, 1), (70, 1), (0, 5), (16, 16), (3, 30), (0, 2)]
"""Of each sequence (tokens that have KV, query tokens)."""


def slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's for powers of two."""
    return tuple(2.0 ** (-8 * (i + 1) / num_heads) for i in range(num_heads))


def spec(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16) -> Attention:
    """Plain attention."""
    return Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


def features(num_heads: int, softcap: float) -> dict[str, dict[str, Any]]:
    """Name -> what to replace in a plain `Attention`."""
    alibi = {"alibi_slopes": slopes(num_heads)}
    return {
        "window": {"window": 21},
        "window of one": {"window": 1},
        "window longer than any text": {"window": 1 << 20},
        "softcap": {"softcap": softcap / 2},
        "alibi": alibi,
        "scale": {"scale": 0.7},
        "sinks": {"sinks": True},
        "sinks in a window": {"sinks": True, "window": 9},
        "all": {"window": 9, "softcap": softcap, "scale": 0.3, **alibi},
    }


def step_buffer(lens: Sequence[tuple[int, int]], block_size: int, num_blocks: int, pad_to: int = 0) -> NDArray:
    """A plan of sequences like those of `MIXED`, whose blocks are strewn over the pool."""
    free = torch.randperm(num_blocks).tolist()
    entries = []
    for start, num_query in lens:
        blocks = [free.pop() for _ in range(-(-(start + num_query) // block_size))]
        entries.append(Entry(token_ids=[0] * num_query, start=start, blocks=blocks))
    return plan_buffer(entries, block_size=block_size, pad_to=pad_to)


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """Sequences whose block tables begin alike."""

    shared: int
    """Tokens, whole blocks."""
    own: Sequence[int]
    """Tokens that each has for itself, with the step's."""


def cascade_buffer(
    groups: Sequence[Cascade],
    alone: Sequence[int],
    block_size: int,
    num_blocks: int,
    *,
    pad_to: int = 0,
    prefills: Sequence[tuple[int, int]] = (),
) -> NDArray:
    """A plan of sequences with one query token, in random order, and of `prefills` like those of `MIXED`.

    `alone`: tokens of sequences in no cascade.
    """
    free = torch.randperm(num_blocks).tolist()

    def entry(start: int, num_query: int, shared: Sequence[int] = ()) -> Entry:
        new = -(-(start + num_query) // block_size) - len(shared)
        return Entry(token_ids=[0] * num_query, start=start, blocks=[*shared, *(free.pop() for _ in range(new))])

    decodes = [(-1, entry(own - 1, 1)) for own in alone]
    for i, group in enumerate(groups):
        shared = [free.pop() for _ in range(group.shared // block_size)]
        decodes += [(i, entry(group.shared + own - 1, 1, shared)) for own in group.own]
    decodes = [decodes[i] for i in torch.randperm(len(decodes)).tolist()]
    members = [[seq for seq, (of, _) in enumerate(decodes) if of == i] for i in range(len(groups))]
    num_seqs = max(len(decodes) + len(prefills), pad_to)
    offsets = list(accumulate(map(len, members), initial=0))
    sections = {
        "cascade_seqs": [*chain(*members), *[0] * (num_seqs - offsets[-1])],
        "cascade_offsets": offsets + [offsets[-1]] * (num_seqs + 1 - len(offsets)),
        "cascade_blocks": [group.shared // block_size for group in groups] + [0] * (num_seqs - len(groups)),
    }
    entries = [sequence for _, sequence in decodes] + [entry(*lens) for lens in prefills]
    buffer = plan_buffer(entries, block_size=block_size, pad_to=pad_to, sections=sections)
    buffer[Header.NUM_CASCADES] = len(groups)
    return buffer


def view(buffer: NDArray) -> StepView:
    """The buffer as a runner on `DEVICE` sees it."""
    return StepView(torch.from_numpy(buffer).to(DEVICE), buffer[:HEADER_LEN].tolist())


def blocks_for(lens: Sequence[tuple[int, int]], block_size: int) -> int:
    """Blocks of a pool that holds these sequences and two more blocks."""
    return sum(-(-(start + num_query) // block_size) for start, num_query in lens) + 2


def used_kv(step: StepView, attention: Attention, num_blocks: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """KV memory [N, 2, K, B, D] with numbers where the step's sequences have tokens, and NaN elsewhere."""
    shape = (num_blocks, 2, attention.num_kv_heads, block_size, attention.head_dim)
    kv_layer = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    offsets, seq_lens = step.block_table_offsets.tolist(), step.seq_lens.tolist()
    for i in range(step.num_seqs):
        blocks = step.block_table_ids[offsets[i] : offsets[i + 1]].long()
        used = torch.randn(len(blocks), *shape[1:], device=DEVICE).to(dtype)
        used[-1, :, :, seq_lens[i] - (len(blocks) - 1) * block_size :] = float("nan")
        kv_layer[blocks] = used
    return kv_layer


def compare(
    attention: Attention,
    lens: Sequence[tuple[int, int]] = MIXED,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    config: AttentionConfig | None = SMALL,
    pad_to: int = 0,
    layers: int = 1,
) -> None:
    """Write a step's KV and attend: KV memory must be that of the reference, and so must be output up to rounding.

    `config`: None for what suits the device. `layers`: how often, with one plan.
    """
    torch.manual_seed(0)
    num_blocks = blocks_for(lens, block_size)
    buffer = step_buffer(lens, block_size, num_blocks, pad_to)
    compare_step(buffer, attention, num_blocks, block_size, dtype=dtype, config=config, layers=layers)


def compare_cascades(
    attention: Attention,
    groups: Sequence[Cascade],
    alone: Sequence[int] = (),
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    config: AttentionConfig | None = SMALL,
    pad_to: int = 0,
    prefills: Sequence[tuple[int, int]] = (),
    layers: int = 1,
) -> AttentionPlan:
    """As `compare`, for a step of `cascade_buffer`; returns its plan."""
    torch.manual_seed(0)
    lens = [(group.shared + own, 0) for group in groups for own in group.own] + [(own, 0) for own in alone]
    num_blocks = blocks_for([*lens, *prefills], block_size)
    buffer = cascade_buffer(groups, alone, block_size, num_blocks, pad_to=pad_to, prefills=prefills)
    return compare_step(buffer, attention, num_blocks, block_size, dtype=dtype, config=config, layers=layers)


def compare_step(
    buffer: NDArray,
    attention: Attention,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    config: AttentionConfig | None,
    layers: int,
) -> AttentionPlan:
    """As `compare`, for a plan's buffer; returns what was prepared of it."""
    step = view(buffer)
    plan = plan_attention(step, attention, used_kv(step, attention, num_blocks, block_size, dtype), config)
    reference = ReferenceKernels()
    reference_plan = reference.plan(step, attention, torch.empty(0, 2, 1, block_size, 1))
    for _ in range(layers):
        kv_layer = used_kv(step, attention, num_blocks, block_size, dtype)
        expected_kv = kv_layer.clone()
        num_tokens = len(step.token_ids)
        # As after one product for queries, keys and values: rows of each lie apart.
        qkv = torch.randn(
            num_tokens, attention.num_heads + 2 * attention.num_kv_heads, attention.head_dim, device=DEVICE
        ).to(dtype)
        query = qkv[:, : attention.num_heads]
        key_value = qkv[:, attention.num_heads :].view(num_tokens, 2, attention.num_kv_heads, -1)
        write_kv(kv_layer, key_value, plan)
        reference.write_kv(expected_kv, key_value, reference_plan)
        torch.testing.assert_close(kv_layer, expected_kv, atol=0, rtol=0, equal_nan=True)
        # As large as the sum of many keys, or as nothing.
        sinks = torch.randn(attention.num_heads, device=DEVICE).mul(4).to(dtype) if attention.sinks else None
        output = paged_attention(query, kv_layer, plan, sinks)
        assert plan.decode is None or not plan.decode.counters.any(), "the next layer counts from 0"
        if sinks is None:
            expected = reference.paged_attention(query, kv_layer, reference_plan)
        else:
            expected = reference.paged_attention_with_sinks(query, kv_layer, reference_plan, sinks)
        tolerance = tolerance_of(dtype, step.max_seq_len)
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    return plan
