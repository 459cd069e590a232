"""Work lists of a step's attention, made on the device from its lengths: once a step, for all layers.

Nothing here is known to the host but upper bounds, so that a captured graph is right for any lengths. Items lie in the
order of their work, the longest first (to within a bucket): the hardware starts them in that order, and what is left at
the end is short.
"""

from __future__ import annotations

import triton
import triton.language as tl

BUCKETS = tl.constexpr(16)

ITEM_WORDS = tl.constexpr(8)
"""Words of an item: 32 bytes, so that one cache line serves it."""

MAX_SHARED_SLOTS = tl.constexpr(1 << 10)
"""Above the slots in which partial results over what a sequence shares lie: a word holds their number and the first."""


@triton.jit
def _ranks(bucket: tl.tensor, weight: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Count by bucket: ([N] weights before an element in its bucket, [BUCKETS] all weights).

    `bucket` and `weight` are [N] int32.
    """
    own = bucket[:, None] == tl.arange(0, BUCKETS)[None, :]
    weights = tl.where(own, weight[:, None], 0)
    before = tl.cumsum(weights, 0) - weights
    return tl.sum(tl.where(own, before, 0), 1), tl.sum(weights, 0)


@triton.jit
def _at_bucket(values: tl.tensor, bucket: tl.tensor) -> tl.tensor:
    """`values` [BUCKETS] at `bucket` [N]: [N]."""
    own = bucket[:, None] == tl.arange(0, BUCKETS)[None, :]
    return tl.sum(tl.where(own, values[None, :], 0), 1)


@triton.jit
def _decode_tiles(
    seq_lens: tl.tensor,
    shared: tl.tensor,
    seq: tl.tensor,
    num_seqs: tl.tensor,
    WINDOW: tl.constexpr,
    CASCADES: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of sequences [N]: their length, their own first tile that the last token sees, the number of tiles from it."""
    seq_len = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    first = tl.zeros_like(seq_len)
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // TILE
    if CASCADES:
        first = tl.load(shared + 2 * seq, mask=seq < num_seqs, other=0)
    return seq_len, first, tl.cdiv(seq_len, TILE) - first


@triton.jit
def _decode_splits(
    tiles: tl.tensor, chunk: tl.tensor, seq: tl.tensor, num_seqs: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Of sequences [N]: their number of items, 0 behind the last sequence, and their bucket.

    Those with several items are in bucket 0. One without tiles has an item too, which writes zeros.
    """
    splits = tl.where(seq < num_seqs, tl.maximum(tl.cdiv(tiles, chunk), 1), 0)
    bucket = tl.where(splits > 1, 0, 1)
    for halvings in tl.static_range(1, BUCKETS - 1):
        bucket += ((tiles << halvings) <= chunk).to(tl.int32)
    return splits, bucket


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["seq_lens", "block_table_offsets", "shared", "items", "num_items", "counters"],
)
def decode_items_kernel(
    seq_lens: tl.tensor,
    block_table_offsets: tl.tensor,
    shared: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    counters: tl.tensor,
    num_seqs: tl.tensor,
    TARGET: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    WINDOW: tl.constexpr,
    CASCADES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Cut the visible tiles of sequences with one query token each into items of about equal length. One program.

    `items` [num_seqs + TARGET, ITEM_WORDS]: sequence, its length, offset of its block ids, first tile, tile behind the
    last, number of this item in the sequence, items of the sequence, and with CASCADES the second word that `shared` of
    `cascade_items_kernel` has for a sequence, 0 for all but its first item. The items of one sequence lie together.
    Those of sequences with several come first and are at most `2 * TARGET`. `num_items` [1]. `counters` [NUM_COUNTERS]
    are zeroed. All int32. `BLOCK`: sequences looked at together.
    """
    lanes = tl.arange(0, BLOCK)
    for start in range(0, NUM_COUNTERS, BLOCK):
        tl.store(counters + start + lanes, 0, mask=start + lanes < NUM_COUNTERS)

    total = 0
    for start in range(0, num_seqs, BLOCK):
        _, _, tiles = _decode_tiles(seq_lens, shared, start + lanes, num_seqs, WINDOW, CASCADES, TILE)
        total += tl.sum(tiles)
    chunk = tl.maximum(tl.cdiv(total, TARGET), MIN_TILES)

    totals = tl.zeros([BUCKETS], tl.int32)
    for start in range(0, num_seqs, BLOCK):
        _, _, tiles = _decode_tiles(seq_lens, shared, start + lanes, num_seqs, WINDOW, CASCADES, TILE)
        splits, bucket = _decode_splits(tiles, chunk, start + lanes, num_seqs)
        totals += _ranks(bucket, splits)[1]
    tl.store(num_items, tl.sum(totals))

    bases = tl.cumsum(totals, 0) - totals
    for start in range(0, num_seqs, BLOCK):
        seq = start + lanes
        seq_len, first, tiles = _decode_tiles(seq_lens, shared, seq, num_seqs, WINDOW, CASCADES, TILE)
        splits, bucket = _decode_splits(tiles, chunk, seq, num_seqs)
        ranks, counts = _ranks(bucket, splits)
        item = items + (_at_bucket(bases, bucket) + ranks) * ITEM_WORDS
        bases += counts
        table = tl.load(block_table_offsets + seq, mask=seq < num_seqs, other=0)
        for split in range(tl.max(splits)):
            own = split < splits
            tl.store(item, seq, mask=own)
            tl.store(item + 1, seq_len, mask=own)
            tl.store(item + 2, table, mask=own)
            # Where a sequence has no items the divisor is 1: no lane may divide by 0.
            tl.store(item + 3, first + split * tiles // tl.maximum(splits, 1), mask=own)
            tl.store(item + 4, first + (split + 1) * tiles // tl.maximum(splits, 1), mask=own)
            tl.store(item + 5, tl.zeros_like(seq) + split, mask=own)
            tl.store(item + 6, splits, mask=own)
            if CASCADES:
                slots = tl.load(shared + 2 * seq + 1, mask=own, other=0)
                tl.store(item + 7, tl.where(split == 0, slots, 0), mask=own)
            item += ITEM_WORDS


@triton.jit
def _cascade_place(
    place: tl.tensor,
    cascade_offsets: tl.tensor,
    cascade_blocks: tl.tensor,
    num_seqs: tl.tensor,
    search_steps: tl.tensor,
    MEMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of places [N] in `cascade_seqs`: (whole tiles that the cascade there shares, members of the row tile that begins
    there). 0 members where none begins; 0 of both behind the last cascade.
    """
    low = tl.zeros_like(place)
    high = low + num_seqs
    for _ in range(search_steps):
        # Cascade `low` begins at or before `place`, `high` behind it.
        middle = (low + high) // 2
        begun = tl.load(cascade_offsets + middle) <= place
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    start = tl.load(cascade_offsets + low)
    end = tl.load(cascade_offsets + low + 1)
    blocks = tl.load(cascade_blocks + low, mask=place < end, other=0)
    tiles = blocks * BLOCK_SIZE // TILE
    begins = (tiles > 0) & ((place - start) % MEMBERS == 0)
    return tiles, tl.where(begins, tl.minimum(end - place, MEMBERS), 0)


@triton.jit(
    do_not_specialize=["num_seqs", "search_steps"],
    do_not_specialize_on_alignment=[
        "cascade_seqs", "cascade_offsets", "cascade_blocks", "block_table_offsets", "shared", "items", "num_items",
    ],
)  # fmt: skip
def cascade_items_kernel(
    cascade_seqs: tl.tensor,
    cascade_offsets: tl.tensor,
    cascade_blocks: tl.tensor,
    block_table_offsets: tl.tensor,
    shared: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    num_seqs: tl.tensor,
    search_steps: tl.tensor,
    TARGET: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Cut what cascades share into items: some members (at most MEMBERS) and some of the shared tiles. One program.

    `cascade_*` as in the plan; all members are sequences before `num_seqs`. `shared` [num_seqs, 2]: of each sequence,
    its first tile that is not shared, and `first slot * MAX_SHARED_SLOTS + slots` of the partial results over those
    before it; zeros outside cascades. A sequence's slots lie together.

    `items` [num_seqs + TARGET, ITEM_WORDS]: place of the first member in `cascade_seqs`, members, offset of block ids,
    first tile, tile behind the last, the first member's slot, slots from one member's to the next one's. `num_items`
    [1]. All int32. There are at most `num_seqs + MEMBERS * TARGET` slots. `search_steps`: bits of `num_seqs`.
    """
    lanes = tl.arange(0, BLOCK)
    total = 0
    for start in range(0, num_seqs, BLOCK):
        place = start + lanes
        tl.store(shared + 2 * place, tl.zeros_like(place), mask=place < num_seqs)
        tl.store(shared + 2 * place + 1, tl.zeros_like(place), mask=place < num_seqs)
        tiles, members = _cascade_place(
            place, cascade_offsets, cascade_blocks, num_seqs, search_steps, MEMBERS, BLOCK_SIZE, TILE
        )
        total += tl.sum(tl.where(members > 0, tiles, 0))
    chunk = tl.maximum(tl.cdiv(total, TARGET), MIN_TILES)
    tl.debug_barrier()  # all zeros are stored

    next_item = 0
    next_slot = 0
    for start in range(0, num_seqs, BLOCK):
        place = start + lanes
        tiles, members = _cascade_place(
            place, cascade_offsets, cascade_blocks, num_seqs, search_steps, MEMBERS, BLOCK_SIZE, TILE
        )
        slots = tl.cdiv(tiles, chunk)
        slot = next_slot + tl.cumsum(slots, 0) - slots
        next_slot += tl.sum(slots)
        splits = tl.where(members > 0, slots, 0)
        item = items + (next_item + tl.cumsum(splits, 0) - splits) * ITEM_WORDS
        next_item += tl.sum(splits)
        seq = tl.load(cascade_seqs + place, mask=slots > 0, other=0)
        tl.store(shared + 2 * seq, tiles, mask=slots > 0)
        tl.store(shared + 2 * seq + 1, slot * MAX_SHARED_SLOTS + slots, mask=slots > 0)
        table = tl.load(block_table_offsets + seq, mask=splits > 0, other=0)
        for split in range(tl.max(splits)):
            own = split < splits
            tl.store(item, place, mask=own)
            tl.store(item + 1, members, mask=own)
            tl.store(item + 2, table, mask=own)
            tl.store(item + 3, split * tiles // tl.maximum(splits, 1), mask=own)
            tl.store(item + 4, (split + 1) * tiles // tl.maximum(splits, 1), mask=own)
            tl.store(item + 5, slot + split, mask=own)
            tl.store(item + 6, slots, mask=own)
            item += ITEM_WORDS
    tl.store(num_items, next_item)


@triton.jit
def _prefill_tile(
    slot: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    first_seq: tl.tensor,
    num_seqs: tl.tensor,
    search_steps: tl.tensor,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of slots [N]: (sequence, first token in the step, tokens of its tile or <= 0 for none, position of the first).

    Sequence i, of query tokens [s, e) counted from the first sequence's, owns slots from s // TOKENS + i on.
    """
    origin = tl.load(query_start_loc + first_seq)
    low = tl.zeros_like(slot) + first_seq
    high = tl.zeros_like(slot) + num_seqs
    for _ in range(search_steps):
        # low owns slots from at or before `slot` on, high from behind it on.
        middle = (low + high) // 2
        owned = (tl.load(query_start_loc + middle) - origin) // TOKENS + middle - first_seq
        low = tl.where(owned <= slot, middle, low)
        high = tl.where(owned <= slot, high, middle)
    start = tl.load(query_start_loc + low)
    end = tl.load(query_start_loc + low + 1)
    token = start + (slot - (start - origin) // TOKENS - low + first_seq) * TOKENS
    return low, token, tl.minimum(end - token, TOKENS), tl.load(seq_lens + low) - end + token


@triton.jit
def _prefill_bucket(position: tl.tensor, tokens: tl.tensor, max_seq_len: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Of tiles [N]: bucket by the keys that they see, the most in 0."""
    keys = position + tokens
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW + tokens)
    sixteenths = tl.minimum(tl.maximum(keys, 0) // (max_seq_len // BUCKETS + 1), BUCKETS - 1)
    return (sixteenths - (BUCKETS - 1)) * -1


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "max_items", "max_seq_len", "search_steps"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table_offsets", "items", "num_items"],
)
def prefill_items_kernel(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table_offsets: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    first_seq: tl.tensor,
    num_seqs: tl.tensor,
    max_items: tl.tensor,
    max_seq_len: tl.tensor,
    search_steps: tl.tensor,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Cut the query tokens of sequences [first_seq, num_seqs) into tiles of at most TOKENS. One program.

    `items` [max_items, ITEM_WORDS]: first token in the step, tokens, position of the first, offset of the sequence's
    block ids. `num_items` [1]. All int32. `search_steps`: bits of the number of sequences.
    """
    lanes = tl.arange(0, BLOCK)
    totals = tl.zeros([BUCKETS], tl.int32)
    for start in range(0, max_items, BLOCK):
        slot = start + lanes
        _, _, tokens, position = _prefill_tile(
            slot, query_start_loc, seq_lens, first_seq, num_seqs, search_steps, TOKENS
        )
        real = ((slot < max_items) & (tokens > 0)).to(tl.int32)
        totals += _ranks(_prefill_bucket(position, tokens, max_seq_len, WINDOW), real)[1]
    tl.store(num_items, tl.sum(totals))

    bases = tl.cumsum(totals, 0) - totals
    for start in range(0, max_items, BLOCK):
        slot = start + lanes
        seq, token, tokens, position = _prefill_tile(
            slot, query_start_loc, seq_lens, first_seq, num_seqs, search_steps, TOKENS
        )
        real = (slot < max_items) & (tokens > 0)
        bucket = _prefill_bucket(position, tokens, max_seq_len, WINDOW)
        ranks, counts = _ranks(bucket, real.to(tl.int32))
        item = items + (_at_bucket(bases, bucket) + ranks) * ITEM_WORDS
        bases += counts
        tl.store(item, token, mask=real)
        tl.store(item + 1, tokens, mask=real)
        tl.store(item + 2, position, mask=real)
        tl.store(item + 3, tl.load(block_table_offsets + seq), mask=real)
