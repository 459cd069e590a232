"""What surrounds matrices and attention, in Triton, beside plain torch on one GPU, in one run.

A CUDA graph of many launches, each with buffers of its own, is replayed; a launch's time is the graph's by their
number, so gaps between kernels count. `python -m benches.kernels.glue [--sweep]`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import triton
from torch import Tensor

from benches.kernels.timing import Row, memory_row, print_rows, time_chain
from pyvllm.kernels import Attention, Heads, Norm
from pyvllm.kernels.reference import ReferenceKernels, ReferencePlan
from pyvllm.kernels.triton import activation, blocks, embed, heads, norm
from pyvllm.layers.rope import RopeSpec, rope_tables

NUM_TOKENS: Final = (1, 64, 256, 1024, 8192)
# Several times the 60 MB of a level 2 cache.
_BYTES: Final = 400 * 2**20
_MAX_COPIES: Final = 64
_BLOCK_SIZE: Final = 64
_NUM_POSITIONS: Final = 8192

_DTYPE: Final = torch.bfloat16
_randn = partial(torch.randn, device="cuda", dtype=_DTYPE)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    head_norms: bool = False

    def heads(self) -> Heads:
        """With all that there is between projection and attention."""
        size = self.head_dim
        of = Norm(weight=_randn(size), eps=1e-6) if self.head_norms else None
        rope = RopeSpec(theta=1e6, dim=size)
        return Heads(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=size,
            query_norm=of,
            key_norm=of,
            rope=rope_tables(rope, num_positions=_NUM_POSITIONS, dtype=_DTYPE, device=torch.device("cuda")),
        )


MODELS: Final = {
    "8b": Model(hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8),
    "0.6b": Model(hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_norms=True),
}


class _Plain(ReferenceKernels):
    """Plain torch that a graph may capture: all tokens are real."""

    def write_kv(self, kv_layer: Tensor, key_value: Tensor, plan: ReferencePlan) -> None:
        kv_layer[plan.slots // _BLOCK_SIZE, :, :, plan.slots % _BLOCK_SIZE] = key_value


_PLAIN: Final = _Plain()

Start = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation: `make` gives ours and plain torch's, with new buffers."""

    name: str
    shape: str
    num_bytes: int
    make: Callable[[], tuple[Start, Start]]

    def row(self) -> Row:
        """Timed."""
        copies = min(max(-(-_BYTES // self.num_bytes), 2), _MAX_COPIES)
        starts = [self.make() for _ in range(copies)]
        ours, plain = (time_chain([start[i] for start in starts]) for i in (0, 1))
        return {
            **memory_row(self.name, self.shape, self.num_bytes, ours),
            "plain_us": round(plain, 2),
            "plain_over_ours": round(plain / ours, 2),
        }


def cases(num_tokens: tuple[int, ...] = NUM_TOKENS) -> list[Row]:
    """One line for each operation, model and number of tokens: µs, TB/s, percent of the peak, and torch's µs."""
    sizes = ((name, model, tokens) for name, model in MODELS.items() for tokens in num_tokens)
    return [case.row() for size in sizes for case in _model_cases(*size)] + _block_rows()


def _model_cases(name: str, model: Model, tokens: int) -> Iterator[Case]:
    size, inner = model.hidden_size, model.intermediate_size
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    item = tokens * _DTYPE.itemsize
    of, of_heads, table = Norm(weight=_randn(size), eps=1e-6), model.heads(), _randn(32000, size)
    positions = torch.randint(_NUM_POSITIONS, (tokens,), device="cuda", dtype=torch.int32)
    ids = torch.randint(len(table), (tokens,), device="cuda", dtype=torch.int32)
    previous = torch.zeros(1, device="cuda", dtype=torch.int32)
    angles = _PLAIN.angles(of_heads.rope, positions)

    def make_norm() -> tuple[Start, Start]:
        x = _randn(tokens, size)
        return partial(norm.norm, x, of), partial(_PLAIN.norm, x, of)

    def make_add_norm() -> tuple[Start, Start]:
        # Zeros are added, so that replays do not overflow.
        x, delta = _randn(tokens, size), torch.zeros(tokens, size, device="cuda", dtype=_DTYPE)
        return partial(norm.add_norm, x, delta, of), partial(_PLAIN.add_norm, x, delta, of)

    def make_heads() -> tuple[Start, Start]:
        qkv, kv_layer, slots = _randn(tokens, width), *_kv(model, tokens)
        plan = ReferencePlan(
            attention=Attention(num_heads=1, num_kv_heads=1, head_dim=1, scale=1),
            block_size=_BLOCK_SIZE,
            slots=slots.long(),
            queries=[],
            seq_lens=[],
            block_tables=[],
        )
        return (
            partial(heads.rotate_and_store, qkv, of_heads, positions, kv_layer, slots),
            partial(_PLAIN.rotate_and_store, qkv, of_heads, angles, kv_layer, plan),
        )

    def make_gated() -> tuple[Start, Start]:
        x = _randn(tokens, 2 * inner)
        return partial(activation.gated, x, "silu"), partial(_PLAIN.gated, x, "silu")

    def make_embed() -> tuple[Start, Start]:
        return partial(embed.embed, ids, previous, table), partial(_PLAIN.embed, ids, previous, table)

    yield Case(name=f"{name} norm", shape=f"{tokens}x{size}", num_bytes=2 * item * size, make=make_norm)
    yield Case(name=f"{name} add_norm", shape=f"{tokens}x{size}", num_bytes=4 * item * size, make=make_add_norm)
    yield Case(name=f"{name} heads", shape=f"{tokens}x{width}", num_bytes=2 * item * width, make=make_heads)
    yield Case(name=f"{name} gated", shape=f"{tokens}x{inner}", num_bytes=3 * item * inner, make=make_gated)
    yield Case(name=f"{name} embed", shape=f"{tokens}x{size}", num_bytes=2 * item * size, make=make_embed)


def _kv(model: Model, tokens: int) -> tuple[Tensor, Tensor]:
    """A layer's KV memory, and a slot for each token, all over it."""
    num_blocks = 2 * tokens // _BLOCK_SIZE + 1
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device="cuda", dtype=torch.int32)[:tokens]
    return _randn(num_blocks, 2, model.num_kv_heads, _BLOCK_SIZE, model.head_dim), slots


def _block_rows() -> list[Row]:
    """Copies on the GPU, and swaps with pinned memory, of 16 blocks of 32 layers."""
    num_pairs = 16
    pool = _randn(32, 2 * num_pairs, 2, 8, _BLOCK_SIZE, 128)
    host_pool = torch.zeros(pool.shape, dtype=_DTYPE, pin_memory=True)
    index = torch.arange(num_pairs, device="cuda", dtype=torch.int32)
    pairs = torch.stack((index, index + num_pairs), 1)
    starts: dict[str, Start] = {
        "copy_blocks": partial(blocks.copy_blocks, pool, pairs),
        "swap out": partial(blocks.swap_blocks, pool, host_pool, pairs),
        "swap in": partial(blocks.swap_blocks, host_pool, pool, pairs),
    }
    num_bytes = pool.nbytes // 2
    shape = f"{num_pairs} blocks"
    return [
        memory_row(name, shape, num_bytes * (2 if name == "copy_blocks" else 1), time_chain([start] * 2))
        for name, start in starts.items()
    ]


# --- other sizes than the kernels choose ------------------------------------------------------------------------------


def sweep(num_tokens: tuple[int, ...] = (1, 256, 8192)) -> list[Row]:
    """Other numbers of warps and tiles, of the three kernels that every layer launches."""
    sizes = ((name, model, tokens) for name, model in MODELS.items() for tokens in num_tokens)
    sweeps = (_norm_sweep, _heads_sweep, _gated_sweep)
    return [row for size in sizes for rows in sweeps for row in rows(*size)]


def _timed(name: str, shape: str, num_bytes: int, make: Callable[[], Start], **sizes: int) -> Row:
    copies = min(max(-(-_BYTES // num_bytes), 2), _MAX_COPIES)
    return memory_row(name, shape, num_bytes, time_chain([make() for _ in range(copies)])) | sizes


def _norm_sweep(name: str, model: Model, tokens: int) -> Iterator[Row]:
    size = model.hidden_size
    weight = _randn(size)
    constants = {"SIZE": size, "WIDTH": size, "RULE": (1e-6, False, False)}
    for warps in (1, 2, 4, 8, 16, 32):

        def make(warps: int = warps) -> Start:
            x, delta = _randn(tokens, size), torch.zeros(tokens, size, device="cuda", dtype=_DTYPE)
            args = (x, delta, torch.empty_like(x), weight, None, size)
            return lambda: norm.norm_kernel[(tokens,)](*args, **constants, num_warps=warps)

        num_bytes = 4 * tokens * size * _DTYPE.itemsize
        yield _timed(f"{name} add_norm", f"{tokens}x{size}", num_bytes, make, warps=warps)


def _heads_sweep(name: str, model: Model, tokens: int) -> Iterator[Row]:
    of = model.heads()
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    positions = torch.randint(_NUM_POSITIONS, (tokens,), device="cuda", dtype=torch.int32)
    weight = of.query_norm and of.query_norm.weight
    for group in (1, 2, 4, 8, 16):
        groups = triton.cdiv(model.num_heads, group)
        grid = tokens, groups + 2 * triton.cdiv(model.num_kv_heads, group)
        constants = {**heads.head_constants(of, _BLOCK_SIZE), "TILE": (group, model.head_dim, groups)}
        for warps in (1, 2, 4, 8):

            def make(grid: tuple[int, int] = grid, constants: dict[str, Any] = constants, warps: int = warps) -> Start:
                qkv, kv_layer, slots = _randn(tokens, width), *_kv(model, tokens)
                query = torch.empty(tokens, model.num_heads, model.head_dim, device="cuda", dtype=_DTYPE)
                rope = of.rope
                assert rope is not None
                args = (qkv, query, kv_layer, positions, slots, rope.cos, rope.sin, weight, None, weight, None)
                return lambda: heads.heads_kernel[grid](*args, **constants, num_warps=warps)

            num_bytes = 2 * tokens * width * _DTYPE.itemsize
            yield _timed(
                f"{name} heads", f"{tokens}x{width}", num_bytes, make, warps=warps, tile=group * model.head_dim
            )


def _gated_sweep(name: str, model: Model, tokens: int) -> Iterator[Row]:
    inner = model.intermediate_size
    for block in (512, 1024, 2048, 4096):
        for warps in (2, 4, 8):

            def make(block: int = block, warps: int = warps) -> Start:
                x, output = _randn(tokens, 2 * inner), _randn(tokens, inner)
                grid = tokens, triton.cdiv(inner, block)
                constants = {"SIZE": inner, "KIND": "silu", "GATED": True, "BLOCK": block}
                return lambda: activation.activation_kernel[grid](x, output, **constants, num_warps=warps)

            num_bytes = 3 * tokens * inner * _DTYPE.itemsize
            yield _timed(f"{name} gated", f"{tokens}x{inner}", num_bytes, make, warps=warps, tile=block)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other sizes of ours instead of plain torch")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of a step")
    args = parser.parse_args()
    chosen = {"num_tokens": tuple(args.tokens)} if args.tokens else {}
    print_rows(sweep(**chosen) if args.sweep else cases(**chosen))
