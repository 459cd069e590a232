"""`CudaKernels` beside those in Triton, and when they are chosen."""

from dataclasses import replace

import pytest
import torch

from pyvllm.kernels.cuda.kernels import CudaKernels, reason_against
from pyvllm.kernels.plain import Norm
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.kernels import TritonKernels
from tests.attention_cases import blocks_for, spec, step_buffer, used_kv, view

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)


def test_a_hopper_gpu_has_them_and_a_cpu_has_not() -> None:
    assert reason_against(torch.device("cuda", 0)) is None
    assert reason_against(torch.device("cpu")) == "cpu is no GPU of NVIDIA's"


@pytest.mark.parametrize(("head_dim", "window"), [(128, None), (128, 50), (80, 50)])
def test_a_step_of_decodes_and_prefills_equals_that_of_triton(head_dim: int, window: int | None) -> None:
    attention = replace(spec(8, 2, head_dim), window=window)
    lens = [(36, 1), (700, 1), (0, 1), (0, 33), (100, 20)]
    num_blocks = blocks_for(lens, 16)
    step = view(step_buffer(lens, 16, num_blocks))
    kv_layer = used_kv(step, attention, num_blocks, 16, torch.bfloat16)
    query = torch.randn(len(step.token_ids), 8, head_dim, device="cuda", dtype=torch.bfloat16)
    results = []
    for kernels in (CudaKernels(), TritonKernels()):
        results.append(kernels.paged_attention(query, kv_layer, kernels.plan(step, attention, kv_layer)))
    torch.testing.assert_close(*results, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("m", [1, 5, 16, 17, 200])
@pytest.mark.parametrize(("n", "k"), [(300, 4096), (64, 72)])
def test_linear_layers_of_any_shape(m: int, n: int, k: int) -> None:
    weight, bias = torch.randn(n, k, device="cuda").bfloat16() * k**-0.5, torch.randn(n, device="cuda").bfloat16()
    apply = CudaKernels().pack_linear(weight, bias)
    for x in (torch.randn(m, k, device="cuda").bfloat16(), torch.randn(m, k + 1, device="cuda").bfloat16()[:, 1:]):
        expected = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(apply(x).double(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("m", [1, 6, 16, 17, 200])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_layer_of_fused_kernels_equals_one_of_single_ones(m: int, activation: str) -> None:
    torch.manual_seed(0)
    kernels, plain = CudaKernels(), ReferenceKernels()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    norm = Norm(weight=random(1024), eps=1e-6)
    gate_up, down = (kernels.pack_linear(random(n, k) * k**-0.5, None) for n, k in ((6144, 1024), (1024, 3072)))
    hidden = random(m, 1024)
    expected = hidden.clone()
    inner = kernels.norm_gated(hidden, norm, gate_up, activation)
    expected_inner = plain.gated(gate_up(plain.norm(expected, norm)), activation)
    torch.testing.assert_close(inner, expected_inner, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(
        kernels.norm_linear(hidden, norm, gate_up), gate_up(plain.norm(expected, norm)), atol=3e-2, rtol=3e-2
    )
    assert kernels.linear_add(hidden, inner, down) is None
    torch.testing.assert_close(hidden, expected + down(inner), atol=3e-2, rtol=3e-2)
    # cuBLAS adds one of the two.
    biased = kernels.pack_linear(random(1024, 3072) * 3072**-0.5, random(1024))
    expected = hidden.clone()
    delta = kernels.linear_add(hidden, inner, biased)
    assert (delta is None) == (m <= 16)
    torch.testing.assert_close(
        hidden if delta is None else hidden + delta, expected + biased(inner), atol=3e-2, rtol=3e-2
    )
