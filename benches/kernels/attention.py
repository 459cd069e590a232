"""Paged attention in Triton on one GPU: µs of a layer, and the share of what memory or tensor cores allow. For prefill
on Hopper also µs and rate of the kernel in CUDA C++.

A CUDA graph of a step's layers is replayed, each with KV memory of its own, enough of them that no cache can serve
them; a layer's time is the graph's by their number, so gaps between kernels count.

`python -m benches.kernels.attention [--sweep decode|prefill|cascade] [--only TEXT]`
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

import numpy as np
import torch

from benches.kernels.timing import PEAK_TB_PER_S, Row, time_chain
from pyvllm.kernels import Attention
from pyvllm.kernels.cuda.kernels import reason_against
from pyvllm.kernels.cuda.prefill import prefill_attention
from pyvllm.kernels.triton.attention import paged_attention, plan_attention
from pyvllm.kernels.triton.attention_config import AttentionConfig, CascadeConfig, DecodeConfig, PrefillConfig
from pyvllm.step import HEADER_LEN, StepView
from tests.attention_cases import Cascade, cascade_buffer
from tests.plans import Entry, plan_buffer

PEAK_TFLOP_PER_S: Final = 790
"""Of one H200, measured by a large product in bfloat16."""
# Several times the 60 MB of a level 2 cache.
_BYTES: Final = 400 * 2**20
_MAX_LAYERS: Final = 64
_BLOCK_SIZE: Final = 64
_HEAD_DIM: Final = 128

Lens = list[tuple[int, int]]
"""Of each sequence (tokens that have KV, query tokens)."""


def _decodes() -> dict[str, Lens]:
    shapes = [(1, 1), (1, 4), (1, 16), (1, 32), (8, 1), (8, 4), (8, 16), (8, 32)]
    named = {f"decode {batch}x{k}k": [(1024 * k - 1, 1)] * batch for batch, k in shapes}
    for batch, context in [(64, 512), (256, 512), (256, 1024), (1024, 512)]:
        named[f"decode {batch}x{context}"] = [(context - 1, 1)] * batch
    lengths = np.random.default_rng(0).lognormal(6, 1, 256).clip(16, 8192).astype(int)
    named["decode 256 log-normal"] = [(int(length), 1) for length in lengths]
    named["decode 1x32k + 63x512"] = [(511, 1)] * 63 + [(32767, 1)]
    return named


def _prefills() -> dict[str, Lens]:
    return {f"prefill {batch}x{n}": [(0, n)] * batch for batch, n in [(64, 128), (8, 1024), (2, 4096), (1, 8192)]}


def _cascades() -> dict[str, list[Cascade]]:
    """Many questions on few documents, samples of many prompts, few questions on a long document."""
    return {
        "cascade 4x128, 1024+64": [Cascade(shared=1024, own=[64] * 128)] * 4,
        "cascade 250x4, 192+123": [Cascade(shared=192, own=[123] * 4)] * 250,
        "cascade 1x8, 32k+100": [Cascade(shared=32768, own=[100] * 8)],
    }


CASCADES: Final = _cascades()
CASES: Final[dict[str, Lens]] = {
    **_decodes(),
    **_prefills(),
    **{
        name: [(group.shared + own - 1, 1) for group in groups for own in group.own]
        for name, groups in CASCADES.items()
    },
}
HEADS: Final = [(32, 8), (16, 8)]
"""Query heads and KV heads, of 128 dimensions."""


def cases(config: AttentionConfig | None = None, only: str = "") -> list[Row]:
    """One line for each of `CASES` whose name contains `only`, and each of `HEADS`."""
    return [
        Bench(name, num_heads, num_kv_heads).row(config)
        for num_heads, num_kv_heads in HEADS
        for name in CASES
        if only in name
    ]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a layer must move or compute at least."""

    amount: float
    """Bytes or operations."""
    peak: float
    """Of them in a µs."""


