"""Picking tokens without sorting.

One kernel reads the logits once, tile by tile. Rows that are greedy or drawn from whole need only each tile's best; a
second kernel reduces those. Of rows with top_k, top_p or min_p it keeps each tile's mass and the best of each small
group; a third kernel, one program a row, gathers the best groups and searches their logits, or the whole row if they
do not hold all survivors, for the cut; then it draws among what is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyvllm.kernels.plain_sampling import FILTERS
from pyvllm.kernels.triton.sampling_search import (
    DEFAULT,
    LOWEST,
    MAX_KEY,
    NEVER,
    SamplingConfig,
    chance,
    gather_best,
    key_of,
    lanes,
    middle_of,
    search,
    tally,
    tiles_each,
    value_of,
)
from pyvllm.step import Flags, RowParam

FIELDS = tl.constexpr(len(RowParam))
TEMPERATURE = tl.constexpr(int(RowParam.TEMPERATURE))
TOP_K = tl.constexpr(int(RowParam.TOP_K))
TOP_P = tl.constexpr(int(RowParam.TOP_P))
MIN_P = tl.constexpr(int(RowParam.MIN_P))
KEY_0 = tl.constexpr(int(RowParam.NOISE_KEY_0))
KEY_1 = tl.constexpr(int(RowParam.NOISE_KEY_1))
# Values this far below the greatest do not add up to what float32 tells from 0 beside its mass of 1, however many.
MASSLESS = tl.constexpr(32.0)


def pick(values: Tensor, row_params: Tensor, flags: Flags, vocab_size: int, config: SamplingConfig = DEFAULT) -> Tensor:
    """See `Kernels.pick`."""
    num_rows, device = len(values), values.device
    num_tiles = triton.cdiv(vocab_size, config.tile)
    tiles = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=device)
    tile_ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=device)
    random, filtered = Flags.RANDOM in flags, Flags.RANDOM in flags and bool(flags & FILTERS)
    groups_each = num_tiles * config.tile // config.group
    group_best = torch.empty(num_rows, groups_each, dtype=torch.float32, device=device) if filtered else None
    each = tiles_each(num_tiles, num_rows, config)
    tiles_kernel[(triton.cdiv(num_tiles, each), num_rows)](
        values, row_params, tiles[0], tiles[1], tile_ids, group_best, values.stride(0), vocab_size, num_tiles, each,
        RANDOM=random, FILTERED=filtered, TILE=config.tile, GROUP=config.group, num_warps=8,
    )  # fmt: skip
    pad = triton.next_power_of_2(num_tiles)
    finish_kernel[(num_rows,)](
        row_params, tiles[0], tiles[1], tile_ids, tokens, vocab_size, num_tiles,
        RANDOM=random, FILTERED=filtered, TILES_PAD=pad, num_warps=1,
    )  # fmt: skip
    if group_best is not None:
        scratch = torch.empty(2, num_rows, config.width * config.group, dtype=torch.int32, device=device)
        groups = torch.empty(num_rows, config.width, dtype=torch.int32, device=device)
        filtered_kernel[(num_rows,)](
            values, row_params, tiles[0], tiles[1], group_best, groups, scratch[0].view(torch.float32), scratch[1],
            tokens, values.stride(0), vocab_size, num_tiles, groups_each,
            TILES_PAD=pad, GROUP=config.group, WIDTH=config.width, BLOCK=config.block, num_warps=16,
        )  # fmt: skip
    return tokens


@triton.jit
def float_field(params: tl.tensor, FIELD: tl.constexpr) -> tl.tensor:
    """A float field of a row's parameters."""
    return tl.load(params + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def rate_of(params: tl.tensor) -> tl.tensor:
    """1 / temperature of a row, 0 if it is greedy."""
    temperature = float_field(params, TEMPERATURE)
    return tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 0.0)


@triton.jit
def is_filtered(params: tl.tensor) -> tl.tensor:
    """Whether a row draws from less than all its tokens."""
    narrow = (tl.load(params + TOP_K) > 0) | (float_field(params, TOP_P) < 1) | (float_field(params, MIN_P) > 0)
    return narrow & (float_field(params, TEMPERATURE) > 0)


