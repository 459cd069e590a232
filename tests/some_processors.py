"""Functions on logits that engines of tests know by name."""

import torch
from torch import Tensor

NOTHING = 7


def counting(prompt_token_ids: list[int], token_ids: list[int], logits: Tensor) -> Tensor:
    """Token 20, then 21 and so on."""
    assert prompt_token_ids
    return torch.where(torch.arange(len(logits)) == 20 + len(token_ids), 10.0, -10.0)


def next_one(token_ids: list[int], logits: Tensor) -> Tensor:
    """Each token's logit for the one after it."""
    return logits.roll(1)
