"""The layers and the head of one decode step on one GPU, in one CUDA graph: how far kernels, gaps and fusion are from
the time that reading the weights takes.

Random weights; no sampling. `python -m benches.kernels.decode_step [--batch 1 8] [--context 512]`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benches.kernels.timing import PEAK_TB_PER_S, Row, print_rows, time_chain
from pyvllm.kernels import AnyKernels, Attention, Heads, LinearFunction, Norm, RopeTables
from pyvllm.kernels.cuda.kernels import CudaKernels
from pyvllm.kernels.triton.kernels import TritonKernels
from pyvllm.step import HEADER_LEN, StepView
from tests.attention_cases import step_buffer

_BLOCK_SIZE: Final = 64


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a Llama-like model; heads of 128."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    head_norms: bool


MODELS: Final = {
    "0.6b": Model(layers=28, hidden=1024, heads=16, kv_heads=8, inner=3072, vocab=151936, head_norms=True),
    "8b": Model(layers=32, hidden=4096, heads=32, kv_heads=8, inner=14336, vocab=128256, head_norms=False),
}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer has."""

    norm1: Norm
    norm2: Norm
    qkv: LinearFunction
    o: LinearFunction
    gate_up: LinearFunction
    down: LinearFunction
    heads: Heads
    kv_layer: Tensor


@dataclass(frozen=True, kw_only=True)
class Head:
    """What follows the layers."""

    norm: Norm
    linear: LinearFunction


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _norm(size: int) -> Norm:
    return Norm(weight=_random(size), eps=1e-6)


def _layer(model: Model, kernels: AnyKernels, rope: RopeTables, num_blocks: int) -> Layer:
    def linear(n: int, k: int) -> LinearFunction:
        return kernels.pack_linear(_random(n, k) * k**-0.5, None)

    head_norm = _norm(128) if model.head_norms else None
    return Layer(
        norm1=_norm(model.hidden),
        norm2=_norm(model.hidden),
        qkv=linear((model.heads + 2 * model.kv_heads) * 128, model.hidden),
        o=linear(model.hidden, model.heads * 128),
        gate_up=linear(2 * model.inner, model.hidden),
        down=linear(model.hidden, model.inner),
        heads=Heads(
            num_heads=model.heads,
            num_kv_heads=model.kv_heads,
            head_dim=128,
            query_norm=head_norm,
            key_norm=head_norm,
            rope=rope,
        ),
        kv_layer=_random(num_blocks, 2, model.kv_heads, _BLOCK_SIZE, 128),
    )


def _single(kernels: AnyKernels, layers: list[Layer], head: Head, hidden: Tensor, step: StepView, plan: Any) -> None:
    """Nine kernels a layer."""
    delta = None
    for layer in layers:
        normed = kernels.norm(hidden, layer.norm1) if delta is None else kernels.add_norm(hidden, delta, layer.norm1)
        angles = kernels.angles(layer.heads.rope, step.positions)
        query = kernels.rotate_and_store(layer.qkv(normed), layer.heads, angles, layer.kv_layer, plan)
        delta = layer.o(kernels.paged_attention(query, layer.kv_layer, plan))
        normed = kernels.add_norm(hidden, delta, layer.norm2)
        delta = layer.down(kernels.gated(layer.gate_up(normed), "silu"))
    assert delta is not None
    head.linear(kernels.add_norm(hidden, delta, head.norm))


def _fused(kernels: CudaKernels, layers: list[Layer], head: Head, hidden: Tensor, step: StepView, plan: Any) -> None:
    """Five kernels a layer."""
    for layer in layers:
        qkv = kernels.norm_linear(hidden, layer.norm1, layer.qkv)
        angles = kernels.angles(layer.heads.rope, step.positions)
        kernels.linear_add(hidden, kernels.attend(qkv, layer.heads, angles, layer.kv_layer, plan), layer.o)
        kernels.linear_add(hidden, kernels.norm_gated(hidden, layer.norm2, layer.gate_up, "silu"), layer.down)
    kernels.norm_linear(hidden, head.norm, head.linear)


def cases(batches: tuple[int, ...] = (1, 8), context: int = 512) -> list[Row]:
    """One line for each model, batch and set of kernels."""
    return [row for name in MODELS for batch in batches for row in _cases(name, batch, context)]


def _cases(name: str, batch: int, context: int) -> list[Row]:
    model = MODELS[name]
    num_blocks = batch * -(-context // _BLOCK_SIZE)
    buffer = step_buffer([(context - 1, 1)] * batch, _BLOCK_SIZE, num_blocks, pad_to=batch)
    step = StepView(torch.from_numpy(buffer).cuda(), buffer[:HEADER_LEN].tolist())
    attention = Attention(num_heads=model.heads, num_kv_heads=model.kv_heads, head_dim=128, scale=128**-0.5)
    rope = RopeTables(cos=_random(context, 128), sin=_random(context, 128), interleaved=False)
    num_bytes = 2 * model.vocab * model.hidden + 4 * batch * context * model.kv_heads * 128 * model.layers
    per_layer = (2 * model.heads + 2 * model.kv_heads) * 128 * model.hidden + 3 * model.inner * model.hidden
    num_bytes += 2 * per_layer * model.layers
    rows: list[Row] = []
    cuda, triton = CudaKernels(), TritonKernels()
    kinds: dict[str, tuple[AnyKernels, Callable[..., None]]] = {
        "triton": (triton, partial(_single, triton)),
        "cuda": (cuda, partial(_single, cuda)),
        "cuda fused": (cuda, partial(_fused, cuda)),
    }
    for kind, (kernels, forward) in kinds.items():
        layers = [_layer(model, kernels, rope, num_blocks) for _ in range(model.layers)]
        head = Head(norm=_norm(model.hidden), linear=kernels.pack_linear(_random(model.vocab, model.hidden), None))
        table = _random(1000, model.hidden)
        us = time_chain([partial(_step, kernels, forward, layers, head, table, step, attention)])
        rows.append({
            "case": f"{name} batch {batch}", "kernels": kind, "us": round(us, 1),
            "bound_us": round(num_bytes / PEAK_TB_PER_S * 1e-6, 1),
            "percent": round(100 * num_bytes / PEAK_TB_PER_S * 1e-6 / us, 1),
        })  # fmt: skip
        del layers, head
    return rows


def _step(
    kernels: AnyKernels,
    forward: Callable[..., None],
    layers: list[Layer],
    head: Head,
    table: Tensor,
    step: StepView,
    attention: Attention,
) -> None:
    plan = kernels.plan(step, attention, layers[0].kv_layer)
    hidden = kernels.embed(step.token_ids, step.positions, table)  # no id is negative: the second is not looked at
    forward(layers, head, hidden, step, plan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences")
    parser.add_argument("--context", type=int, default=512, help="tokens of each")
    args = parser.parse_args()
    print_rows(cases(tuple(args.batch), args.context))
