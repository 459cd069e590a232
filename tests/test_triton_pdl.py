"""Kernels that begin while the one before them still runs touch what it reads or writes only once they have waited.

In Triton's interpreter: of each program, until it waits, there is nothing but NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pyvllm.kernels import Attention, Norm
from pyvllm.kernels.reference import ReferenceKernels, ReferencePlan
from pyvllm.kernels.triton import activation, attention, decode_attention, heads, norm
from pyvllm.models import build_spec
from pyvllm.step import StepView
from tests import glue_cases as cases
from tests.attention_cases import SMALL, Cascade, cascade_buffer, spec, step_buffer, used_kv, view
from tests.glue_cases import HeadCase, Where
from tests.tiny_models import Paged, config_of, hf_model, load, random_ids

if torch.cuda.is_available():
    pytest.skip("kernels are compiled on a GPU", allow_module_level=True)

FLOAT32 = Where(device=torch.device("cpu"), dtype=torch.float32)
HEADS = HeadCase(num_heads=4, num_kv_heads=2, head_dim=16, rotated=16, query_norm="rms", key_norm="layer")

Case = tuple[ModuleType, Callable[..., object], list[Tensor]]
"""Where the kernel is, what launches it, and the tensors that it shares with other kernels: the first arguments."""


def _norm_case() -> Case:
    of = Norm(weight=FLOAT32.randn(32), eps=1e-5)
    return norm, lambda x: norm.norm(x, of), [FLOAT32.randn(3, 32)]


def _add_norm_case() -> Case:
    of = Norm(weight=FLOAT32.randn(32), bias=FLOAT32.randn(32), centred=True, eps=1e-5)
    return norm, lambda x, delta: norm.add_norm(x, delta, of), [FLOAT32.randn(3, 32), FLOAT32.randn(3, 32)]


def _heads_case() -> Case:
    of = cases.make_heads(HEADS, 50, FLOAT32)
    positions, slots = torch.tensor([3, 40, 7], dtype=torch.int32), torch.tensor([5, -1, 2], dtype=torch.int32)

    def launch(qkv: Tensor, kv_layer: Tensor) -> Tensor:
        return heads.rotate_and_store(qkv, of, positions, kv_layer, slots)

    return heads, launch, [FLOAT32.randn(3, 8 * 16), FLOAT32.randn(3, 2, 2, 4, 16)]


def _activation_case() -> Case:
    return activation, partial(activation.gated, activation="silu"), [FLOAT32.randn(3, 64)]


def _decode_case() -> Case:
    step = view(step_buffer([(36, 1), (0, 1), (70, 1)], 16, 12))
    of = spec()
    kv_layer = used_kv(step, of, 12, 16, torch.float32)
    plan = attention.plan_attention(step, of, kv_layer, SMALL)
    query = FLOAT32.randn(3, of.num_heads, of.head_dim)
    return decode_attention, lambda query, kv: attention.paged_attention(query, kv, plan), [query, kv_layer]


def _cascade_case() -> Case:
    """What the kernel before left, not queries and KV memory, which that kernel has read too."""
    step = view(cascade_buffer([Cascade(shared=32, own=[1, 20, 50])], [7], 16, 12))
    of = spec()
    kv_layer = used_kv(step, of, 12, 16, torch.float32)
    plan = attention.plan_attention(step, of, kv_layer, SMALL)
    query = FLOAT32.randn(4, of.num_heads, of.head_dim)
    decode = plan.decode
    assert decode is not None
    assert decode.cascade is not None
    cascade = decode.cascade

    def launch(stats: Tensor, outputs: Tensor) -> Tensor:
        left = replace(cascade, stats=stats, outputs=outputs)
        return attention.paged_attention(query, kv_layer, replace(plan, decode=replace(decode, cascade=left)))

    return decode_attention, launch, [cascade.stats, cascade.outputs]


@pytest.mark.parametrize(
    "make",
    [_norm_case, _add_norm_case, _heads_case, _activation_case, _decode_case, _cascade_case],
    ids=lambda make: make.__name__,
)
def test_nothing_is_touched_before_waiting(make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, launch, tensors = make()
    expected_tensors = [tensor.clone() for tensor in tensors]
    expected = launch(*expected_tensors)
    touched, hidden, empty = list(tensors), list[Tensor](), torch.empty

    def new(*args: Any, **options: Any) -> Tensor:
        """Memory that is new to this launch may be what the kernel before still reads."""
        touched.append(empty(*args, **options))
        return touched[-1]

    def begin() -> None:
        if not hidden:  # else the program before ended without waiting
            hidden.extend(tensor.clone() for tensor in touched)
            for tensor in touched:
                tensor.fill_(float("nan"))

    def wait() -> None:
        for tensor, kept in zip(touched, hidden, strict=True):
            assert tensor.isnan().all(), "written before waiting"
            tensor.copy_(kept)
        hidden.clear()

    monkeypatch.setattr(torch, "empty", new)
    monkeypatch.setattr(module, "allow_next", begin)
    monkeypatch.setattr(module, "wait_for_previous", wait)
    actual = launch(*tensors)
    if hidden:
        wait()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for tensor, expected_tensor in zip(tensors, expected_tensors, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=0, equal_nan=True)


def test_plans_are_made_before_the_embedding_behind_which_they_are_read_without_waiting() -> None:
    calls = []

    class Noting(ReferenceKernels):
        def plan(self, step: StepView, attention: Attention, kv_layer: Tensor) -> ReferencePlan:
            calls.append("plan")
            return super().plan(step, attention, kv_layer)

        def embed(self, token_ids: Tensor, previous: Tensor, table: Tensor) -> Tensor:
            calls.append("embed")
            return super().embed(token_ids, previous, table)

    model = hf_model("qwen2-window")
    decoder = load(build_spec(config_of(model)), model.state_dict())
    Paged(decoder, block_size=4, kernels=Noting()).step({0: random_ids(1)})
    assert calls == ["plan", "plan", "embed"]
