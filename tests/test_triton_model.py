"""A whole model on the Triton kernels, in Triton's interpreter, against the reference kernels."""

from __future__ import annotations

import pytest
import torch

from pyvllm.models import build_spec
from tests.tiny_models import Paged, config_of, hf_model, load, random_ids

triton_kernels = pytest.importorskip("pyvllm.kernels.triton.kernels", reason="triton is not installed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels do not run on a CPU")
@pytest.mark.parametrize("name", ["llama-mqa-biases", "mistral-window", "qwen3"])
def test_logits_are_those_of_the_reference(name: str) -> None:
    model = hf_model(name)
    spec, state = build_spec(config_of(model)), model.state_dict()
    ours, theirs = (
        Paged(load(spec, state), block_size=4, kernels=kernels) for kernels in (triton_kernels.TritonKernels(), None)
    )
    steps = [
        {0: random_ids(5), 1: random_ids(1)},
        {0: random_ids(1), 1: random_ids(3)},
        {0: random_ids(1), 1: random_ids(1)},
    ]
    for tokens in steps:
        expected = theirs.step(tokens)
        for sequence, logits in ours.step(tokens).items():
            torch.testing.assert_close(logits, expected[sequence], atol=1e-4, rtol=1e-4)
