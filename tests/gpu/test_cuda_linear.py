"""The gated linear layer for many rows on a Hopper GPU."""

import pytest
import torch

from pyvllm.cuda_graph import Graphs
from pyvllm.kernels.cuda.gated_linear import gated_linear, tilings
from tests.linear_cases import LinearCase, make, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)

CASES = [
    *(LinearCase(m=m, n=3072, k=1024, gated=True) for m in (1, 17, 64, 65, 128, 129, 192, 193, 256, 300, 1000)),
    LinearCase(m=2100, n=1024, k=200, gated=True),
    LinearCase(m=200, n=136, k=8, dtype=torch.float16, gated=True),
]
"""Each is given to all tilings of its shape."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tiling_equals_float32(case: LinearCase) -> None:
    inputs = make(case, torch.device("cuda", 0))
    for tiling in tilings(case.n, multiprocessors=132):
        torch.empty_like(inputs.expected, dtype=case.dtype).fill_(float("nan"))  # what the result's memory holds
        out = gated_linear(inputs.x, inputs.weight, tiling=tiling)
        assert relative_error(out, inputs.expected) < (4e-3 if case.dtype == torch.bfloat16 else 6e-4), tiling


@pytest.mark.parametrize("m", [40, 200, 8192])
def test_results_are_equal_bit_by_bit_from_run_to_run(m: int) -> None:
    inputs = make(LinearCase(m=m, n=3072, k=1024, gated=True), torch.device("cuda", 0))
    first = gated_linear(inputs.x, inputs.weight)
    assert all(torch.equal(first, gated_linear(inputs.x, inputs.weight)) for _ in range(20))


def test_a_chain_of_kernels_that_overlap_reads_what_the_one_before_wrote() -> None:
    """In a graph, replayed: each kernel starts before the one before it has ended."""
    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # Results are about as large as what they are made of: twice that would be four times that a layer later.
    layers = [(random(2048, 1024) * 1.35 / 1024**0.5).bfloat16().to(device) for _ in range(4)]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        for weight in layers:
            hidden = gated_linear(hidden, weight)
        return hidden

    def expected(hidden: torch.Tensor) -> torch.Tensor:
        for weight in layers:
            gate, up = (hidden.double() @ weight.double().T).chunk(2, 1)
            hidden = (torch.nn.functional.silu(gate) * up).bfloat16()
        return hidden.float()

    start = random(200, 1024).bfloat16().to(device)
    hidden = start.clone()
    graphs: Graphs[torch.Tensor] = Graphs(device)
    graphs.run("chain", lambda: forward(hidden))
    for _ in range(10):
        hidden.copy_(start)
        result = graphs.run("chain", lambda: forward(hidden))
        assert relative_error(result, expected(start)) < 1e-2
        start = start.roll(1, 1)


def test_wrong_arguments_are_named() -> None:
    inputs = make(LinearCase(m=20, n=64, k=64, gated=True), torch.device("cuda", 0))
    with pytest.raises(ValueError, match="multiples of 8"):
        gated_linear(inputs.x, inputs.weight[:120])
    with pytest.raises(ValueError, match=r"x \[20, 64\] torch.bfloat16 with strides \(1, 20\)"):
        gated_linear(inputs.x.T.contiguous().T, inputs.weight)
