"""Prefill attention in CUDA C++ on a Hopper GPU, against the reference."""

import pytest
import torch

from pyvllm.kernels.cuda.prefill import prefill_attention
from pyvllm.kernels.triton.attention import plan_attention
from tests import prefill_cases
from tests.attention_cases import blocks_for, spec, step_buffer, used_kv, view
from tests.prefill_cases import ENDS, PrefillCase

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)

_LLAMA = spec(32, 8, 128)
LARGE = [
    PrefillCase(name="Llama, ends", attention=_LLAMA, lens=ENDS),
    PrefillCase(name="Llama, uneven", attention=_LLAMA, lens=[(500, 3), (63, 65), (0, 700), (1000, 333), (0, 2)]),
    PrefillCase(name="all lengths", attention=spec(8, 2, 128), lens=[(7 * n, n + 2) for n in range(200)]),
    PrefillCase(name="long", attention=spec(4, 1, 128), lens=[(0, 5000), (9000, 100)], block_size=128),
]


@pytest.mark.parametrize("case", [*prefill_cases.CASES, *LARGE], ids=lambda case: case.name)
def test_prefill_attention_equals_the_reference(case: PrefillCase) -> None:
    prefill_cases.compare(case, prefill_attention)


def test_the_same_step_gives_the_same_bits() -> None:
    lens = [(100, 700), (0, 900), (2000, 50)]
    num_blocks = blocks_for(lens, 64)
    step = view(step_buffer(lens, 64, num_blocks))
    kv_layer = used_kv(step, _LLAMA, num_blocks, 64, torch.bfloat16)
    plan = plan_attention(step, _LLAMA, kv_layer)
    query = torch.randn(len(step.token_ids), 32, 128, device="cuda", dtype=torch.bfloat16)
    outputs = []
    for _ in range(20):
        outputs.append(query.new_full((len(query), 32 * 128), float("nan")))
        prefill_attention(query, kv_layer, outputs[-1], plan)
    assert all(torch.equal(outputs[0], output) for output in outputs)
