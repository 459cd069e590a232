"""Paged attention in Triton against the reference, on the CPU in Triton's interpreter. `tests/gpu/test_attention.py`:
the same on a GPU.

No bfloat16: the interpreter computes it wrongly.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.attention import AttentionPlan, paged_attention, plan_attention
from pyvllm.step import StepView
from tests.attention_cases import DEVICE, MIXED, SMALL, UNSPLIT, compare, features, spec, step_buffer, view

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_attention.py holds these on a GPU", allow_module_level=True)

DECODES = [(start, 1) for start in (36, 0, 7, 70, 15, 16, 31)]

FEATURES = features(6, 3.0)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    compare(spec(2, 1, head_dim), [(20, 1), (0, 1), (11, 9)])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (9, 3), (8, 2), (5, 1)])
def test_groups(num_heads: int, num_kv_heads: int) -> None:
    compare(spec(num_heads, num_kv_heads))


def test_a_group_of_more_heads_than_fit_a_tile() -> None:
    compare(spec(71, 1, 8), [(36, 1), (11, 3)])


@pytest.mark.parametrize("lens", [DECODES, MIXED[4:]], ids=["decodes", "prefills"])
@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_block_sizes(block_size: int, lens: list[tuple[int, int]]) -> None:
    compare(spec(2, 1), lens, block_size=block_size)


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str) -> None:
    compare(replace(spec(6, 2), **FEATURES[feature]))


@pytest.mark.parametrize("feature", ["scale", "all"])
def test_half_precision(feature: str) -> None:
    compare(replace(spec(6, 2), **FEATURES[feature]), dtype=torch.float16)


@pytest.mark.parametrize("feature", FEATURES)
def test_unsplit_decodes(feature: str) -> None:
    compare(replace(spec(6, 2), **FEATURES[feature]), DECODES, config=UNSPLIT)


def test_scores_far_from_zero() -> None:
    compare(replace(spec(), scale=4.0))


def test_layers_share_a_plan() -> None:
    """What counts arrivals of parts must be as new for each layer."""
    compare(spec(), DECODES, layers=2)


def test_padding_gives_zeros_and_is_not_written() -> None:
    compare(spec(), DECODES[:3], pad_to=5)
    compare(spec(), [], pad_to=2)


@pytest.mark.parametrize("window", [None, 20])
def test_lengths_are_read_from_the_device_alone(window: int | None) -> None:
    """As when a captured graph is replayed: the host knows an empty step's header, the buffer holds another's words."""
    torch.manual_seed(0)
    attention, num_blocks, graph_size = replace(spec(2, 1), window=window), 40, 6
    empty = step_buffer([], 16, num_blocks, pad_to=graph_size)
    buffer = torch.zeros(len(empty) + 4 * num_blocks, dtype=torch.int32)
    kv_layer = torch.randn(num_blocks, 2, 1, 16, 16, device=DEVICE)
    query = torch.randn(graph_size, 2, 16, device=DEVICE)
    reference = ReferenceKernels()
    for lens in ([], [(500, 1)], DECODES[:5]):
        words = step_buffer(lens, 16, num_blocks, pad_to=graph_size)
        buffer[: len(words)] = torch.from_numpy(words)
        step = StepView(buffer.to(DEVICE), empty.tolist())
        output = paged_attention(query, kv_layer, plan_attention(step, attention, kv_layer, SMALL))
        expected = reference.paged_attention(query, kv_layer, reference.plan(view(words), attention, kv_layer))
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_a_scale_that_is_not_positive_is_refused() -> None:
    step = view(step_buffer([(3, 1)], 4, 1))
    with pytest.raises(ValueError, match=r"attention.scale is 0.0; it must be positive"):
        plan_attention(step, replace(spec(), scale=0.0), torch.empty(1, 2, 2, 4, 16, device=DEVICE))


def test_kv_memory_that_is_not_contiguous_is_refused() -> None:
    step = view(step_buffer([(3, 1)], 4, 1))
    with pytest.raises(ValueError, match=r"kv_layer has strides \(.*\); it must be contiguous"):
        plan_attention(step, spec(), torch.empty(1, 2, 4, 2, 16, device=DEVICE).transpose(2, 3))


# --- work lists -------------------------------------------------------------------------------------------------------


def plan_of(lens: list[tuple[int, int]], window: int | None = None, pad_to: int = 0) -> AttentionPlan:
    torch.manual_seed(0)
    step = view(step_buffer(lens, 16, sum(start // 16 + num_query for start, num_query in lens), pad_to))
    return plan_attention(step, replace(spec(2, 1), window=window), torch.empty(1, 2, 1, 16, 16, device=DEVICE), SMALL)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_seqs", [1, 5, 1500])
def test_decode_items_cover_each_visible_tile_once(num_seqs: int, window: int | None) -> None:
    lens = [(start, 1) for start in torch.randint(0, 100, (num_seqs,)).tolist()]
    lens[-1] = (3000, 1)
    decode = plan_of(lens, window, pad_to=num_seqs + 3).decode
    assert decode is not None
    items = decode.items[: int(decode.num_items)].tolist()
    by_seq: dict[int, list[list[int]]] = {}
    for item in items:
        by_seq.setdefault(item[0], []).append(item)
    assert sorted(by_seq) == list(range(num_seqs + 3))
    for seq, own in by_seq.items():
        seq_len = lens[seq][0] + 1 if seq < num_seqs else 0
        first = max(seq_len - window, 0) // 16 if window else 0
        assert [item[1] for item in own] == [seq_len] * len(own)
        bounds = [own[0][3], *(item[4] for item in own)]
        assert (bounds[0], bounds[-1]) == (first, -(-seq_len // 16))
        assert [item[3] for item in own] == bounds[:-1]
        assert all(begin < end for begin, end in pairwise(bounds)) or seq_len == 0
        assert [item[5:7] for item in own] == [[i, len(own)] for i in range(len(own))]
    split = [item[6] > 1 for item in items]
    assert split == sorted(split, reverse=True), "slots of partial results are counted from the first item"
    assert sum(split) <= len(decode.partial_stats)
    assert len(items) <= len(decode.items)
    sizes = [item[4] - item[3] for item in items if item[6] == 1]
    assert all(2 * later < 4 * size or later <= 1 for size, later in pairwise(sizes))


def test_a_single_long_sequence_is_split_over_the_device() -> None:
    decode = plan_of([(3000, 1)]).decode
    assert decode is not None
    assert int(decode.num_items) == SMALL.decode.programs_per_sm


@pytest.mark.parametrize("num_seqs", [1, 2, 40])
def test_prefill_items_cover_each_token_once_and_the_longest_come_first(num_seqs: int) -> None:
    lens = [(start, 2 + start % 37) for start in torch.randint(0, 500, (num_seqs,)).tolist()]
    lens.insert(0, (9, 1))
    prefill = plan_of(lens).prefill
    assert prefill is not None
    items = prefill.items[: int(prefill.num_items), :3].tolist()
    covered = sorted((token + i, position + i) for token, tokens, position in items for i in range(tokens))
    positions = [start + i for start, num_query in lens for i in range(num_query)]
    assert covered == list(enumerate(positions))[1:]
    keys = [position + tokens for _, tokens, position in items]
    longest = max(keys)
    assert all(later <= earlier + longest // 16 + 1 for earlier, later in pairwise(keys))


def test_an_output_is_made_for_queries_of_any_stride() -> None:
    torch.manual_seed(0)
    plan = plan_of(MIXED)
    kv_layer = torch.randn(200, 2, 1, 16, 16, device=DEVICE)
    query = torch.randn(2, sum(num_query for _, num_query in MIXED), 16, device=DEVICE).transpose(0, 1)
    torch.testing.assert_close(
        paged_attention(query, kv_layer, plan), paged_attention(query.contiguous(), kv_layer, plan), atol=0, rtol=0
    )
