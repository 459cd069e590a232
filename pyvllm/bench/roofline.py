"""The hardware's limit: how long a workload takes if memory and arithmetic alone count.

A step of n tokens, of which `rows` get logits, takes

    max(weights of layers / B, FLOP of layers · n / F) + max(weights of head / B, FLOP of head · rows / F)
    + KV read by decoding / B + FLOP of prompts' attention / (0.75 F)

on a device of bandwidth B and arithmetic speed F. Steps follow one another as a scheduler would make them: prompts
enter as there is room, those that generate go on, the last ones run alone. Nothing else takes time. KV that requests
share is read once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

import torch

from pyvllm.bench.workloads import Workload
from pyvllm.config import DEVICE_DEFAULTS, EngineArgs
from pyvllm.models import Decoder, ModelSpec

_PREFILL_ATTENTION: Final = 0.75
"""Share of the arithmetic speed that attention of prompts can reach: its exponentials are not matrix products."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device."""

    bandwidth: float
    """Bytes a second."""
    flops: float
    """Floating-point operations a second, in the type of the weights."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What a token costs."""

    layer_params: int
    """Weights of all layers."""
    head_params: int
    """Weights of the output matrix."""
    kv_bytes: int
    """KV memory of a token."""
    pair_flop: int
    """Of attention, for a query and a key, in all layers."""
    weight_bytes: int
    """Of one weight."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a step, and the device's memory, hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: float
    """Tokens of the KV pool; infinite if it does not matter."""


def model_cost(spec: ModelSpec, dtype: torch.dtype) -> ModelCost | None:
    """Costs of a model; None if the formulas do not fit it: experts and sliding windows."""
    if spec.experts is not None or any(spec.windows):
        return None
    slots = Decoder(spec, max_model_len=1, dtype=dtype, device=torch.device("meta")).slots()
    return ModelCost(
        layer_params=sum(slot.numel() for name, slot in slots.items() if name.startswith("layers.")),
        head_params=spec.vocab_size * (spec.embed_size or spec.hidden_size),
        kv_bytes=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize,
        pair_flop=4 * spec.num_layers * spec.num_heads * spec.head_dim,
        weight_bytes=dtype.itemsize,
    )


def step_limits(args: EngineArgs, cost: ModelCost, device: torch.device) -> Limits:
    """What the engine's arguments allow. A GPU's memory limits the KV pool: 4 GB are left for all but weights."""
    defaults = DEVICE_DEFAULTS[device.type]
    kv_tokens = math.inf
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        weights = (cost.layer_params + cost.head_params) * cost.weight_bytes
        kv_tokens = (args.gpu_memory_utilization * total - weights - 4e9) / cost.kv_bytes
    return Limits(
        max_num_seqs=args.max_num_seqs or defaults.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or defaults.max_num_batched_tokens,
        kv_tokens=kv_tokens,
    )


@dataclass(slots=True)
class _Sequence:
    """A sequence that waits or whose prompt runs."""

    prompt_len: int
    computed: int
    """Tokens of the prompt that are computed."""
    output_len: int
    group: object
    shared_len: int
    """Tokens at the beginning that the group shares."""


class _Simulation:
    """The steps of one workload."""

    def __init__(self, cost: ModelCost, hardware: Hardware, limits: Limits, workload: Workload) -> None:
        self.cost, self.hardware, self.limits = cost, hardware, limits
        self.waiting = deque(_sequences(workload))
        self.prompts: deque[_Sequence] = deque()
        """Those whose prompt is not all computed."""
        self.ending: dict[int, list[_Sequence]] = {}
        """Step in which it generates its last token -> sequences."""
        self.groups: Counter[object] = Counter()
        """Decoding sequences by group."""
        self.running = self.decoding = 0
        """Sequences: all, and those whose prompt is done."""
        self.context = self.reserved = self.step = 0
        """Tokens of KV that decoding reads, each group's shared ones once; tokens of KV memory in use; steps done."""

    def run(self) -> float:
        """Seconds of all steps."""
        seconds = 0.0
        while self.waiting or self.prompts or self.decoding:
            seconds += self._run_step()
        return seconds

    def _run_step(self) -> float:
        decoding, context = self.decoding, self.context
        pairs, tokens, ended = self._run_prompts(self.limits.max_num_batched_tokens - decoding)
        self.context += decoding  # each has one token more to read
        for sequence in self.ending.pop(self.step, ()):
            self._end(sequence)
        for sequence in ended:
            self._begin_decoding(sequence)
        self.step += 1
        return self._seconds(decoding + tokens, decoding + len(ended), context, pairs)

    def _run_prompts(self, budget: int) -> tuple[float, int, list[_Sequence]]:
        """Pairs of query and key, tokens, and the sequences whose prompt is done."""
        pairs, tokens, ended = 0.0, 0, []
        while budget > tokens and (self.prompts or self._admit()):
            sequence = self.prompts[0]
            end = min(sequence.prompt_len, sequence.computed + budget - tokens)
            pairs += (end**2 - sequence.computed**2) / 2
            tokens += end - sequence.computed
            sequence.computed = end
            if end == sequence.prompt_len:
                ended.append(self.prompts.popleft())
        return pairs, tokens, ended

    def _admit(self) -> bool:
        """Let the next one in if there is room for all that it will need."""
        if not self.waiting:
            return False
        sequence = self.waiting[0]
        needed = sequence.prompt_len + sequence.output_len
        full = self.running >= self.limits.max_num_seqs or self.reserved + needed > self.limits.kv_tokens
        if self.running and full:
            return False
        self.running += 1
        self.reserved += needed
        self.prompts.append(self.waiting.popleft())
        return True

    def _begin_decoding(self, sequence: _Sequence) -> None:
        """Its first token came with the last of its prompt."""
        if sequence.output_len == 1:
            self._leave(sequence)
            return
        self.ending.setdefault(self.step + sequence.output_len - 1, []).append(sequence)
        self.decoding += 1
        self.context += sequence.prompt_len + 1
        self.groups[sequence.group] += 1
        if self.groups[sequence.group] > 1:
            self.context -= sequence.shared_len

    def _end(self, sequence: _Sequence) -> None:
        """It has its last token."""
        self._leave(sequence)
        self.decoding -= 1
        self.context -= sequence.prompt_len + sequence.output_len
        self.groups[sequence.group] -= 1
        if self.groups[sequence.group]:
            self.context += sequence.shared_len

    def _leave(self, sequence: _Sequence) -> None:
        self.running -= 1
        self.reserved -= sequence.prompt_len + sequence.output_len

    def _seconds(self, tokens: int, rows: int, context: int, pairs: float) -> float:
        cost, bandwidth, flops = self.cost, self.hardware.bandwidth, self.hardware.flops

        def product(params: int, count: int) -> float:
            return max(params * cost.weight_bytes / bandwidth, 2 * params * count / flops) if count else 0.0

        return (
            product(cost.layer_params, tokens)
            + product(cost.head_params, rows)
            + context * cost.kv_bytes / bandwidth
            + pairs * cost.pair_flop / (_PREFILL_ATTENTION * flops)
        )


def _sequences(workload: Workload) -> list[_Sequence]:
    """In the order of the requests. What is shared is computed by the first only."""
    sequences, seen = [], set()
    for number, request in enumerate(workload.requests):
        shared_len = workload.shared_len if workload.n == 1 else len(request.prompt)
        group = tuple(request.prompt[:shared_len]) if workload.n == 1 and shared_len else number
        for _ in range(workload.n):
            # The last token of a prompt is always computed: it gives the first token of the output.
            computed = min(shared_len, len(request.prompt) - 1) if group in seen else 0
            sequences.append(
                _Sequence(
                    prompt_len=len(request.prompt),
                    computed=computed,
                    output_len=request.output_len,
                    group=group,
                    shared_len=shared_len,
                )
            )
            seen.add(group)
    return sequences


def ideal_seconds(cost: ModelCost, hardware: Hardware, limits: Limits, workload: Workload) -> float:
    """The least time that a workload can take."""
    return _Simulation(cost, hardware, limits, workload).run()
