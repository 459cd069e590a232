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


LINE_BREAK, EOS, TURN_BEGINS, TURN_ENDS = 198, 257, 258, 259
"""Ids of the tiny models' tokenizer."""


def saying(prompt_token_ids: list[int], token_ids: list[int], logits: Tensor) -> Tensor:
    """The prompt's own tokens and then the end: a model whose output a test writes. Of a chat, its last message's."""
    script = prompt_token_ids
    if TURN_BEGINS in script:
        turn = script[: -script[::-1].index(TURN_ENDS) - 1]
        turn = turn[-turn[::-1].index(TURN_BEGINS) :]
        script = turn[turn.index(LINE_BREAK) + 1 :]
    step = len(token_ids)
    wanted = script[step] if step < len(script) else EOS
    return torch.where(torch.arange(len(logits)) == wanted, 10.0, float("-inf"))


def even(token_ids: list[int], logits: Tensor) -> Tensor:
    """Only even ids."""
    logits[1::2] = float("-inf")
    return logits


LETTERS = slice(64, 90)
"""Ids of a to z."""


def settled(token_ids: list[int], logits: Tensor) -> Tensor:
    """Letters, in an order that the ones before decide: each step tells beams apart far less than those before it, so
    that all of a step's beams go on from the best one of the step before. For 30 tokens at most.
    """
    step = len(token_ids)
    order = (7 * torch.arange(26) + 3 * sum(token_ids) + step) % 26
    scores = torch.full_like(logits, float("-inf"))
    scores[LETTERS] = -order * 6.0 ** (30 - step)
    return scores


def failing(token_ids: list[int], logits: Tensor) -> Tensor:
    """Fails at the third token."""
    if len(token_ids) == 2:
        raise RuntimeError("no third token")
    return logits
