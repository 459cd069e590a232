"""The CUDA kernels' sources, run on the CPU by `tests/cuda_on_cpu`, give what float32 arithmetic gives."""

from functools import partial

import pytest
import torch
from torch import Tensor

from pyvllm.kernels.cuda import decode, prefill
from pyvllm.kernels.cuda.compile import Argument
from pyvllm.kernels.cuda.gated_linear import Tiling
from pyvllm.kernels.cuda.linear import plan_launch
from pyvllm.kernels.plain import Heads
from pyvllm.kernels.triton.attention import AttentionPlan
from tests import cuda_on_cpu, decode_cases, prefill_cases
from tests.decode_cases import DecodeCase
from tests.linear_cases import LinearCase, make, relative_error
from tests.prefill_cases import PrefillCase

pytestmark = [
    pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels on the GPU"),
]

LINEAR = [
    LinearCase(m=1, n=48, k=512),
    LinearCase(m=1, n=40, k=64),  # fewer runs of columns than warps
    LinearCase(m=5, n=24, k=640, bias=True, residual=True),  # tiles of 8 rows, a run of columns more for some warps
    LinearCase(m=12, n=100, k=320, dtype=torch.float16, norm=1, residual=True),  # a last tile that is not full
    LinearCase(m=3, n=37, k=1088, norm=2, gated=True, bias=True),
    LinearCase(m=16, n=8, k=4096, norm=1, gated=True, residual=True),
]

WIDE = [
    (LinearCase(m=7, n=136, k=192, gated=True), Tiling(groups=1, tile_n=64)),  # several tiles for each block
    (LinearCase(m=100, n=136, k=200, dtype=torch.float16, gated=True), Tiling(groups=2, tile_n=96)),
    (LinearCase(m=150, n=40, k=1608, gated=True), Tiling(groups=1, tile_n=32)),  # a ring that goes round
    (LinearCase(m=200, n=80, k=8, gated=True), Tiling(groups=3, tile_n=224)),
]


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies when waited for"])
@pytest.mark.parametrize(("case", "tiling"), WIDE, ids=str)
def test_gated_linear_equals_float32(case: LinearCase, tiling: Tiling, late: bool) -> None:
    inputs = make(case, torch.device("cpu"))
    out = torch.full((case.m, case.n), float("nan"), dtype=case.dtype)
    x_map = cuda_on_cpu.tensor_map(inputs.x, tiling.x_box)
    weight_map = cuda_on_cpu.tensor_map(inputs.weight, tiling.weight_box)
    cuda_on_cpu.launch(
        tiling.variant(case.dtype),
        (x_map, weight_map, out, case.m, case.n, case.k),
        grid=(min(4, tiling.tiles(case.m, case.n)), 1, 1),
        threads=tiling.threads,
        shared_bytes=tiling.shared_bytes,
        late=late,
    )
    assert relative_error(out, inputs.expected) < (3e-3 if case.dtype == torch.bfloat16 else 5e-4)


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies when waited for"])
@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_gemv_equals_float32(case: LinearCase, late: bool) -> None:
    inputs = make(case, torch.device("cpu"))
    launch = plan_launch(case.m, case.n, case.k, case.dtype, norm=case.norm, gated=case.gated, multiprocessors=3)
    out = torch.full((case.m, case.n), float("nan"), dtype=case.dtype) if inputs.residual is None else inputs.residual
    norm_weight = None if inputs.norm is None else inputs.norm.weight
    args: tuple[Argument, ...] = (
        *(inputs.x, inputs.weight, inputs.bias, norm_weight, inputs.residual, out),
        *(inputs.x.stride(0), case.m, case.n, 1e-5),
    )
    cuda_on_cpu.launch(
        launch.variant,
        args,
        grid=(launch.blocks, 1, 1),
        threads=launch.threads,
        shared_bytes=launch.shared_bytes,
        late=late,
    )
    assert relative_error(out, inputs.expected) < (3e-3 if case.dtype == torch.bfloat16 else 5e-4)


def _run(
    tokens: Tensor, heads: Heads | None, kv_layer: Tensor, output: Tensor, plan: AttentionPlan, *, late: bool
) -> None:
    assert plan.decode is not None
    launch = decode.plan_launch(plan.attention, plan.decode.constants, len(plan.decode.items), kv_layer, heads)
    head_stride = tokens.stride(1) if heads is None else heads.head_dim
    args = decode.arguments(tokens, head_stride, heads, kv_layer, output, plan, plan.decode)
    cuda_on_cpu.launch(
        launch.variant,
        args,
        grid=launch.grid,
        threads=launch.threads,
        shared_bytes=launch.shared_bytes,
        late=late,
    )


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies when waited for"])
@pytest.mark.parametrize("case", decode_cases.CASES, ids=lambda case: case.name)
def test_decode_attention_equals_the_reference(case: DecodeCase, late: bool) -> None:
    def run(query: Tensor, kv_layer: Tensor, output: Tensor, plan: AttentionPlan) -> None:
        _run(query, None, kv_layer, output, plan, late=late)

    decode_cases.compare(case, run)


@pytest.mark.parametrize("case", decode_cases.FUSED_CASES, ids=lambda case: case.name)
def test_fused_decode_attention_equals_the_reference(case: DecodeCase) -> None:
    decode_cases.compare_fused(case, partial(_run, late=True))


def _run_prefill(query: Tensor, kv_layer: Tensor, output: Tensor, plan: AttentionPlan, *, late: bool) -> None:
    assert plan.prefill is not None
    launch = prefill.plan_launch(plan.attention, kv_layer.shape[3], kv_layer.dtype)
    kv_map = cuda_on_cpu.tensor_map(kv_layer, launch.box)
    cuda_on_cpu.launch(
        launch.variant,
        prefill.arguments(query, kv_map, output, plan, plan.prefill),
        grid=(3, 1, 1),
        threads=launch.threads,
        shared_bytes=launch.shared_bytes,
        late=late,
    )


@pytest.mark.parametrize("case", prefill_cases.CASES, ids=lambda case: case.name)
def test_prefill_attention_equals_the_reference(case: PrefillCase) -> None:
    # One finds missing waits for data, the other for room: cases of both kinds are enough.
    late = prefill_cases.CASES.index(case) % 2 == 0
    prefill_cases.compare(case, partial(_run_prefill, late=late), layers=1)
