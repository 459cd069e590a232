"""A model of LLaMA 3 8B's sizes, with 4 layers and random weights: bfloat16 on the GPU's kernels against float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyvllm.bench.models import LLAMA3_8B
from pyvllm.hub import ModelFiles
from pyvllm.kernels import AnyKernels
from pyvllm.kernels.cuda.kernels import CudaKernels, reason_against
from pyvllm.kernels.reference import ReferenceKernels
from pyvllm.kernels.triton.kernels import TritonKernels
from pyvllm.models import Decoder, build_spec
from pyvllm.weights import load_weights
from tests.tiny_models import Paged

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)
BLOCK_SIZE = 64
SPEC = build_spec(LLAMA3_8B | {"num_hidden_layers": 4})
MAX_LEN = 1024
NO_FILES = ModelFiles(name="random", path=Path(), config=LLAMA3_8B, generation_config=None)


def texts() -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(0)
    lens = {0: 720, 1: 100, 2: 40, 3: 30}
    return {i: torch.randint(SPEC.vocab_size, (n,), generator=generator).tolist() for i, n in lens.items()}


def make(kernels: AnyKernels, dtype: torch.dtype) -> Paged:
    """Weights are those of bfloat16 in float32 too."""
    decoder = Decoder(SPEC, max_model_len=MAX_LEN, dtype=dtype, device=GPU)
    slots = decoder.slots()
    rounded = {name: torch.empty_like(slot, dtype=torch.bfloat16) for name, slot in slots.items()}
    load_weights(SPEC, rounded, NO_FILES, load_format="dummy")
    for name, slot in slots.items():
        slot.copy_(rounded[name])
    decoder.pack(kernels)
    return Paged(decoder, block_size=BLOCK_SIZE, kernels=kernels, num_tokens=2 * MAX_LEN, dtype=dtype, device=GPU)


def steps(paged: Paged) -> Iterator[tuple[str, Mapping[int, list[int]]]]:
    """What is computed, and tokens by sequence: a prompt in chunks beside others, decode steps, a cached prefix."""
    text = texts()
    yield "prompts", {0: text[0][:500]}
    yield "prompts", {0: text[0][500:704], 1: text[1][:80], 2: text[2][:1]}
    for i in range(12):
        decodes = {0: text[0][704 + i : 705 + i], 1: text[1][80 + i : 81 + i], 2: text[2][1 + i : 2 + i]}
        yield "decodes", decodes
    paged.share(3, 0, 704 // BLOCK_SIZE)
    yield "cached prefix", {2: text[2][13:14], 3: text[3]}


def logprobs(paged: Paged) -> dict[str, Tensor]:
    """[tokens, V] float32 by what is computed."""
    found: dict[str, list[Tensor]] = {}
    for kind, tokens in steps(paged):
        for logits in paged.step(tokens).values():
            # Prompts have more rows than memory should hold: their last ones have seen the most.
            found.setdefault(kind, []).append(logits[-64:].float().log_softmax(-1))
    return {kind: torch.cat(parts) for kind, parts in found.items()}


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    return logprobs(make(ReferenceKernels(), torch.float32))


def errors(kernels: AnyKernels, exact: dict[str, Tensor]) -> dict[str, float]:
    """Root of the mean square of what bfloat16 changes."""
    found = logprobs(make(kernels, torch.bfloat16))
    return {kind: (found[kind] - exact[kind]).square().mean().sqrt().item() for kind in exact}


@pytest.fixture(scope="module")
def of_reference(exact: dict[str, Tensor]) -> dict[str, float]:
    """Of the reference kernels. Not nothing, and much less than log-probabilities differ by."""
    found = errors(ReferenceKernels(), exact)
    for kind, error in found.items():
        assert 1e-4 < error < 0.1 * exact[kind].std().item()
    return found


@pytest.mark.parametrize("kernels", [TritonKernels(), CudaKernels()], ids=lambda kernels: kernels.name)
def test_bfloat16_errs_hardly_more_than_the_reference_kernels_do(
    kernels: AnyKernels, exact: dict[str, Tensor], of_reference: dict[str, float]
) -> None:
    if kernels.name == "cuda" and (reason := reason_against(GPU)):
        pytest.skip(reason)
    for kind, error in errors(kernels, exact).items():
        assert error <= 1.3 * of_reference[kind], kind
