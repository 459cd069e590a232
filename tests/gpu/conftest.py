"""What the tests on a GPU share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _release() -> Iterator[None]:
    """What a module's tests took is there for the next one's, and for other processes."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
