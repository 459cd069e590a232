"""How plans get to the device, and results back: through pinned memory, in the order of the device's stream.

Plans go to one place there, whose addresses captured graphs know.
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias

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


class HostStaging:
    """For a device that computes in the host's memory, at once: nothing is copied or waited for."""

    def fits(self, buffer: NDArray[np.int32]) -> bool:
        """Whether graphs can read the words that `put` gives: there are none."""
        return False

    def put(self, buffer: NDArray[np.int32]) -> Tensor:
        """The plan's words, which change with `buffer`."""
        return torch.from_numpy(buffer)

    def fetch(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def mark(self) -> None:
        """All that was asked for is done."""


class DeviceStaging:
    """Copies plans to one device and results from it without waiting for it."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        """`num_words`: of the longest plan that goes the fast way; see `staging_words`."""
        self._device = device
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

    def fetch(self, tensor: Tensor) -> Tensor:
        """The tensor in pinned host memory, once the device has got there; one that is on the host, itself."""
        if tensor.is_cpu:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def mark(self) -> torch.Event:
        """An event that happens once all that was asked for is done."""
        event = torch.Event(self._device)
        event.record()
        return event


Staging: TypeAlias = HostStaging | DeviceStaging


def make_staging(num_words: int, device: torch.device) -> Staging:
    """The staging for a device; `num_words` as in `DeviceStaging`."""
    return HostStaging() if device.type == "cpu" else DeviceStaging(num_words, device)