@triton.jit
def chances(scaled: tl.tensor, params: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """`chance` of a row's tokens `ids` int32."""
    key0 = tl.load(params + KEY_0).to(tl.uint32, bitcast=True)
    key1 = tl.load(params + KEY_1).to(tl.uint32, bitcast=True)
    return chance(scaled, key0, key1, ids.to(tl.uint32, bitcast=True))


@triton.jit(do_not_specialize=["tiles_each"])
def tiles_kernel(
    values: tl.tensor,
    row_params: tl.tensor,
    tile_best: tl.tensor,
    tile_score: tl.tensor,
    tile_ids: tl.tensor,
    group_best: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    tiles_each: tl.tensor,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Grid: (cdiv(num_tiles, tiles_each), rows). What `finish_kernel` and `filtered_kernel` need of each tile.

    `tile_best`: the greatest value. Greedy rows: `tile_ids`: its id. Drawn rows: `tile_score` and `tile_ids`: the
    greatest chance relative to `tile_best`, and whose. Filtered rows: `tile_score`: mass relative to `tile_best`.
    """
    row = tl.program_id(1).to(tl.int64)
    params = row_params + row * FIELDS
    rate = rate_of(params)
    first = tl.program_id(0) * tiles_each
    for tile in range(first, tl.minimum(first + tiles_each, num_tiles)):
        ids = tile * TILE + tl.arange(0, TILE)
        value = lanes(values + row * row_stride, tile * TILE, vocab_size, TILE)
        best = tl.max(value, axis=0)
        score = best
        wins = value == best
        if RANDOM:
            scaled = tl.where(value > NEVER, (value - best) * rate, NEVER)
            whole = rate > 0
            if FILTERED:  # noqa: SIM102 - with `and`, what is inside would be compiled for all
                if is_filtered(params):
                    score = tl.sum(tl.exp(scaled), axis=0)
                    group = tl.max(tl.reshape(value, [TILE // GROUP, GROUP]), axis=1)
                    place = (row * num_tiles + tile) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
                    tl.store(group_best + place, group)
                    whole = False
            if whole:
                drawn = chances(scaled, params, ids)
                score = tl.max(drawn, axis=0)
                wins = drawn == score
        tl.store(tile_best + row * num_tiles + tile, best)
        tl.store(tile_score + row * num_tiles + tile, score)
        tl.store(tile_ids + row * num_tiles + tile, tl.min(tl.where(wins, ids, vocab_size - 1), axis=0))


@triton.jit
def finish_kernel(
    row_params: tl.tensor,
    tile_best: tl.tensor,
    tile_score: tl.tensor,
    tile_ids: tl.tensor,
    tokens: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    TILES_PAD: tl.constexpr,
) -> None:
    """Grid: (rows,). The best of a row's tiles, unless it is filtered."""
    row = tl.program_id(0).to(tl.int64)
    params = row_params + row * FIELDS
    tile = tl.arange(0, TILES_PAD)
    best_of_tile = lanes(tile_best + row * num_tiles, 0, num_tiles, TILES_PAD)
    best = tl.max(best_of_tile, axis=0)
    score = best_of_tile
    elsewhere = False
    if RANDOM:
        rate = rate_of(params)
        if rate > 0:
            relative = lanes(tile_score + row * num_tiles, 0, num_tiles, TILES_PAD)
            score = tl.where(best_of_tile > NEVER, relative * tl.exp((best_of_tile - best) * rate), 0.0)
        if FILTERED:
            elsewhere = is_filtered(params)
    if not elsewhere:
        ids = tl.load(tile_ids + row * num_tiles + tile, mask=tile < num_tiles, other=vocab_size)
        token = tl.min(tl.where(score == tl.max(score, axis=0), ids, vocab_size - 1), axis=0)
        tl.store(tokens + row, tl.where(best > NEVER, token, 0))


@triton.jit
def filtered_kernel(
    values: tl.tensor,
    row_params: tl.tensor,
    tile_best: tl.tensor,
    tile_mass: tl.tensor,
    group_best: tl.tensor,
    groups: tl.tensor,
    gathered: tl.tensor,
    gathered_ids: tl.tensor,
    tokens: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    num_groups: tl.tensor,
    TILES_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (rows,). The draws of filtered rows. The last four pointers but `tokens` are scratch."""
    row = tl.program_id(0).to(tl.int64)
    params = row_params + row * FIELDS
    if is_filtered(params):
        of_tile = lanes(tile_best + row * num_tiles, 0, num_tiles, TILES_PAD)
        best = tl.max(of_tile, axis=0)
        rate = rate_of(params)
        token = tl.full([], 0, tl.int32)
        if best > NEVER:
            masses = lanes(tile_mass + row * num_tiles, 0, num_tiles, TILES_PAD)
            total = tl.sum(tl.where(of_tile > NEVER, masses * tl.exp((of_tile - best) * rate), 0.0), axis=0)
            values += row * row_stride
            gathered += row * WIDTH * GROUP
            gathered_ids += row * WIDTH * GROUP
            size, bound = gather_best(
                values, vocab_size, group_best + row * num_groups, num_groups, best, groups + row * WIDTH,
                gathered, gathered_ids, GROUP, WIDTH, BLOCK,
            )  # fmt: skip
            least = least_key(params, best, rate)
            if holds_all_survivors(gathered, size, bound, params, least, best, rate, total, BLOCK):
                token = sift(gathered, gathered_ids, size, vocab_size, params, least, best, rate, total, True, BLOCK)
            else:
                token = sift(
                    values, gathered_ids, vocab_size, vocab_size, params, least, best, rate, total, False, BLOCK
                )
        tl.store(tokens + row, tl.minimum(token, vocab_size - 1))


@triton.jit
def least_key(params: tl.tensor, best: tl.tensor, rate: tl.tensor) -> tl.tensor:
    """The key from which on values pass min_p."""
    least = tl.full([], LOWEST + 1, tl.int32)
    min_p = float_field(params, MIN_P)
    if min_p > 0:
        floor = tl.log(min_p)
        fails = least - 1
        least = key_of(best)
        while fails + 1 < least:
            middle = middle_of(fails, least)
            passes = (value_of(middle) - best) * rate >= floor
            least = tl.where(passes, middle, least)
            fails = tl.where(passes, fails, middle)
    return least


@triton.jit
def holds_all_survivors(
    gathered: tl.tensor,
    size: tl.tensor,
    bound: tl.tensor,
    params: tl.tensor,
    least: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    total: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Whether all tokens that pass a row's filters are among those above `bound`, all of them gathered."""
    top_k, min_p = tl.load(params + TOP_K), float_field(params, MIN_P)
    _, mass = tally(gathered, size, bound, best, rate, BLOCK)
    by_count = (top_k > 0) & (size >= top_k)
    by_floor = (min_p > 0) & (least > key_of(bound))
    by_mass = (top_k == 0) & (min_p == 0) & (mass >= float_field(params, TOP_P) * total) & (size > 0)
    return (bound == NEVER) | by_count | by_floor | by_mass


@triton.jit
def sift(
    values: tl.tensor,
    ids: tl.tensor,
    size: tl.tensor,
    vocab_size: tl.tensor,
    params: tl.tensor,
    least: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    total: tl.tensor,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token that a row draws from `values[:size]` after its filters.

    `ids`: the values' tokens if `GATHERED`, else they are in order. `least`: of `least_key`. `total`: the row's mass.
    """
    top_k, top_p = tl.load(params + TOP_K), float_field(params, TOP_P)
    cut = least
    high = key_of(best) + 1
    if top_k > 0:
        cut = search(values, size, cut, high, top_k, best, 0.0, BLOCK)
    last_id = vocab_size - 1
    if top_p < 1:
        if (top_k > 0) | (float_field(params, MIN_P) > 0):
            ties, above = tally(values, size, value_of(cut), best, rate, BLOCK)
            total = above + ties * tl.exp((value_of(cut) - best) * rate)
        target = top_p * total
        low = tl.maximum(cut, key_of(best - MASSLESS / rate))
        cut = search(values, size, low, high, target, best, rate, BLOCK)
        ties, above = tally(values, size, value_of(cut), best, rate, BLOCK)
        each = tl.exp((value_of(cut) - best) * rate)
        kept = tl.maximum(tl.where(each > 0, tl.ceil((target - above) / each), ties), 1.0)
        if kept < ties:
            last_id = id_of_tie(values, ids, size, vocab_size, value_of(cut), kept, GATHERED, BLOCK)
    return draw(values, ids, size, params, value_of(cut), last_id, best, rate, GATHERED, BLOCK)


@triton.jit
def token_ids(
    ids: tl.tensor, start: tl.tensor, size: tl.tensor, GATHERED: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Tokens of the values from `start` on."""
    at = start + tl.arange(0, BLOCK)
    if GATHERED:
        at = tl.load(ids + at, mask=at < size, other=0)
    return at


@triton.jit
def id_of_tie(
    values: tl.tensor,
    ids: tl.tensor,
    size: tl.tensor,
    vocab_size: tl.tensor,
    value: tl.tensor,
    count: tl.tensor,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The `count`-th lowest token among those of `value`."""
    low = -1
    high = vocab_size - 1
    while low + 1 < high:
        middle = (low + high) // 2
        counts = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, size, BLOCK, num_stages=3):
            tied = lanes(values, start, size, BLOCK) == value
            counts += tl.where(tied & (token_ids(ids, start, size, GATHERED, BLOCK) <= middle), 1.0, 0.0)
        if tl.sum(counts, axis=0) < count:
            low = middle
        else:
            high = middle
    return high


@triton.jit
def draw(
    values: tl.tensor,
    ids: tl.tensor,
    size: tl.tensor,
    params: tl.tensor,
    cut: tl.tensor,
    last_id: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token with the greatest chance among those above `cut`, and those at it up to `last_id`."""
    best_score = tl.zeros([BLOCK], tl.float32)
    best_id = tl.full([BLOCK], MAX_KEY, tl.int32)
    for start in tl.range(0, size, BLOCK, num_stages=3):
        value = lanes(values, start, size, BLOCK)
        token = token_ids(ids, start, size, GATHERED, BLOCK)
        survives = (value > cut) | ((value == cut) & (token <= last_id))
        score = tl.where(survives, chances((value - best) * rate, params, token), 0.0)
        better = score > best_score
        best_score = tl.where(better, score, best_score)
        best_id = tl.where(better, token, best_id)
    return tl.min(tl.where(best_score == tl.max(best_score, axis=0), best_id, MAX_KEY), axis=0)
