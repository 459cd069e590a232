"""The logits that tokens are drawn from, for users who ask to see them in place of the model's own."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pyvllm.kernels.plain_sampling import FILTERS, NEVER, best_of, floats, scale, survivors
from pyvllm.step import Flags, RowParam

BANNED: Final = torch.finfo(torch.float32).min
"""Logit of a banned token. Above -inf, so that a row whose allowed tokens are all banned stays among them; so low that
the token is never drawn beside one that is not banned.
"""


def processed_logits(values: Tensor, row_params: Tensor, flags: Flags, vocab_size: int) -> Tensor:
    """`values` [R, >= V] after temperature and filters, -inf for what cannot be drawn: [R, V] float32.

    `values`: after bias, penalties and masks. Rows that are greedy, or beams, stay as they are.
    """
    values = values[:, :vocab_size].float()
    possible = values > BANNED
    values = values.masked_fill(~possible & possible.any(-1, keepdim=True), NEVER)
    if Flags.RANDOM not in flags:
        return values
    temperature = floats(row_params, RowParam.TEMPERATURE)[:, None]
    result = values / torch.where(temperature > 0, temperature, 1)
    if flags & FILTERS:
        scaled = scale(values, row_params)
        best, ids = best_of(scaled, vocab_size)
        survives, _ = survivors(best, scaled, ids, row_params, flags)
        kept = torch.zeros_like(survives).scatter_(1, ids, survives)
        result.masked_fill_(~kept & (temperature > 0), NEVER)
    return result
