"""`StepView`: the sections of a plan's buffer as tensor slices, without a copy.

The layout is described, with shapes, in `rust_core/src/plan.rs`; this module is its Python side and
`tests/test_step.py` holds the two together.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyvllm import _core

StepResult: TypeAlias = tuple[
    NDArray[np.int32],
    NDArray[np.float32],
    _core.LogprobTable | None,
    _core.LogprobTable | None,
    _core.LogprobTable | None,
]
"""Sampled tokens [R, k], their log-probabilities [R, k], tables of the sampled tokens [R], of prompt tokens, and of the
candidates [R * k] of beams.
"""

MAGIC = 0x504C414E
SECTION_ALIGNMENT = 4
"""Words: each section starts at a multiple of it."""


class Header(IntEnum):
    """Index of each scalar at the start of the buffer."""

    MAGIC = 0
    STEP = 1
    NUM_TOKENS = 2
    NUM_SEQS = 3
    NUM_DECODES = 4
    NUM_ROWS = 5
    GRAPH_SIZE = 6
    MAX_QUERY_LEN = 7
    MAX_SEQ_LEN = 8
    NUM_CANDIDATES = 9
    MAX_LOGPROBS = 10
    FLAGS = 11
    NUM_CASCADES = 12
    NUM_SECTIONS = 13


class Flags(IntFlag):
    """What at least one row of the step needs."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    BEAM = 16


class RowParam(IntEnum):
    """Column of each field in `row_params` (f32 by bit pattern where plan.rs says f32)."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    PRESENCE_PENALTY = 4
    FREQUENCY_PENALTY = 5
    REPETITION_PENALTY = 6
    NOISE_KEY_0 = 7
    NOISE_KEY_1 = 8
    NUM_LOGPROBS = 9
    NUM_CANDIDATES = 10


SECTIONS = {
    "token_ids": 1, "positions": 1, "slot_mapping": 1, "query_start_loc": 1, "seq_lens": 1, "row_token": 1,
    "row_params": len(RowParam), "block_table_offsets": 1, "cascade_seqs": 1, "cascade_offsets": 1, "cascade_blocks": 1,
    "block_table_ids": 1, "swap_out": 2, "swap_in": 2, "copies": 2, "penalty_rows": 1, "penalty_offsets": 1,
    "penalty_tokens": 2, "bias": 3, "allowed_rows": 1, "allowed_offsets": 1, "allowed_ids": 1, "banned": 2,
    "prompt_rows": 3, "mask_rows": 1, "mask_words": 1,
}  # fmt: skip
"""Section name -> words in a row of it (1: a vector), in buffer order."""

_SPANS = {name: len(Header) + 2 * i for i, name in enumerate(SECTIONS)}
HEADER_LEN = len(Header) + 2 * len(SECTIONS)


class StepView:
    """One plan as tensors. All int32 on the buffer's device; symbols T, S, R as in plan.rs.

    The scalars are read from `header` on the host, so that building a view never waits for a device.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    row_token: Tensor
    row_params: Tensor
    block_table_offsets: Tensor
    cascade_seqs: Tensor
    cascade_offsets: Tensor
    cascade_blocks: Tensor
    block_table_ids: Tensor
    swap_out: Tensor
    swap_in: Tensor
    copies: Tensor
    penalty_rows: Tensor
    penalty_offsets: Tensor
    penalty_tokens: Tensor
    bias: Tensor
    allowed_rows: Tensor
    allowed_offsets: Tensor
    allowed_ids: Tensor
    banned: Tensor
    prompt_rows: Tensor
    mask_rows: Tensor
    mask_words: Tensor

    def __init__(self, buffer: Tensor, header: list[int]) -> None:
        """`buffer` [words] int32 on any device; `header`: its first `HEADER_LEN` words, on the host."""
        if header[Header.MAGIC] != MAGIC or header[Header.NUM_SECTIONS] != len(SECTIONS):
            raise ValueError("buffer is not a StepPlan of this version")
        self.step = header[Header.STEP]
        self.num_tokens = header[Header.NUM_TOKENS]
        self.num_seqs = header[Header.NUM_SEQS]
        self.num_decodes = header[Header.NUM_DECODES]
        self.num_rows = header[Header.NUM_ROWS]
        self.graph_size = header[Header.GRAPH_SIZE]
        self.max_query_len = header[Header.MAX_QUERY_LEN]
        self.max_seq_len = header[Header.MAX_SEQ_LEN]
        self.num_candidates = header[Header.NUM_CANDIDATES]
        self.max_logprobs = header[Header.MAX_LOGPROBS]
        self.flags = Flags(header[Header.FLAGS])
        self.num_cascades = header[Header.NUM_CASCADES]
        self._buffer = buffer
        self._header = header

    def __getattr__(self, name: str) -> Tensor:
        """A section, sliced when it is first asked for: a captured graph needs none of them."""
        width = SECTIONS.get(name)
        if width is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        offset, length = self.span(name)
        section = self._buffer[offset : offset + length]
        section = section if width == 1 else section.view(-1, width)
        setattr(self, name, section)
        return section

    def span(self, section: str) -> tuple[int, int]:
        """Offset and length of a section in the buffer, words."""
        at = _SPANS[section]
        return self._header[at], self._header[at + 1]

    def has(self, *sections: str) -> bool:
        """Whether one of these sections holds anything."""
        return any(self._header[_SPANS[section] + 1] for section in sections)

    def row_floats(self, field: RowParam) -> Tensor:
        """A float field of `row_params`: [R] float32."""
        return self.row_params.view(torch.float32)[:, field]
