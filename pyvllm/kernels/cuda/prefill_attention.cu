// Attention of sequences with several query tokens each, over their keys in paged memory.
//
// A block goes through items of the work list of `pyvllm/kernels/triton/work_list.py`: some query tokens times the
// query heads that share a KV head are the rows of one matrix, 64 for each warp group that multiplies. One more warp
// group feeds them: its first warp brings tiles of keys and values by bulk tensor copies into a ring in shared memory,
// the others bring the next item's queries while this one's are in use.
//
// A warp group that multiplies begins the scores of a tile, then the product of the weights and values of the tile
// before, and does the softmax of the scores during the latter. The two warp groups take turns: while one multiplies the
// other does its softmax.
//
// Macros: FLOAT16 (see device.cuh); HEAD_DIM: D, 64 or 128; GROUP: query heads of a KV head, a divisor of the rows;
// BLOCK_SIZE: positions of a block of KV memory, a multiple of 8; KEYS of a tile; BOX: positions that one copy brings, a
// divisor of both BLOCK_SIZE and KEYS; WARP_GROUPS that multiply, 2; SLOTS of the ring; FEEDER_REGISTERS,
// CONSUMER_REGISTERS: of a thread.
#include <hopper.cuh>
#include <prefill_tiles.cuh>

constexpr int THREADS = 128 * (WARP_GROUPS + 1);
constexpr int CONSUMER_WARPS = 4 * WARP_GROUPS;
constexpr int QUERY_THREADS = 96;
constexpr int PARTS = HEAD_DIM / 64;
constexpr int BOXES = KEYS / BOX * PARTS;
constexpr int TILE_BYTES = KEYS * HEAD_DIM * 2;
constexpr int QUERY_BYTES = ROWS * HEAD_DIM * 2;
static_assert(BOXES <= 32, "a lane for each copy of a tile");
static_assert(WARP_GROUPS == 2, "turns are of two");

// In shared memory, at a multiple of 1024 bytes; `shared_bytes` in prefill.py is its size.
struct Shared {
    unsigned char queries[2][QUERY_BYTES];
    unsigned char ring[SLOTS][TILE_BYTES];
    Barrier queries_full[2];
    Barrier queries_empty[2];
    Barrier full[SLOTS];
    Barrier empty[SLOTS];
};

// The work of this block. Work lies longest first, so blocks deal it out to and fro.
struct Schedule {
    const int4* items;
    int num_kv_heads;
    int total;
    int round;

    DEVICE bool next(Work& work) {
        int blocks = gridDim.x, block = blockIdx.x;
        int index = round * blocks + (round % 2 ? blocks - 1 - block : block);
        round++;
        if (index >= total) return false;
        int4 words = items[2 * (index / num_kv_heads)];
        work = {words.x, words.y, words.z, words.w, index % num_kv_heads};
        return true;
    }
};

// A place in a ring of `SIZE` slots, and which filling of it is meant.
template <int SIZE>
struct Place {
    int slot = 0;
    u32 parity = 0;

    DEVICE void advance() {
        slot++;
        if (slot == SIZE) slot = 0, parity ^= 1;
    }
};

// Tiles in the order of their use, of each item: keys of tile 0, keys of 1, values of 0, keys of 2, ..., values of the
// last. One warp; a lane brings a box of each.
DEVICE void bring_tiles(Shared& shared, const TensorMap* map, const int* block_ids, Schedule schedule) {
    int lane = threadIdx.x % 32;
    int first = lane / PARTS * BOX, column = lane % PARTS * 64;
    u32 target = lane % PARTS * (KEYS * 128) + first * 128;
    Place<SLOTS> place;
    Work work;
    while (schedule.next(work)) {
        auto block_of = [&](int position) {
            // Behind the end: a block that does not exist, for which the copy gives zeros.
            return lane < BOXES && position < work.end() ? block_ids[work.table + position / BLOCK_SIZE] : -1;
        };
        auto bring = [&](int block, int position, int value) {
            wait(&shared.empty[place.slot], place.parity ^ 1);
            if (lane == 0) arrive_and_expect(&shared.full[place.slot], TILE_BYTES);
            __syncwarp();
            if (lane < BOXES)
                copy_box(shared.ring[place.slot] + target, map, &shared.full[place.slot], column, position % BLOCK_SIZE,
                         work.kv_head, value, block);
            place.advance();
        };
        int position = first, block = block_of(first), previous = -1;
        for (int tile = 0; tile < work.tiles(); tile++, position += KEYS) {
            int next = block_of(position + KEYS);  // on its way while slots are waited for
            bring(block, position, 0);
            if (tile > 0) bring(previous, position - KEYS, 1);
            previous = block;
            block = next;
        }
        bring(previous, position - KEYS, 1);
    }
}

// The rows of each item. Three warps.
DEVICE void bring_queries(Shared& shared, const u16* query, int token_stride, int head_stride, Schedule schedule) {
    Place<2> place;
    Work work;
    while (schedule.next(work)) {
        wait(&shared.queries_empty[place.slot], place.parity ^ 1);
        unsigned char* target = shared.queries[place.slot];
        const u16* source = query + static_cast<i64>(work.first_token) * token_stride + work.kv_head * GROUP * head_stride;
        for (int i = threadIdx.x % 128 - 32; i < work.tokens * GROUP * CHUNKS; i += QUERY_THREADS) {
            int row = i / CHUNKS, chunk = i % CHUNKS;
            const u16* head = source + static_cast<i64>(row / GROUP) * token_stride + row % GROUP * head_stride;
            copy_async(target + (chunk / 8 * ROWS + row) * 128 + (chunk % 8 ^ row % 8) * 16, head + 8 * chunk);
        }
        commit_copies();
        wait_copies<0>();
        fence_async();
        arrive(&shared.queries_full[place.slot]);
        place.advance();
    }
}

