"""Plan buffers made in numpy, for tests that run without the Rust core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pyvllm.step import HEADER_LEN, MAGIC, SECTION_ALIGNMENT, SECTIONS, Header, RowParam, StepView


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A sequence's part in a step."""

    token_ids: Sequence[int]
    """Its query tokens."""
    start: int = 0
    """Position of the first of them: how many tokens have KV already."""
    blocks: Sequence[int]
    num_rows: int = 1
    """Rows of logits that the last token gives."""

    @property
    def seq_len(self) -> int:
        """Tokens of its context after the step."""
        return self.start + len(self.token_ids)


def plan_buffer(
    entries: Sequence[Entry],
    *,
    block_size: int,
    step: int = 0,
    pad_to: int = 0,
    num_logprobs: int = -1,
    sections: Mapping[str, ArrayLike] | None = None,
) -> NDArray[np.int32]:
    """The buffer of a step; sequences with one token must come first. All rows are greedy.

    `pad_to`: sequences after padding, for steps of one token and one row a sequence. `num_logprobs`: what all rows
    want. `sections` adds to or replaces what the entries give.
    """
    lens = [len(entry.token_ids) for entry in entries]
    assert lens == sorted(lens, key=lambda length: length != 1), "sequences with one token must come first"
    positions = [position for entry in entries for position in range(entry.start, entry.seq_len)]
    slots = [
        entry.blocks[position // block_size] * block_size + position % block_size
        for entry in entries
        for position in range(entry.start, entry.seq_len)
    ]
    starts = np.cumsum([0, *lens])
    row_token = [end - 1 for end, entry in zip(starts[1:], entries, strict=True) for _ in range(entry.num_rows)]
    offsets = np.cumsum([0, *(len(entry.blocks) for entry in entries)])
    padding = max(0, pad_to - len(entries))
    contents: dict[str, ArrayLike] = {
        "token_ids": [token for entry in entries for token in entry.token_ids] + [0] * padding,
        "positions": positions + [0] * padding,
        "slot_mapping": slots + [-1] * padding,
        "query_start_loc": [*starts, *(starts[-1] + 1 + np.arange(padding))],
        "seq_lens": [entry.seq_len for entry in entries] + [0] * padding,
        "row_token": row_token + [len(row_token) + i for i in range(padding)],
        "row_params": _row_params([num_logprobs] * len(row_token) + [-1] * padding),
        "block_table_offsets": [*offsets, *[offsets[-1]] * padding],
        "cascade_seqs": [0] * (len(entries) + padding),
        "cascade_offsets": [0] * (len(entries) + padding + 1),
        "cascade_blocks": [0] * (len(entries) + padding),
        "block_table_ids": [block for entry in entries for block in entry.blocks],
        "penalty_offsets": [0],
        "allowed_offsets": [0],
    }
    scalars = {
        Header.STEP: step,
        Header.NUM_TOKENS: len(positions),
        Header.NUM_SEQS: len(entries),
        Header.NUM_DECODES: lens.count(1),
        Header.NUM_ROWS: len(row_token),
        Header.GRAPH_SIZE: pad_to,
        Header.MAX_QUERY_LEN: max(lens, default=0),
        Header.MAX_SEQ_LEN: max((entry.seq_len for entry in entries), default=0),
        Header.NUM_CANDIDATES: 1,
        Header.MAX_LOGPROBS: num_logprobs if row_token else -1,
    }
    return encode(scalars, contents | dict(sections or {}))


def encode(scalars: Mapping[Header, int], contents: Mapping[str, ArrayLike]) -> NDArray[np.int32]:
    """A buffer of these header scalars and sections; what is not given is 0 or empty."""
    body = [np.asarray(contents.get(name, ()), dtype=np.int32).reshape(-1) for name in SECTIONS]
    header = np.zeros(HEADER_LEN, dtype=np.int32)
    for scalar, value in ({**scalars, Header.MAGIC: MAGIC, Header.NUM_SECTIONS: len(SECTIONS)}).items():
        header[scalar] = value
    header[len(Header) + 1 :: 2] = [len(words) for words in body]
    parts, end = [header], HEADER_LEN
    for i, words in enumerate(body):
        gap = -end % SECTION_ALIGNMENT
        header[len(Header) + 2 * i] = end + gap
        parts += [np.full(gap, -1, dtype=np.int32), words]
        end += gap + len(words)
    return np.concatenate(parts)


def view(buffer: NDArray[np.int32]) -> StepView:
    """The buffer as the runner sees it."""
    return StepView(torch.from_numpy(buffer), buffer[:HEADER_LEN].tolist())


def _row_params(num_logprobs: Sequence[int]) -> NDArray[np.int32]:
    params = np.zeros((len(num_logprobs), len(RowParam)), dtype=np.int32)
    one = np.float32(1).view(np.int32)
    params[:, RowParam.TOP_P] = params[:, RowParam.REPETITION_PENALTY] = one
    params[:, RowParam.NUM_LOGPROBS] = num_logprobs
    params[:, RowParam.NUM_CANDIDATES] = 1
    return params
