"""Decode attention in CUDA C++ beside its twin in Triton on one GPU, in one run.

A CUDA graph of one launch for each of enough layers of KV memory that no cache can serve them is replayed; the time of
a launch is the graph's by their number. `python -m benches.kernels.cuda_decode [--sweep]`
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from benches.kernels.timing import Row, memory_row, print_rows, time_chain
from pyvllm.kernels.cuda.decode import decode_attention
from pyvllm.kernels.interface import Attention
from pyvllm.kernels.triton.attention import paged_attention, plan_attention
from pyvllm.kernels.triton.attention_config import AttentionConfig, DecodeConfig
from tests.attention_cases import step_buffer, view

_BYTES: Final = 400 * 2**20
_MAX_LAYERS: Final = 60


def _attention(num_heads: int, num_kv_heads: int) -> Attention:
    return Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, scale=128**-0.5)


LLAMA: Final = _attention(32, 8)
QWEN: Final = _attention(16, 8)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One batch of sequences of one query token each."""

    name: str
    attention: Attention
    lens: Sequence[int]
    block_size: int = 64


def shapes() -> list[Shape]:
    """Uniform lengths of Llama-3-8B, whose times other kernels have published, and skewed ones like ShareGPT's."""
    uniform = [(1, 1), (1, 4), (1, 16), (1, 32), (8, 1), (8, 4), (8, 16), (32, 4)]
    generator = random.Random(0)
    skewed = [min(4000, int(generator.lognormvariate(5.5, 1.0)) + 1) for _ in range(256)]
    return [
        *(Shape(name=f"8b {n}x{k}k", attention=LLAMA, lens=[1024 * k] * n) for n, k in uniform),
        Shape(name="8b 8x1k block 16", attention=LLAMA, lens=[1024] * 8, block_size=16),
        Shape(name="8b 64 skewed", attention=LLAMA, lens=skewed[:64]),
        Shape(name="8b 256 skewed", attention=LLAMA, lens=skewed),
        Shape(name="0.6b 1x512", attention=QWEN, lens=[512]),
        Shape(name="0.6b 256 skewed", attention=QWEN, lens=skewed),
    ]


def cases() -> list[Row]:
    """One line for each shape: µs, rate of reading KV and share of the peak, of ours and of the twin."""
    return [_case(shape, DecodeConfig()) for shape in shapes()]


def sweep() -> list[Row]:
    """The same with other ways to cut sequences."""
    rows = []
    for programs in (1, 2, 3, 4):
        for min_tiles in (1, 2, 4):
            config = DecodeConfig(programs_per_sm=programs, min_tiles=min_tiles)
            rows += [_case(shape, config) | {"programs": programs, "min_tiles": min_tiles} for shape in shapes()]
    return rows


def _case(shape: Shape, config: DecodeConfig) -> Row:
    torch.manual_seed(0)
    attention, block_size = shape.attention, shape.block_size
    num_blocks = sum(-(-length // block_size) for length in shape.lens)
    memory = (num_blocks, 2, attention.num_kv_heads, block_size, attention.head_dim)
    read_bytes = 4 * sum(shape.lens) * attention.num_kv_heads * attention.head_dim
    num_layers = max(2, min(_MAX_LAYERS, -(-_BYTES // read_bytes)))
    layers = [torch.randn(memory, device="cuda", dtype=torch.bfloat16) for _ in range(num_layers)]
    step = view(step_buffer([(length - 1, 1) for length in shape.lens], block_size, num_blocks))
    plan = plan_attention(step, attention, layers[0], AttentionConfig(decode=config))
    query = torch.randn(len(shape.lens), attention.num_heads, 128, device="cuda", dtype=torch.bfloat16)
    output = query.new_empty(len(query), attention.num_heads * 128)
    ours = time_chain([partial(decode_attention, query, layer, output, plan) for layer in layers])
    twin = time_chain([partial(paged_attention, query, layer, plan) for layer in layers])
    row = memory_row(shape.name, f"{read_bytes * 1e-6:.1f} MB", read_bytes, ours)
    return row | {"triton_us": round(twin, 2), "triton_over_ours": round(twin / ours, 3)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other ways to cut sequences")
    print_rows(sweep() if parser.parse_args().sweep else cases())
