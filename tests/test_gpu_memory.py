"""What the trial that measures a GPU's memory runs, so that later steps find their kernels compiled."""

import pytest
import torch
from torch import Tensor

from pyvllm.config import StepLimits
from pyvllm.gpu_memory import _run_trial
from pyvllm.kernels import Attention
from pyvllm.kernels.reference import ReferenceKernels, ReferencePlan
from pyvllm.kv_cache import KVCache
from pyvllm.models import build_spec
from pyvllm.step import StepView
from tests.tiny_models import CPU, config_of, hf_model, load


class Watched(ReferenceKernels):
    """Notes how many tokens and how many sequences with one token each step has."""

    def __init__(self) -> None:
        self.steps: set[tuple[int, int]] = set()

    def plan(self, step: StepView, attention: Attention, kv_layer: Tensor) -> ReferencePlan:
        self.steps.add((step.num_tokens, step.num_decodes))
        return super().plan(step, attention, kv_layer)


@pytest.mark.parametrize("max_num_seqs", [2, 24])
def test_small_steps_and_prompts_beside_other_sequences_are_run(max_num_seqs: int) -> None:
    model, kernels = hf_model("llama-gqa"), Watched()
    spec = build_spec(config_of(model))
    limits = StepLimits(max_model_len=64, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    pool = KVCache(
        spec, num_blocks=100, num_host_blocks=0, block_size=16, dtype=torch.float32, device=CPU, one_layer=True
    )
    _run_trial(load(spec, model.state_dict()), pool, kernels, limits, 16, [])
    assert {tokens for tokens, _ in kernels.steps} >= set(range(1, 17))
    assert {(3, 1), (17, 1)} <= kernels.steps
