"""How plans get to the device: through pinned memory, into one place there whose addresses captured graphs know."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyvllm.config import StepLimits
from pyvllm.step import HEADER_LEN, RowParam

_NUM_HOST_BUFFERS: Final = 3
"""The engine has at most two steps outstanding; with a third buffer it never waits for one."""
_PER_TOKEN, _PER_SEQUENCE, _PER_ROW = 3, 6, 1 + len(RowParam)
_EXTRA_WORDS: Final = 1 << 16
"""Room for what few rows need: penalties, masks, biases, moves of blocks, gaps between sections."""


def staging_words(limits: StepLimits, *, block_size: int) -> int:
    """Words of a plan of any step within `limits`, but for rare sections of great length."""
    blocks = -(-limits.max_model_len // block_size)
    fixed = HEADER_LEN + _PER_TOKEN * (limits.max_num_batched_tokens + limits.max_num_seqs)
    return fixed + limits.max_num_seqs * (_PER_SEQUENCE + _PER_ROW + blocks) + _EXTRA_WORDS


class Staging:
    """Copies plans to one device, in the order of its stream, without waiting for it."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        """`num_words`: of the longest plan that goes the fast way; see `staging_words`."""
        self._words = torch.empty(num_words, dtype=torch.int32, device=device)
        self._host: deque[tuple[Tensor, NDArray[np.int32], torch.Event]] = deque()
        for _ in range(_NUM_HOST_BUFFERS):
            pinned = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
            self._host.append((pinned, pinned.numpy(), torch.Event(device)))

    def fits(self, buffer: NDArray[np.int32]) -> bool:
        """Whether `put` gives words at the address that graphs read."""
        return len(buffer) <= len(self._words)

    def put(self, buffer: NDArray[np.int32]) -> Tensor:
        """The plan's words on the device, valid until the next call in stream order. `buffer` may change at once."""
        if not self.fits(buffer):
            return torch.from_numpy(buffer).pin_memory().to(self._words.device, non_blocking=True)
        pinned, array, copied = self._host[0]
        self._host.rotate(-1)
        copied.synchronize()  # long past, unless a failure left steps behind that nobody waited for
        array[: len(buffer)] = buffer
        words = self._words[: len(buffer)]
        words.copy_(pinned[: len(buffer)], non_blocking=True)
        copied.record()
        return words
