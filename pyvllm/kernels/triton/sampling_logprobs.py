"""Log-probabilities and the best tokens of rows, without sorting.

One kernel reads the logits once, tile by tile: greatest value, mass, how many are greater than the token's own, the
best of each small group. A second one, one program a row, adds these up, gathers the best groups and takes out their
best logits one after another.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyvllm.kernels import plain_sampling
from pyvllm.kernels.plain_sampling import LogprobRows
from pyvllm.kernels.triton.sampling_search import (
    DEFAULT,
    NEVER,
    SamplingConfig,
    gather_best,
    key_of,
    lanes,
    tiles_each,
    value_of,
)

# Each of the best costs a reduction; beyond this many it is quicker to sort.
_MOST: Final = 256
LEAST_ORDER = tl.constexpr(-(2**63))


def logprobs(
    logits: Tensor, tokens: Tensor, wanted: Tensor, max_top: int, vocab_size: int, config: SamplingConfig = DEFAULT
) -> LogprobRows:
    """See `Kernels.logprobs`."""
    if max_top > _MOST:
        return plain_sampling.logprob_rows(logits, tokens, wanted, max_top, vocab_size)
    shape, device = (len(logits), 1 + max_top), logits.device
    table = LogprobRows(
        token_ids=torch.empty(shape, dtype=torch.int32, device=device),
        logprobs=torch.empty(shape, dtype=torch.float32, device=device),
        ranks=torch.empty(len(logits), dtype=torch.int32, device=device),
    )
    _launch(logits, tokens, wanted, table.logprobs, table.token_ids, table.ranks, max_top, vocab_size, config)
    return table


def best(
    values: Tensor, count: int, wanted: Tensor, vocab_size: int, config: SamplingConfig = DEFAULT
) -> tuple[Tensor, Tensor]:
    """See `Kernels.best`."""
    if count > _MOST:
        return plain_sampling.best_rows(values, count, vocab_size)
    greatest = torch.empty(len(values), count, dtype=torch.float32, device=values.device)
    token_ids = torch.empty(len(values), count, dtype=torch.int32, device=values.device)
    _launch(values, None, wanted, greatest, token_ids, None, count, vocab_size, config)
    return greatest, token_ids


def _launch(
    values: Tensor,
    tokens: Tensor | None,
    wanted: Tensor,
    out_values: Tensor,
    out_ids: Tensor,
    ranks: Tensor | None,
    count: int,
    vocab_size: int,
    config: SamplingConfig,
) -> None:
    """`tokens` and `ranks` None: values as they are, without a column for the token."""
    num_rows, device = len(values), values.device
    if num_rows == 0:
        return
    num_tiles = triton.cdiv(vocab_size, config.tile)
    num_groups = num_tiles * config.tile // config.group
    width = max(triton.next_power_of_2(count + 1), config.least_width)
    tiles = torch.empty(3, num_rows, num_tiles, dtype=torch.float32, device=device)
    group_best = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    scratch = torch.empty(2, num_rows, width * config.group, dtype=torch.int32, device=device)
    groups = torch.empty(num_rows, width, dtype=torch.int32, device=device)
    each = tiles_each(num_tiles, num_rows, config)
    summary_kernel[(triton.cdiv(num_tiles, each), num_rows)](
        values, tokens, wanted, tiles[0], tiles[1], tiles[2], group_best, values.stride(0), vocab_size, num_tiles, each,
        TILE=config.tile, GROUP=config.group, num_warps=8,
    )  # fmt: skip
    table_kernel[(num_rows,)](
        values, tokens, wanted, tiles[0], tiles[1], tiles[2], group_best, groups, scratch[0].view(torch.float32),
        scratch[1], out_values, out_ids, ranks, values.stride(0), vocab_size, num_tiles, num_groups, count,
        TILES_PAD=triton.next_power_of_2(num_tiles), GROUP=config.group, WIDTH=width, BLOCK=config.block, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_each"])
def summary_kernel(
    values: tl.tensor,
    tokens: tl.tensor,
    wanted: tl.tensor,
    tile_best: tl.tensor,
    tile_mass: tl.tensor,
    tile_above: tl.tensor,
    group_best: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    tiles_each: tl.tensor,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Grid: (cdiv(num_tiles, tiles_each), rows). What `table_kernel` needs of each tile of the rows wanted.

    Greatest value, mass relative to it, number of values greater than the token's.
    """
    row = tl.program_id(1).to(tl.int64)
    if tl.load(wanted + row) != 0:
        values += row * row_stride
        own = 0.0
        if tokens is not None:
            own = tl.load(values + tl.load(tokens + row)).to(tl.float32)
        first = tl.program_id(0) * tiles_each
        for tile in range(first, tl.minimum(first + tiles_each, num_tiles)):
            value = lanes(values, tile * TILE, vocab_size, TILE)
            best = tl.max(value, axis=0)
            mass = tl.sum(tl.exp(tl.where(value > NEVER, value - best, NEVER)), axis=0)
            at = row * num_tiles + tile
            tl.store(tile_best + at, best)
            tl.store(tile_mass + at, mass)
            tl.store(tile_above + at, tl.sum(tl.where(value > own, 1.0, 0.0), axis=0))
            group = tl.max(tl.reshape(value, [TILE // GROUP, GROUP]), axis=1)
            tl.store(group_best + at * (TILE // GROUP) + tl.arange(0, TILE // GROUP), group)


@triton.jit(do_not_specialize=["count"])
def table_kernel(
    values: tl.tensor,
    tokens: tl.tensor,
    wanted: tl.tensor,
    tile_best: tl.tensor,
    tile_mass: tl.tensor,
    tile_above: tl.tensor,
    group_best: tl.tensor,
    groups: tl.tensor,
    gathered: tl.tensor,
    gathered_ids: tl.tensor,
    out_values: tl.tensor,
    out_ids: tl.tensor,
    ranks: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    num_groups: tl.tensor,
    count: tl.tensor,
    TILES_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows,). The best `count` of each row; with `tokens`, log-probabilities, the token's own first."""
    row = tl.program_id(0).to(tl.int64)
    is_wanted = tl.load(wanted + row) != 0
    best_of_tile = lanes(tile_best + row * num_tiles, 0, num_tiles, TILES_PAD)
    best = tl.max(best_of_tile, axis=0)
    values += row * row_stride
    shift = 0.0
    log_sum = 0.0
    if tokens is None:
        out_values += row * count
        out_ids += row * count
    else:
        masses = lanes(tile_mass + row * num_tiles, 0, num_tiles, TILES_PAD)
        shift = best
        log_sum = tl.log(tl.sum(tl.where(best_of_tile > NEVER, masses * tl.exp(best_of_tile - best), 0.0), axis=0))
        above = tl.sum(tl.maximum(lanes(tile_above + row * num_tiles, 0, num_tiles, TILES_PAD), 0.0), axis=0)
        token = tl.load(tokens + row)
        own = tl.load(values + token).to(tl.float32) - shift - log_sum
        tl.store(out_values + row * (count + 1), tl.where(is_wanted, own, 0.0))
        tl.store(out_ids + row * (count + 1), tl.where(is_wanted, token, 0))
        tl.store(ranks + row, tl.where(is_wanted, above.to(tl.int32) + 1, 0))
        out_values += row * (count + 1) + 1
        out_ids += row * (count + 1) + 1
    if is_wanted & (count > 0):
        gathered += row * WIDTH * GROUP
        gathered_ids += row * WIDTH * GROUP
        size, _ = gather_best(
            values, vocab_size, group_best + row * num_groups, num_groups, best, groups + row * WIDTH,
            gathered, gathered_ids, GROUP, WIDTH, BLOCK,
        )  # fmt: skip
        if size >= count:
            take_out(gathered, gathered_ids, size, out_values, out_ids, count, shift, log_sum, True, BLOCK)
        else:
            take_out(values, gathered_ids, vocab_size, out_values, out_ids, count, shift, log_sum, False, BLOCK)
    else:
        for i in range(count):
            tl.store(out_values + i, 0.0)
            tl.store(out_ids + i, 0)


@triton.jit
def take_out(
    values: tl.tensor,
    ids: tl.tensor,
    size: tl.tensor,
    out_values: tl.tensor,
    out_ids: tl.tensor,
    count: tl.tensor,
    shift: tl.tensor,
    log_sum: tl.tensor,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the best `count` of `values[:size]`, less `shift` and `log_sum`, and their tokens, in order.

    `ids`: the values' tokens if `GATHERED`, else they are in order.
    """
    last = tl.full([], 2**63 - 1, tl.int64)
    for i in range(count):
        greatest = tl.full([BLOCK], LEAST_ORDER, tl.int64)
        for start in tl.range(0, size, BLOCK, num_stages=3):
            at = start + tl.arange(0, BLOCK)
            value = lanes(values, start, size, BLOCK)
            if GATHERED:
                token = tl.load(ids + at, mask=at < size, other=0)
            else:
                token = at
            # Unique, and in the order wanted: the value, then the lower id.
            order = (key_of(value).to(tl.int64) << 32) + (0x7FFFFFFF - token)
            greatest = tl.maximum(greatest, tl.where((at < size) & (order < last), order, LEAST_ORDER))
        last = tl.max(greatest, axis=0)
        tl.store(out_values + i, value_of((last >> 32).to(tl.int32)) - shift - log_sum)
        tl.store(out_ids + i, 0x7FFFFFFF - (last & 0xFFFFFFFF).to(tl.int32))