// Of the warps that multiply, each when it is done with something.
DEVICE void release(Barrier* barrier) {
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// Barriers of warp groups: where one waits for its turn, and one of its own warps.
DEVICE int turn_of(int warp_group) { return 1 + warp_group; }
DEVICE int barrier_of(int warp_group) { return 1 + WARP_GROUPS + warp_group; }

// One warp group's rows of an item: `output` is to be divided by the sums of `state`. `place`: where the item's tiles
// begin in the ring. `factor`: of products, in units of log2.
DEVICE void attend(float (&output)[HEAD_DIM / 2], State& state, Shared& shared, Place<SLOTS>& place, int query_slot,
                   const Work& work, float factor) {
    int warp_group = threadIdx.x / 128 - 1, tiles = work.tiles();
    u64 queries = rows_of_k(shared.queries[query_slot] + 64 * 128 * warp_group);
    float scores[KEYS / 2], decay[2];
    u32 weights[KEYS / 4];
    wait(&shared.full[place.slot], place.parity);
    multiply_keys(scores, queries, rows_of_k(shared.ring[place.slot]));
    wait_products<0>();
    pin(scores);
    release(&shared.empty[place.slot]);
    place.advance();
    mask(scores, work, 0);
    softmax(scores, state, decay, factor);
    pack_weights(weights, scores);
    wait(&shared.full[place.slot], place.parity);

    // What lies at `place` has arrived: a tile's keys, then the values of the tile before, whose `weights` are known.
    for (int tile = 1; tile < tiles; tile++) {
        Place<SLOTS> values = place;
        values.advance();
        meet(turn_of(warp_group), 256);
        multiply_keys(scores, queries, rows_of_k(shared.ring[place.slot]));
        wait(&shared.full[values.slot], values.parity);
        multiply_values(output, weights, columns_of_k(shared.ring[values.slot], KEYS * 128), tile > 1);
        pass_by(turn_of(1 - warp_group), 256);
        wait_products<1>();
        pin(scores);
        release(&shared.empty[place.slot]);
        mask(scores, work, tile);
        softmax(scores, state, decay, factor);
        pin(scores);
        place = values;
        place.advance();
        // Waited for here and not where it is used, so that the compiler leaves the softmax before the next wait.
        wait(&shared.full[place.slot], place.parity);
        wait_products<0>();
        pin(output);
        release(&shared.empty[values.slot]);
        decay_output(output, decay);
        pack_weights(weights, scores);
    }
    release(&shared.queries_empty[query_slot]);

    int count = work.end() - (tiles - 1) * KEYS;
    if (count < KEYS) zero_values(shared.ring[place.slot], count, barrier_of(warp_group));
    multiply_values(output, weights, columns_of_k(shared.ring[place.slot], KEYS * 128), tiles > 1);
    wait_products<0>();
    pin(output);
    release(&shared.empty[place.slot]);
    place.advance();
}

// One warp group's rows of all items of this block.
DEVICE void attend_all(Shared& shared, u16* target, Schedule schedule, float factor, int num_heads) {
    if (threadIdx.x >= 256) pass_by(turn_of(0), 256);
    Place<SLOTS> place;
    Place<2> query_place;
    Work work;
    while (schedule.next(work)) {
        float output[HEAD_DIM / 2];
        State state;
        wait(&shared.queries_full[query_place.slot], query_place.parity);
        attend(output, state, shared, place, query_place.slot, work, factor);
        query_place.advance();
        store_output(target, output, state, work, num_heads);
    }
}

// Any grid. query [T, H, D] with strides, kv_layer [N, 2, K, BLOCK_SIZE, D] in boxes [1, 1, 1, BOX, 64]; output
// [T, H, D]; items, num_items: see work_list.py. Dynamic shared memory: Shared, and what aligns it.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_attention(const __grid_constant__ TensorMap kv_layer, const u16* query, u16* output, const int4* items,
                      const int* num_items, const int* block_ids, int token_stride, int head_stride, int num_kv_heads,
                      float scale) {
    SHARED_MEMORY(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 1023));
    allow_next_kernel();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            init_barrier(&shared.queries_full[i], QUERY_THREADS);
            init_barrier(&shared.queries_empty[i], CONSUMER_WARPS);
        }
        for (int i = 0; i < SLOTS; i++) {
            init_barrier(&shared.full[i], 1);
            init_barrier(&shared.empty[i], CONSUMER_WARPS);
        }
        publish_barriers();
    }
    wait_for_previous_kernel();
    __syncthreads();
    Schedule schedule = {items, num_kv_heads, *num_items * num_kv_heads, 0};
    if (threadIdx.x < 128) {
        give_registers<FEEDER_REGISTERS>();
        if (threadIdx.x < 32)
            bring_tiles(shared, &kv_layer, block_ids, schedule);
        else
            bring_queries(shared, query, token_stride, head_stride, schedule);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        attend_all(shared, output, schedule, scale * LOG2_E, num_kv_heads * GROUP);
    }
}
