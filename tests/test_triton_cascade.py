"""Decode attention that reads once what sequences share, against the reference: see `test_triton_attention.py`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pyvllm import placement
from pyvllm.config import EngineArgs
from pyvllm.hub import find_model
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.attention import cascade_kind, paged_attention, plan_attention
from pyvllm.kernels.triton.attention_config import AttentionConfig, CascadeConfig, DecodeConfig
from pyvllm.kernels.triton.kernels import TritonKernels
from pyvllm.kernels.triton.work_list import MAX_SHARED_SLOTS
from pyvllm.models import build_spec
from pyvllm.placement import Layout, load_runner
from pyvllm.step import StepView
from tests.attention_cases import DEVICE, SMALL, Cascade, cascade_buffer, compare_cascades, slopes, spec, view

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_cascade.py holds these on a GPU", allow_module_level=True)

UNCUT = AttentionConfig(decode=SMALL.decode, cascade=CascadeConfig(rows=16, min_tiles=1 << 20))

# Members of several row tiles, sequences in no cascade between them, one that has a single token for itself.
GROUPS = [Cascade(shared=48, own=[1, 20, 5, 33, 1]), Cascade(shared=16, own=[7, 2, 16, 40])]
ALONE = [3, 50]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "config"),
    [(2, 2, SMALL), (4, 2, UNCUT), (3, 1, SMALL), (7, 1, SMALL)],
    ids=["MHA", "uncut", "groups of 3", "MQA"],
)
def test_groups_of_heads(num_heads: int, num_kv_heads: int, config: AttentionConfig) -> None:
    compare_cascades(spec(num_heads, num_kv_heads), GROUPS, ALONE, config=config)


def test_a_group_of_more_heads_than_fit_a_tile() -> None:
    compare_cascades(spec(71, 1, 8), [Cascade(shared=32, own=[1, 18])])


@pytest.mark.parametrize("block_size", [1, 4, 5, 64])
def test_block_sizes(block_size: int) -> None:
    """What is shared is whole blocks, but not always whole tiles."""
    groups = [Cascade(shared=shared // block_size * block_size, own=[1, 30, 9, 4]) for shared in (75, 128, 7)]
    compare_cascades(spec(2, 1), groups, ALONE, block_size=block_size)


def test_half_precision() -> None:
    compare_cascades(spec(2, 1), GROUPS, ALONE, dtype=torch.float16)


@pytest.mark.parametrize(
    "feature",
    [
        {"softcap": 1.5},
        {"alibi_slopes": slopes(2)},
        {"scale": 4.0},
        {"sinks": True},
        {"softcap": 3.0, "alibi_slopes": slopes(2)},
    ],
    ids=["softcap", "alibi", "scores far from zero", "sinks", "all"],
)
def test_features(feature: dict) -> None:
    compare_cascades(replace(spec(2, 1), **feature), GROUPS, ALONE)


def test_head_sizes_that_are_no_powers_of_two() -> None:
    compare_cascades(spec(2, 1, 24), GROUPS[:1])


def test_sequences_are_cut_beside_what_they_share() -> None:
    compare_cascades(spec(2, 1), [Cascade(shared=32, own=[150, 3, 1, 90])], ALONE)


def test_padding_and_prefills_beside_cascades() -> None:
    compare_cascades(spec(2, 1), GROUPS, ALONE, pad_to=16)
    compare_cascades(spec(2, 1), GROUPS, ALONE, prefills=[(16, 5), (0, 2)])


def test_layers_share_a_plan() -> None:
    compare_cascades(spec(2, 1), GROUPS, ALONE, layers=2)


def test_a_window_turns_cascades_off() -> None:
    plan = compare_cascades(replace(spec(2, 1), window=20), GROUPS[1:])
    assert plan.decode is not None
    assert plan.decode.cascade is None


@pytest.mark.parametrize("small", [True, False])
def test_groupings_are_read_from_the_device_alone(small: bool) -> None:
    """As when a captured graph is replayed: the host knows one step's header, the buffer holds another's words."""
    torch.manual_seed(0)
    attention, num_blocks, graph_size = spec(2, 1), 60, 12
    first = cascade_buffer([Cascade(shared=16, own=[1] * (4 if small else 12))], [], 16, num_blocks, pad_to=graph_size)
    buffer = torch.zeros(len(first) + 4 * num_blocks, dtype=torch.int32)
    kv_layer = torch.randn(num_blocks, 2, 1, 16, 16, device=DEVICE)
    query = torch.randn(graph_size, 2, 16, device=DEVICE)
    reference = ReferenceKernels()
    for groups, alone in [([Cascade(shared=320, own=[5, 1])], [9]), (GROUPS, ALONE), ([], [70, 3])]:
        words = cascade_buffer(groups, alone, 16, num_blocks, pad_to=graph_size)
        buffer[: len(words)] = torch.from_numpy(words)
        step = StepView(buffer.to(DEVICE), view(first)._header)
        assert cascade_kind(step) == (1 if small else 2)
        plan = plan_attention(step, attention, kv_layer, SMALL)
        output = paged_attention(query, kv_layer, plan)
        expected = reference.paged_attention(query, kv_layer, reference.plan(view(words), attention, kv_layer))
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("disabled", [False, True])
def test_an_engine_has_cascades_unless_told_otherwise(
    disabled: bool, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = EngineArgs(model=str(tiny_llama), disable_cascade_attn=disabled, num_gpu_blocks_override=200)
    files = find_model(args)

    def layout() -> Layout:
        return load_runner(args, files, build_spec(files.config), torch.float32, torch.device("cpu"))[1]

    assert layout().cascade_tokens == 0, "the CPU's kernels gain nothing"
    monkeypatch.setattr(placement, "select", lambda device, dtype: TritonKernels())
    assert (layout().cascade_tokens > 0) == (not disabled)


# --- work lists -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("programs", [1, 40])
def test_items_cover_what_each_member_shares_once(programs: int) -> None:
    """Tiles of each member, and the slots that its first decode item starts from; several blocks of sequences."""
    torch.manual_seed(0)
    groups = [Cascade(shared=16 * (1 + i % 5), own=[1] * (4 + 7 * i)) for i in range(14)]
    groups.insert(3, Cascade(shared=0, own=[2] * 4))
    groups.append(Cascade(shared=16 * 30, own=[1] * 3))
    config = AttentionConfig(
        decode=DecodeConfig(max_tile=16), cascade=CascadeConfig(rows=16, programs_per_sm=programs, min_tiles=1)
    )
    words = cascade_buffer(groups, [3, 50], 16, 4000, pad_to=800)
    step = view(words)
    decode = plan_attention(step, spec(2, 1), torch.empty(1, 2, 1, 16, 16, device=DEVICE), config).decode
    assert decode is not None
    assert decode.cascade is not None
    cascade = decode.cascade
    tiles_of = dict.fromkeys(range(800), 0)
    starts = step.cascade_offsets.tolist()
    members = step.cascade_seqs.tolist()
    for i, blocks in enumerate(step.cascade_blocks.tolist()):
        tiles_of |= dict.fromkeys(members[starts[i] : starts[i + 1]], blocks)
    spans: dict[int, list[tuple[int, int, int]]] = {seq: [] for seq in range(800)}
    table_offsets = step.block_table_offsets.tolist()
    items = cascade.items[: int(cascade.num_items)].tolist()
    assert len(items) <= len(cascade.items)
    for place, count, table, first_tile, last_tile, slot, stride, _ in items:
        assert table == table_offsets[members[place]]
        assert 1 <= count <= 8
        for member in range(count):
            spans[members[place + member]].append((first_tile, last_tile, slot + member * stride))
    used: list[int] = []
    for seq, (own_tile, packed) in enumerate(cascade.shared.tolist()):
        assert own_tile == tiles_of[seq]
        bounds = [0] + [last for _, last, _ in spans[seq]]
        assert bounds[-1] == own_tile
        assert [first for first, _, _ in spans[seq]] == bounds[:-1]
        assert all(begin < end for begin, end in pairwise(bounds))
        first_slot, slots = divmod(packed, MAX_SHARED_SLOTS.value)
        assert [slot for _, _, slot in spans[seq]] == list(range(first_slot, first_slot + slots))
        used += range(first_slot, first_slot + slots)
    assert sorted(used) == list(range(len(used)))
    assert len(used) <= len(cascade.stats)
    assert any(stride > 1 for *_, stride, _ in items) == (programs > 1)
    own_items = decode.items[: int(decode.num_items)].tolist()
    starts_from = {item[0]: item[7] for item in own_items if item[5] == 0}
    assert starts_from == {seq: packed for seq, (_, packed) in enumerate(cascade.shared.tolist())}
    assert all(item[7] == 0 for item in own_items if item[5] > 0)
