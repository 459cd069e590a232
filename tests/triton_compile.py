"""Compiling kernels for GPUs that are not there: what `tests/test_triton_compile.py` looks at.

A process of its own, `python -m tests.triton_compile`, since the tests' own process may have Triton interpret. It
prints one JSON object: a name of `CASES` -> the fields of `Usage`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from pyvllm.kernels import Attention, Heads, Norm, RopeTables
from pyvllm.kernels.triton import (
    activation,
    attention_config,
    blocks,
    embed,
    sampling,
    sampling_logprobs,
    sampling_penalties,
)
from pyvllm.kernels.triton import heads as heads_module
from pyvllm.kernels.triton.activation import activation_kernel
from pyvllm.kernels.triton.attention_config import CascadeConfig, DecodeConfig, PrefillConfig
from pyvllm.kernels.triton.blocks import blocks_kernel
from pyvllm.kernels.triton.cascade_attention import cascade_kernel
from pyvllm.kernels.triton.decode_attention import decode_kernel
from pyvllm.kernels.triton.embed import embed_kernel
from pyvllm.kernels.triton.heads import head_constants, heads_kernel
from pyvllm.kernels.triton.kv_write import kv_write_kernel
from pyvllm.kernels.triton.norm import NormRule, norm_kernel
from pyvllm.kernels.triton.norm import num_warps as norm_warps
from pyvllm.kernels.triton.prefill_attention import prefill_kernel
from pyvllm.kernels.triton.sampling_search import DEFAULT as SAMPLING
from pyvllm.kernels.triton.work_list import cascade_items_kernel, decode_items_kernel, prefill_items_kernel


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel as it is launched."""

    kernel: Any
    types: Mapping[str, str]
    """Triton's names of the types of arguments that are no int32 pointers: "*bf16", "fp32", "i32"."""
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    capability: int = 90
    uses_wgmma: bool = field(default=False)
    """Whether products must be those of warp groups."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a compiled kernel takes."""

    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread; more than 0 where registers did not suffice."""
    shared: int
    """Bytes of a program."""
    wgmma: bool
    waits: bool
    """For the kernel before it, which it may begin beside."""


def compile_case(case: Case) -> Usage:
    """Compile for NVIDIA GPUs; pointers and strides are multiples of 16 unless the kernel does not care."""
    signature, attributes = {}, {}
    for i, parameter in enumerate(case.kernel.params):
        if parameter.is_constexpr or case.constants.get(parameter.name, 0) is None:
            signature[parameter.name] = "constexpr"
            continue
        kind = signature[parameter.name] = case.types.get(parameter.name, "*i32")
        cares = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if cares and kind != "fp32":
            attributes[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", case.capability, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # for kernels that ask
    compiled = triton.compile(
        ASTSource(case.kernel, signature, dict(case.constants), attributes),
        target=target,
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True},
    )
    registers, stack = _resources(compiled.asm["cubin"])
    return Usage(
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        wgmma="wgmma.mma" in compiled.asm["ptx"],
        waits="griddepcontrol.wait" in compiled.asm["ptx"],
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


# --- attention --------------------------------------------------------------------------------------------------------

_LLAMA = Attention(num_heads=32, num_kv_heads=8, head_dim=128, scale=0.088)
_SPECS = {
    "plain": _LLAMA,
    "D=64": replace(_LLAMA, head_dim=64),
    "D=80": replace(_LLAMA, head_dim=80),
    "D=256": replace(_LLAMA, head_dim=256, num_heads=16),
    "window and softcap": replace(_LLAMA, window=4096, softcap=50.0),
    "alibi": replace(_LLAMA, alibi_slopes=(0.5,) * 32),
    "sinks": replace(_LLAMA, num_heads=64, head_dim=64, sinks=True),
    "sinks in a window": replace(_LLAMA, num_heads=64, head_dim=64, sinks=True, window=128),
    "71 heads": replace(_LLAMA, num_heads=71, num_kv_heads=1, head_dim=64),
}
_SOFTCAP = replace(_LLAMA, softcap=50.0)
_PREFILL = PrefillConfig()
_CASCADE = CascadeConfig()
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _attention_types(dtype: torch.dtype) -> dict[str, str]:
    data = f"*{_NAMES[dtype]}"
    return {
        **dict.fromkeys(("query", "kv_layer", "output", "key_value", "sinks"), data),
        **dict.fromkeys(("slopes", "partial_stats", "partial_outputs", "shared_stats", "shared_outputs"), "*fp32"),
        **dict.fromkeys(("token_stride", "head_stride", "kind_stride"), "i32"),
        **dict.fromkeys(("num_seqs", "first_seq", "max_items", "max_seq_len", "search_steps"), "i32"),
        "scale": "fp32",
    }


def _decode(
    spec: Attention,
    *,
    cascades: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    **options: Any,
) -> Case:
    config = DecodeConfig()
    constants = attention_config.decode_constants(spec, _kv_layer(spec, dtype, block_size), config, cascades=cascades)
    return Case(
        kernel=decode_kernel,
        types=_attention_types(dtype),
        constants={**constants, **_absent(spec)},
        num_warps=attention_config.decode_warps(constants, dtype, config),
        num_stages=_CASCADE.own_stages if cascades else config.num_stages,
        **options,
    )


def _cascade(
    spec: Attention,
    members: int,
    config: CascadeConfig = _CASCADE,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    **options: Any,
) -> Case:
    decode = attention_config.decode_constants(spec, _kv_layer(spec, dtype, block_size), DecodeConfig())
    constants = attention_config.cascade_constants(decode, dtype, members, config)
    return Case(
        kernel=cascade_kernel,
        types=_attention_types(dtype),
        constants=constants,
        num_warps=attention_config.cascade_warps(constants),
        num_stages=config.num_stages,
        **options,
    )


def _prefill(
    spec: Attention,
    config: PrefillConfig = _PREFILL,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    **options: Any,
) -> Case:
    return Case(
        kernel=prefill_kernel,
        types=_attention_types(dtype),
        constants={
            **attention_config.prefill_constants(spec, _kv_layer(spec, dtype, block_size), config),
            **_absent(spec),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )


def _absent(spec: Attention) -> dict[str, None]:
    """Arguments that are None."""
    return {} if spec.sinks else {"sinks": None}


def _kv_layer(spec: Attention, dtype: torch.dtype, block_size: int) -> torch.Tensor:
    return torch.empty(1, 2, spec.num_kv_heads, block_size, spec.head_dim, dtype=dtype, device="meta")


def _attention_cases() -> Iterator[tuple[str, Case]]:
    types = _attention_types(torch.bfloat16)
    for name, spec in _SPECS.items():
        yield f"decode, {name}", _decode(spec)
        yield f"prefill, {name}", _prefill(spec, uses_wgmma=True)
        if spec.window is None:
            yield f"decode behind a cascade, {name}", _decode(spec, cascades=True)
            yield f"small cascade, {name}", _cascade(spec, 4)
            yield f"large cascade, {name}", _cascade(spec, 100, uses_wgmma=True)
    yield "decode, block 16", _decode(_LLAMA, block_size=16)
    yield "prefill, block 16", _prefill(_LLAMA, block_size=16, uses_wgmma=True)
    yield "small cascade, block 16", _cascade(_LLAMA, 4, block_size=16)
    yield "large cascade, block 16", _cascade(_LLAMA, 100, block_size=16, uses_wgmma=True)
    yield "large cascade, softcap", _cascade(_SOFTCAP, 100, uses_wgmma=True)
    yield "large cascade, MHA", _cascade(replace(_LLAMA, num_kv_heads=32), 100, uses_wgmma=True)
    yield "decode, float32", _decode(_LLAMA, dtype=torch.float32)
    yield "prefill, float32", _prefill(_LLAMA, dtype=torch.float32)
    yield "decode behind a cascade, float32", _decode(_LLAMA, cascades=True, dtype=torch.float32)
    yield "cascade, float32", _cascade(_LLAMA, 100, dtype=torch.float32)
    yield "decode, sm_80", _decode(_LLAMA, capability=80)
    yield "prefill, sm_80", _prefill(_LLAMA, capability=80)
    yield "large cascade, sm_80", _cascade(_LLAMA, 100, capability=80)
    yield (
        "large cascade, D=256, sm_86",
        _cascade(_SPECS["D=256"], 100, CascadeConfig(rows=64, num_stages=2), capability=86),
    )
    yield "prefill, D=256, sm_86", _prefill(_SPECS["D=256"], PrefillConfig(rows=64, num_stages=2), capability=86)
    decode = _decode(_LLAMA).constants
    items = attention_config.decode_items_constants(dict(decode), 33, 8, 1024, DecodeConfig())
    yield "decode items", Case(kernel=decode_items_kernel, types=types, constants=items, num_warps=16)
    behind = items | {"CASCADES": True}
    yield "decode items behind cascades", Case(kernel=decode_items_kernel, types=types, constants=behind, num_warps=16)
    large = attention_config.cascade_items_constants(dict(_cascade(_LLAMA, 100).constants), 16, 1024, _CASCADE)
    yield "cascade items", Case(kernel=cascade_items_kernel, types=types, constants=large)
    yield (
        "prefill items",
        Case(
            kernel=prefill_items_kernel,
            types=types,
            constants={"TOKENS": 32, "WINDOW": 0, "BLOCK": 512},
            num_warps=16,
        ),
    )
    heads = {"NUM_KV_HEADS": 8, "HEADS_PAD": 8, "HEAD_DIM": 128, "HEAD_PAD": 128, "BLOCK_SIZE": 64}
    yield "kv write", Case(kernel=kv_write_kernel, types=types, constants=heads)


# --- what surrounds it ------------------------------------------------------------------------------------------------


def _norm(size: int, *, delta: bool = True, rule: NormRule = (1e-5, False, False), bias: bool = False) -> Case:
    absent = {"delta": not delta, "bias": not bias}
    width = triton.next_power_of_2(size)
    return Case(
        kernel=norm_kernel,
        types={**dict.fromkeys(("rows", "delta", "output", "weight", "bias"), "*bf16"), "row_stride": "i32"},
        constants={"SIZE": size, "WIDTH": width, "RULE": rule, **dict.fromkeys((n for n in absent if absent[n]), None)},
        num_warps=norm_warps(width),
    )


def _heads(num_heads: int, num_kv_heads: int, head_dim: int, *, rotated: int, normed: bool, interleaved: bool) -> Case:
    table = torch.empty(1, rotated, device="meta")
    norm = Norm(weight=torch.empty(head_dim, device="meta"), eps=1e-6) if normed else None
    heads = Heads(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        query_norm=norm,
        key_norm=norm,
        rope=RopeTables(cos=table, sin=table, interleaved=interleaved) if rotated else None,
    )
    absent = ["query_bias", "key_bias"] + ([] if normed else ["query_weight", "key_weight"])
    data = ("qkv", "query", "kv_layer", "cos", "sin", "query_weight", "key_weight")
    return Case(
        kernel=heads_kernel,
        types=dict.fromkeys(data, "*bf16"),
        constants=head_constants(heads, 64) | dict.fromkeys(absent + ([] if rotated else ["cos", "sin"]), None),
        num_warps=heads_module.NUM_WARPS,
    )


def _glue_cases() -> Iterator[tuple[str, Case]]:
    for size in (1024, 4096, 8192, 16384):
        yield f"add and norm, {size}", _norm(size)
    yield "norm", _norm(5120, delta=False, rule=(1e-5, False, True))
    yield "layer norm", _norm(4096, rule=(1e-5, True, False), bias=True)
    yield "heads", _heads(32, 8, 128, rotated=128, normed=False, interleaved=False)
    yield "heads, normed", _heads(16, 8, 128, rotated=128, normed=True, interleaved=False)
    yield "heads, neighbours turned", _heads(16, 16, 256, rotated=64, normed=False, interleaved=True)
    yield "heads, 71", _heads(71, 1, 64, rotated=64, normed=False, interleaved=False)
    yield "heads, unchanged", _heads(12, 12, 64, rotated=0, normed=False, interleaved=False)
    data = dict.fromkeys(("x", "table", "output"), "*bf16")
    for kind in sorted(set(activation.KINDS.values())):
        constants = {"SIZE": 14336, "KIND": kind, "GATED": True, "BLOCK": activation.BLOCK}
        yield kind, Case(kernel=activation_kernel, types=data, constants=constants, num_warps=activation.NUM_WARPS)
    rows = {"SIZE": 4096, "BLOCK": embed.BLOCK}
    yield "embedding", Case(kernel=embed_kernel, types=data, constants=rows, num_warps=embed.NUM_WARPS)
    words = {**dict.fromkeys(("source", "target"), "*i64"), **dict.fromkeys(("source_blocks", "target_blocks"), "i32")}
    chunks = {"SIZE": 2 * 8 * 64 * 128 // 4, "CHUNK": blocks.CHUNK}
    yield "blocks", Case(kernel=blocks_kernel, types=words, constants=chunks, num_warps=blocks.NUM_WARPS)


# --- sampling ---------------------------------------------------------------------------------------------------------


def _sampling(kernel: Any, num_warps: int, constants: Mapping[str, Any], dtype: str = "bf16") -> Case:
    numbers = ("row_stride", "vocab_size", "num_tiles", "tiles_each", "num_groups", "count")
    floats = ("tile_best", "tile_score", "tile_mass", "tile_above", "group_best", "gathered", "out_values")
    types = {**dict.fromkeys(numbers, "i32"), **dict.fromkeys(floats, "*fp32"), "values": f"*{dtype}", "wanted": "*i1"}
    return Case(kernel=kernel, types=types, constants=constants, num_warps=num_warps)


def _sampling_cases() -> Iterator[tuple[str, Case]]:
    tile = {"TILE": SAMPLING.tile, "GROUP": SAMPLING.group}
    search = {"TILES_PAD": 64, "GROUP": SAMPLING.group, "WIDTH": SAMPLING.width, "BLOCK": SAMPLING.block}
    for name, random, filtered in (("greedy", False, False), ("random", True, False), ("filtered", True, True)):
        kind = {"RANDOM": random, "FILTERED": filtered}
        absent = {} if filtered else {"group_best": None}
        yield f"pick, {name}", _sampling(sampling.tiles_kernel, 8, {**kind, **tile, **absent})
        yield f"pick, {name}, last", _sampling(sampling.finish_kernel, 1, {**kind, "TILES_PAD": 64})
    for dtype in ("bf16", "fp32"):
        yield f"sift {dtype}", _sampling(sampling.filtered_kernel, 16, search, dtype)
        yield f"log-probabilities {dtype}", _sampling(sampling_logprobs.summary_kernel, 8, tile, dtype)
        yield f"best {dtype}", _sampling(sampling_logprobs.table_kernel, 8, search, dtype)
    share = {"SHARES": 8, "BLOCK": 256}
    yield "counts", _sampling(sampling_penalties.count_kernel, 4, share)
    yield "penalties", _sampling(sampling_penalties.penalise_kernel, 4, share, "fp32")


EARLY = (norm_kernel, heads_kernel, activation_kernel, decode_kernel)
"""Those launched with `pdl.launch_options`."""
CASES: dict[str, Case] = dict(chain(_attention_cases(), _glue_cases(), _sampling_cases()))


if __name__ == "__main__":
    print(json.dumps({name: asdict(compile_case(case)) for name, case in CASES.items()}))  # noqa: T201
