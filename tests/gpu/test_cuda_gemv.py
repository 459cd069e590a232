"""The skinny matrix product on a Hopper GPU."""

import pytest
import torch

from pyvllm.cuda_graph import Graphs
from pyvllm.kernels.cuda.linear import skinny_linear
from tests.linear_cases import LinearCase, make, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)

CASES = [
    *(LinearCase(m=m, n=6144, k=4096, norm=1) for m in (1, 2, 3, 8, 9, 16)),
    LinearCase(m=1, n=4096, k=4096, residual=True),
    LinearCase(m=2, n=14336, k=4096, norm=1, gated=True),
    LinearCase(m=4, n=4096, k=14336, residual=True),
    LinearCase(m=1, n=4096, k=1024, norm=1),
    LinearCase(m=1, n=1024, k=2048, residual=True),
    LinearCase(m=7, n=3072, k=1024, norm=2, gated=True),
    LinearCase(m=1, n=1024, k=3072, residual=True),
    LinearCase(m=1, n=151936, k=1024),
    LinearCase(m=3, n=1001, k=576, bias=True, residual=True),
    LinearCase(m=13, n=333, k=64, dtype=torch.float16, norm=1, gated=True, bias=True),
    LinearCase(m=1, n=1, k=4096),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_skinny_linear_equals_float32(case: LinearCase) -> None:
    inputs = make(case, torch.device("cuda", 0))
    out = skinny_linear(
        inputs.x, inputs.weight, bias=inputs.bias, norm=inputs.norm, residual=inputs.residual, gated=case.gated
    )
    assert (out is inputs.residual) == case.residual
    assert relative_error(out, inputs.expected) < (4e-3 if case.dtype == torch.bfloat16 else 5e-4)


def test_results_are_equal_bit_by_bit_from_run_to_run() -> None:
    inputs = make(LinearCase(m=5, n=1024, k=2048), torch.device("cuda", 0))
    first = skinny_linear(inputs.x, inputs.weight)
    assert all(torch.equal(first, skinny_linear(inputs.x, inputs.weight)) for _ in range(20))


def test_a_chain_of_kernels_that_overlap_reads_what_the_one_before_wrote() -> None:
    """In a graph, replayed: each kernel starts before the one before it has ended."""
    device = torch.device("cuda", 0)
    layers = [
        (make(LinearCase(m=m, n=3072, k=1024, norm=1), device), make(LinearCase(m=m, n=1024, k=3072), device))
        for m in range(1, 9)
    ]

    def forward(hidden: torch.Tensor) -> None:
        for first, second in layers:
            inner = skinny_linear(hidden, first.weight, norm=first.norm)
            skinny_linear(inner, second.weight, residual=hidden)

    def expected(hidden: torch.Tensor) -> torch.Tensor:
        for first, second in layers:
            assert first.norm is not None
            normed = torch.nn.functional.rms_norm(hidden.float(), (1024,), eps=first.norm.eps).bfloat16()
            inner = ((normed * first.norm.weight).float() @ first.weight.float().T).bfloat16()
            hidden = (hidden.float() + inner.float() @ second.weight.float().T).bfloat16()
        return hidden

    start = layers[1][0].x.contiguous()
    hidden = start.clone()
    graphs: Graphs[None] = Graphs(device)
    graphs.run("chain", lambda: forward(hidden))
    for _ in range(10):
        hidden.copy_(start)
        graphs.run("chain", lambda: forward(hidden))
        assert relative_error(hidden, expected(start).float()) < 1e-2
        start = start.roll(1, 1)


def test_wrong_arguments_are_named() -> None:
    inputs = make(LinearCase(m=1, n=64, k=64), torch.device("cuda", 0))
    with pytest.raises(ValueError, match="1 to 16 rows"):
        skinny_linear(inputs.x.expand(17, 64), inputs.weight)
    with pytest.raises(ValueError, match="bias is"):
        skinny_linear(inputs.x, inputs.weight, bias=inputs.weight[0, :32])
    with pytest.raises(ValueError, match="residual shares memory"):
        skinny_linear(square := inputs.weight[:1], inputs.weight, residual=square)
    with pytest.raises(ValueError, match="x has strides"):
        skinny_linear(inputs.x.new_zeros(64, 16).T[:1], inputs.weight)