class Bench:
    """One of `CASES` with its memory."""

    def __init__(self, name: str, num_heads: int, num_kv_heads: int) -> None:
        self.name, self.lens = name, CASES[name]
        groups = CASCADES.get(name, [])
        self.saved = sum(group.shared * (len(group.own) - 1) for group in groups)
        """Keys that are read once for several sequences."""
        self.attention = Attention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=_HEAD_DIM, scale=_HEAD_DIM**-0.5
        )
        num_blocks = sum(-(-(start + count) // _BLOCK_SIZE) for start, count in self.lens) - self.saved // _BLOCK_SIZE
        layer_bytes = num_blocks * 2 * num_kv_heads * _BLOCK_SIZE * _HEAD_DIM * 2
        num_layers = min(max(_BYTES // layer_bytes, 2), _MAX_LAYERS)
        shape = (num_layers, num_blocks, 2, num_kv_heads, _BLOCK_SIZE, _HEAD_DIM)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.step = _cascade_step(groups, num_blocks) if groups else _step(self.lens, num_blocks)
        num_tokens = self.step.num_tokens
        self.query = torch.randn(num_tokens, num_heads, _HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def limit(self) -> Limit:
        """Decode is bound by the bytes of keys and values, prefill by the two products at visible places."""
        if self.step.max_query_len == 1:
            tokens = sum(start + 1 for start, _ in self.lens) - self.saved
            return Limit(amount=tokens * 4 * self.attention.num_kv_heads * _HEAD_DIM, peak=PEAK_TB_PER_S * 1e6)
        pairs = sum(start * count + count * (count + 1) // 2 for start, count in self.lens)
        return Limit(amount=pairs * 4 * self.attention.num_heads * _HEAD_DIM, peak=PEAK_TFLOP_PER_S * 1e6)

    def time(self, config: AttentionConfig | None) -> float:
        """µs of a layer."""
        plan = plan_attention(self.step, self.attention, self.pool[0], config)
        return time_chain([partial(paged_attention, self.query, layer, plan) for layer in self.pool])

    def cuda_time(self) -> float:
        """µs of a layer's prefill attention in CUDA C++."""
        plan = plan_attention(self.step, self.attention, self.pool[0])
        output = self.query.new_empty(len(self.query), self.attention.num_heads * _HEAD_DIM)
        return time_chain([partial(prefill_attention, self.query, layer, output, plan) for layer in self.pool])

    def plan_time(self, config: AttentionConfig | None) -> float:
        """µs of preparing a step."""
        return time_chain([partial(plan_attention, self.step, self.attention, self.pool[0], config)] * 20)

    def row(self, config: AttentionConfig | None) -> Row:
        """Everything about it."""
        limit, time = self.limit(), self.time(config)
        unit = "TB/s" if limit.peak == PEAK_TB_PER_S * 1e6 else "TFLOP/s"
        row: Row = {
            "case": self.name,
            "heads": f"{self.attention.num_heads}/{self.attention.num_kv_heads}",
            "us": round(time, 2),
            "limit_us": round(limit.amount / limit.peak, 2),
            "percent": round(100 * limit.amount / limit.peak / time, 1),
            "rate": round(limit.amount / time / 1e6, 2),
            "unit": unit,
            "plan_us": round(self.plan_time(config), 2),
        }
        if self.step.num_decodes == 0 and reason_against(torch.device("cuda")) is None:
            cuda_time = self.cuda_time()
            row |= {"cuda_us": round(cuda_time, 2), "cuda_rate": round(limit.amount / cuda_time / 1e6, 2)}
        return row


def _step(lens: Lens, num_blocks: int) -> StepView:
    """A step whose blocks are strewn over the pool, as after some time of serving."""
    free = np.random.default_rng(0).permutation(num_blocks).tolist()
    entries = []
    for start, count in lens:
        blocks = [free.pop() for _ in range(-(-(start + count) // _BLOCK_SIZE))]
        entries.append(Entry(token_ids=[0] * count, start=start, blocks=blocks))
    buffer = plan_buffer(entries, block_size=_BLOCK_SIZE)
    return StepView(torch.from_numpy(buffer).cuda(), buffer[:HEADER_LEN].tolist())


def _cascade_step(groups: Sequence[Cascade], num_blocks: int) -> StepView:
    buffer = cascade_buffer(groups, [], _BLOCK_SIZE, num_blocks)
    return StepView(torch.from_numpy(buffer).cuda(), buffer[:HEADER_LEN].tolist())


# --- search for the best configuration --------------------------------------------------------------------------------


def _decode_configs() -> Iterator[AttentionConfig]:
    for programs, min_tiles, stages in product((1, 2, 3, 4, 6), (1, 2, 4), (3, 4)):
        decode = DecodeConfig(programs_per_sm=programs, min_tiles=min_tiles, num_stages=stages)
        yield AttentionConfig(decode=decode)


def _prefill_configs() -> Iterator[AttentionConfig]:
    shapes = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)]
    for rows, tile, warps, stages in [*shapes, (128, 32, 4, 3), (128, 32, 4, 4), (128, 32, 8, 4)]:
        prefill = PrefillConfig(rows=rows, tile_bytes=1 << 15, max_tile=tile, num_warps=warps, num_stages=stages)
        yield AttentionConfig(prefill=prefill)


def _cascade_configs() -> Iterator[AttentionConfig]:
    for rows, programs, min_tiles, own_stages in product((64, 128), (2, 3), (2, 4, 8), (2, 3)):
        cascade = CascadeConfig(rows=rows, programs_per_sm=programs, min_tiles=min_tiles, own_stages=own_stages)
        yield AttentionConfig(cascade=cascade)


_CONFIGS: Final = {"decode": _decode_configs, "prefill": _prefill_configs, "cascade": _cascade_configs}


def sweep(part: str, only: str = "", heads: tuple[int, int] = HEADS[0]) -> list[Row]:
    """Times of every configuration of a key of `_CONFIGS`, µs by case, the best on (geometric) average first."""
    configs = list(_CONFIGS[part]())
    rows: list[Row] = [{"config": str(getattr(config, part))} for config in configs]
    logs = [0.0] * len(configs)
    for name in CASES:
        if name.startswith(part) and only in name:
            bench = Bench(name, *heads)
            for i, config in enumerate(configs):
                time = bench.time(config)
                rows[i][name] = round(time, 2)
                logs[i] += math.log(time)
    return [rows[i] for i in sorted(range(len(configs)), key=logs.__getitem__)]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", choices=list(_CONFIGS))
    parser.add_argument("--only", default="", help="part of the names of cases")
    arguments = parser.parse_args()
    rows = sweep(arguments.sweep, arguments.only) if arguments.sweep else cases(only=arguments.only)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
