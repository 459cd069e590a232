"""Decode attention in CUDA C++ on a Hopper GPU, against the reference."""

from dataclasses import replace

import pytest
import torch

from pyvllm.cuda_graph import Graphs
from pyvllm.kernels.cuda.decode import decode_attention, fused_decode_attention
from pyvllm.kernels.triton.attention import paged_attention, plan_attention
from pyvllm.kernels.triton.attention_config import AttentionConfig, DecodeConfig
from pyvllm.step import HEADER_LEN, StepView
from tests import decode_cases
from tests.attention_cases import DEVICE, blocks_for, spec, step_buffer, used_kv, view
from tests.decode_cases import DecodeCase

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)

_LLAMA = spec(32, 8, 128)
_QWEN = spec(16, 8, 128)
LARGE = [
    DecodeCase(name="1 of 1k", attention=_LLAMA, lens=[1023], block_size=64, config=DecodeConfig()),
    DecodeCase(name="1 of 30k", attention=_LLAMA, lens=[30000], block_size=64, config=DecodeConfig()),
    DecodeCase(name="32 of 4k", attention=_QWEN, lens=[4000] * 32, block_size=16, config=DecodeConfig()),
    DecodeCase(name="uneven", attention=_LLAMA, lens=[1, 20000, *range(3, 2000, 37)], block_size=64, pad_to=64),
]


@pytest.mark.parametrize("case", [*decode_cases.CASES, *LARGE], ids=lambda case: case.name)
def test_decode_attention_equals_the_reference(case: DecodeCase) -> None:
    decode_cases.compare(case, decode_attention)


@pytest.mark.parametrize("case", decode_cases.FUSED_CASES, ids=lambda case: case.name)
def test_fused_decode_attention_equals_the_reference(case: DecodeCase) -> None:
    decode_cases.compare_fused(case, fused_decode_attention)


def test_splits_arrive_in_any_order_and_give_the_same_bits() -> None:
    lens = [(5000, 1)] * 3
    num_blocks = blocks_for(lens, 64)
    step = view(step_buffer(lens, 64, num_blocks))
    kv_layer = used_kv(step, _LLAMA, num_blocks, 64, torch.bfloat16)
    plan = plan_attention(step, _LLAMA, kv_layer)
    query = torch.randn(3, 32, 128, device="cuda", dtype=torch.bfloat16)
    outputs = []
    for _ in range(30):
        outputs.append(query.new_full((3, 32 * 128), float("nan")))
        decode_attention(query, kv_layer, outputs[-1], plan)
    assert all(torch.equal(outputs[0], output) for output in outputs)


def test_a_captured_graph_serves_other_lengths() -> None:
    """The plan is made on the device, so replaying it and the kernel follows the lengths in the buffer."""
    attention = replace(_LLAMA, window=700)
    lens = [(n, 1) for n in (900, 30, 2000)]
    others = [(n, 1) for n in (1999, 900, 31)]
    num_blocks = blocks_for(lens, 64) + 8
    buffers = [torch.from_numpy(step_buffer(x, 64, num_blocks, pad_to=4)) for x in (lens, others)]
    size = max(len(buffer) for buffer in buffers)
    live = torch.zeros(size, dtype=torch.int32, device="cuda")
    live[: len(buffers[0])] = buffers[0].cuda()
    step = StepView(live, buffers[0][:HEADER_LEN].tolist())
    kv_layer = torch.randn(num_blocks, 2, 8, 64, 128, device="cuda").bfloat16()
    query = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
    output = torch.zeros(4, 32 * 128, device="cuda", dtype=torch.bfloat16)
    config = AttentionConfig(decode=DecodeConfig(min_tiles=1))

    def run() -> None:
        decode_attention(query, kv_layer, output, plan_attention(step, attention, kv_layer, config))

    graphs: Graphs[None] = Graphs(DEVICE)
    graphs.run("step", run)
    for buffer in (*buffers, buffers[0]):
        live[: len(buffer)] = buffer.cuda()
        output.fill_(float("nan"))
        graphs.run("step", run)
        own = view(buffer.numpy())
        expected = paged_attention(query, kv_layer, plan_attention(own, attention, kv_layer))
        torch.testing.assert_close(output[:3], expected[:3], atol=1e-2, rtol=1e-2)
