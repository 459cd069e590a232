"""The runner: steps that run ahead, blocks that move, prompt log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels
from pyvllm.kv_cache import KVCache, block_bytes
from pyvllm.models import build_spec
from pyvllm.runner import Runner
from tests.plans import Entry, plan_buffer
from tests.tiny_models import CPU, Paged, config_of, hf_logits, hf_model, load, plain_config, random_ids


@pytest.fixture
def running() -> tuple[Any, Runner, Paged]:
    model = hf_model("llama-gqa")
    paged = Paged(load(build_spec(config_of(model)), model.state_dict()), block_size=4)
    return model, Runner(paged.decoder, paged.kv, paged.kernels, max_num_seqs=8), paged


def test_steps_run_ahead_of_their_tokens(running: tuple[Any, Runner, Paged]) -> None:
    """Each step names the token before it by its row; nothing waits in between."""
    model, runner, paged = running
    texts = [random_ids(9), random_ids(14)]
    buffers = [plan_buffer([paged.entry(i, texts[i]) for i in (0, 1)], block_size=4)]
    order = [(0, 1), (1, 0)] * 3
    for number in range(1, 6):
        entries = [paged.entry(i, [-1 - order[number - 1].index(i)]) for i in order[number]]
        buffers.append(plan_buffer(entries, block_size=4, step=number))
    launched = [runner.launch(buffer) for buffer in buffers]
    assert [step.step for step in launched] == list(range(6))
    found: dict[int, list[int]] = {0: [], 1: []}
    for number, step in enumerate(launched):
        token_ids, logprobs, table, prompt, _ = step.wait()
        assert token_ids.shape == logprobs.shape == (2, 1)
        assert table is None
        assert prompt is None
        for sequence, token in zip(order[number], token_ids[:, 0].tolist(), strict=True):
            found[sequence].append(token)
    for sequence, text in enumerate(texts):
        output = model.generate(torch.tensor([text]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert found[sequence] == output[0, len(text) :].tolist()


def test_rows_may_share_a_token_and_padding_is_dropped(running: tuple[Any, Runner, Paged]) -> None:
    model, runner, paged = running
    text = random_ids(7)
    entry = replace(paged.entry(0, text), num_rows=3)
    token_ids, _, table, *_ = runner.launch(plan_buffer([entry], block_size=4, num_logprobs=2)).wait()
    logprobs = hf_logits(model, text)[-1].log_softmax(-1)
    assert token_ids.tolist() == [[int(logprobs.argmax())]] * 3
    assert table is not None
    torch.testing.assert_close(torch.from_numpy(table.logprobs[:, 1:]), logprobs.topk(2).values.expand(3, 2))
    padded = plan_buffer([paged.entry(0, [token_ids[0, 0]])], block_size=4, pad_to=4)
    token_ids, sampled_logprobs, *_ = runner.launch(padded).wait()
    assert token_ids.shape == sampled_logprobs.shape == (1, 1)


def test_prompt_logprobs_equal_transformers(running: tuple[Any, Runner, Paged]) -> None:
    model, runner, paged = running
    text = random_ids(150)
    paged.kv.pool.zero_()
    decoder = load(paged.decoder.spec, model.state_dict(), max_model_len=160)
    runner = Runner(decoder, paged.kv, paged.kernels, max_num_seqs=8)
    rows = [(i, text[i + 1], 3) for i in range(149)]
    buffer = plan_buffer([paged.entry(0, text)], block_size=4, sections={"prompt_rows": rows})
    *_, table, _ = runner.launch(buffer).wait()
    assert table is not None
    logprobs = hf_logits(model, text)[:-1].log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(text[1:])[:, None])
    expected = torch.cat([own, logprobs.topk(3).values], 1)
    torch.testing.assert_close(torch.from_numpy(table.logprobs), expected, atol=1e-4, rtol=1e-4)
    assert table.token_ids[:, 0].tolist() == text[1:]
    assert table.ranks.tolist() == ((logprobs > own).sum(1) + 1).tolist()


def test_memory_of_prompt_logprobs_does_not_grow_with_the_prompt(
    running: tuple[Any, Runner, Paged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S031: logits are made for a bounded number of positions at once."""
    model, _, paged = running
    decoder = load(paged.decoder.spec, model.state_dict(), max_model_len=400)
    runner = Runner(decoder, paged.kv, paged.kernels, max_num_seqs=8)
    most = 0
    compute = decoder.logits

    def logits(hidden: Tensor, kernels: AnyKernels) -> Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return compute(hidden, kernels)

    monkeypatch.setattr(decoder, "logits", logits)
    text = random_ids(400)
    rows = [(i, text[i + 1], 0) for i in range(399)]
    entry = replace(paged.entry(0, text), num_rows=0)
    token_ids, _, table, prompt, _ = runner.launch(
        plan_buffer([entry], block_size=4, sections={"prompt_rows": rows})
    ).wait()
    assert token_ids.shape == (0, 1)
    assert table is None
    assert prompt is not None
    assert len(prompt.ranks) == 399
    assert most <= 64


def test_blocks_move_before_the_step_reads_them(running: tuple[Any, Runner, Paged]) -> None:
    """Swap out, swap in, copy, in this order, then the step: with other orders the text would be another."""
    model, _, paged = running
    spec = paged.decoder.spec
    kv = KVCache(spec, num_blocks=6, num_host_blocks=2, block_size=4, dtype=torch.float32, device=CPU)
    runner = Runner(paged.decoder, kv, paged.kernels, max_num_seqs=8)
    text = random_ids(7)
    runner.launch(plan_buffer([Entry(token_ids=text[:6], blocks=[1, 2])], block_size=4))
    # Block 1 leaves for the host's 0 and comes back as 4, block 2 is then 1's old place and copied on to 5.
    moves = {"swap_out": [(1, 0), (2, 1)], "swap_in": [(0, 4), (1, 1)], "copies": [(1, 5)]}
    entry = Entry(token_ids=text[6:], start=6, blocks=[4, 5])
    token_ids, *_ = runner.launch(plan_buffer([entry], block_size=4, sections=moves)).wait()
    assert int(token_ids[0, 0]) == int(hf_logits(model, text)[-1].argmax())
    # A step may do nothing but move.
    token_ids, *_ = runner.launch(plan_buffer([], block_size=4, sections={"copies": [(5, 0)]})).wait()
    assert token_ids.shape == (0, 1)
    assert torch.equal(kv.pool[:, 0], kv.pool[:, 5])


def test_block_bytes_are_those_of_the_pool() -> None:
    spec = build_spec(plain_config())
    kv = KVCache(spec, num_blocks=5, num_host_blocks=2, block_size=16, dtype=torch.bfloat16, device=CPU)
    assert kv.pool.nbytes == 5 * block_bytes(spec, block_size=16, dtype=torch.bfloat16)
    assert kv.host_pool.nbytes == 2 * block_bytes(spec, block_size=16, dtype=torch.bfloat16)
