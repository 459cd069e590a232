// Attention of sequences with one query token each, over their keys in paged memory.
//
// A block does one item of the work list of `pyvllm/kernels/triton/work_list.py` for the query heads of one KV head. A
// tile is 16 positions for each warp. Each warp goes through its part of the tiles on its own, with its own softmax:
// the warps meet only when they are done. A sequence of several items leaves partial results, and the last block to
// arrive combines them.
//
// Keys and values travel through a ring of shared memory, STAGES tiles ahead of their use. As in `gemv.cu` each thread
// copies just the bytes that it will feed to the tensor cores, so that nothing is waited for but one's own copies.
// Keys, then transposed values, are the left operand of 16 rows, the query heads the 8 columns of the right one:
//   scores[16 positions, 8 heads] = keys[16, D] @ queries[8, D]^T, output[D, 8] += values[16, D]^T @ weights[16, 8].
//
// In comments g = lane / 4 and t = lane % 4. A lane's scores are those of positions g, g + 8 for heads 2t, 2t + 1, and
// its outputs are for the same two heads, so the softmax needs other lanes only for the maximum.
//
// With FUSED the queries, keys and values of the step come as the projection gives them. Each block norms and turns its
// queries while keys are on their way. The block of a sequence's last item does so with the new key, and stores it and
// the new value; what they add to the output comes in at the end, as if from one warp more. All else that is in KV memory
// is of earlier steps: keys and values are on their way before the kernel before this one has ended.
//
// Macros: FLOAT16 (see device.cuh); HEAD_DIM: D, a multiple of 64; GROUP: query heads of a KV head, 1 to 8;
// PARTIAL_ROWS: heads that partial results have room for; BLOCK_SIZE: positions of a block of KV memory, a multiple of
// 16; WARPS; STAGES; SOFTCAP and SLOPES: 1 if there is a cap, ALiBi; FUSED; NORM, ROTATED and INTERLEAVED: see heads.cuh.
#include <decode_results.cuh>
#include <decode_tiles.cuh>
#include <device.cuh>
#include <heads.cuh>

constexpr int RING_STAGE = WARPS * 2 * LOADS * 32;  // of 16 bytes
constexpr int QUERY_STRIDE = HEAD_DIM + 8;          // neighbouring heads start in different banks

struct Item {
    int seq;
    int seq_len;
    int table;  // where the sequence's block ids begin
    int first_tile;
    int last_tile;  // the one behind the last
    int split;
    int splits;  // items of this sequence

    DEVICE bool is_newest() const { return seq_len > 0 && split == splits - 1; }
};

// What the blocks have of the step's tokens.
struct Tokens {
    const u16* heads;  // query heads, or with FUSED rows of the projection: H query, K key and K value heads
    int stride;
    int head_stride;
    HeadRule query;
    HeadRule key;
};

struct Memory {
    u16* layer;  // [N, 2, K, BLOCK_SIZE, D]
    i64 block_stride;
    i64 value_offset;  // from a key to its value

    DEVICE u16* key(int block, int kv_head, int position) const {
        return layer + block * block_stride + (kv_head * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM;
    }
};

// In shared memory behind the ring, with FUSED; `extra_bytes` in decode.py is its size.
struct Extra {
    u16 queries[8 * QUERY_STRIDE];
    u16 key[HEAD_DIM];  // what follows is of the newest item only
    float value[HEAD_DIM];
    float scores[8];  // of the new key, in units of log2
    float scratch[WARPS * HEAD_DIM];
};

DEVICE const u16* token_head(const Tokens& tokens, int seq, int head) {
    return tokens.heads + static_cast<i64>(seq) * tokens.stride + head * tokens.head_stride;
}

// Norms and turns the queries; of the newest item the key too, and stores it and its value at `stored`. Each is a task
// of one warp, since nearly all of it is waiting for memory. Ends with a barrier.
DEVICE void prepare(Extra* extra, const Tokens& tokens, const Item& item, u16* stored, i64 value_offset) {
    int lane = threadIdx.x % 32, kv_head = blockIdx.x, num_kv_heads = gridDim.x;
    float* scratch = extra->scratch + threadIdx.x / 32 * HEAD_DIM;
    int position = max(item.seq_len - 1, 0);
    int num_tasks = item.is_newest() ? GROUP + 2 : GROUP;
    for (int task = threadIdx.x / 32; task < num_tasks; task += WARPS) {
        if (task < GROUP) {
            const u16* source = token_head(tokens, item.seq, kv_head * GROUP + task);
            prepare_head(extra->queries + task * QUERY_STRIDE, scratch, source, tokens.query, position, lane);
        } else if (task == GROUP) {
            const u16* source = token_head(tokens, item.seq, num_kv_heads * GROUP + kv_head);
            prepare_head(extra->key, scratch, source, tokens.key, position, lane);
#pragma unroll
            for (int i = lane; i < HEAD_DIM; i += 32) stored[i] = extra->key[i];
        } else {
            const u16* source = token_head(tokens, item.seq, num_kv_heads * (GROUP + 1) + kv_head);
#pragma unroll
            for (int i = lane; i < HEAD_DIM; i += 32) {
                u16 value = source[i];
                stored[i + value_offset] = value;
                extra->value[i] = to_float(value);
            }
        }
    }
    __syncthreads();
}

// The scores of the newest item's new key. Visible after a barrier.
DEVICE void score_new_key(Extra* extra, const Scoring& scoring) {
    int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < GROUP; head += WARPS) {
        float product = 0.0f;
        for (int i = lane; i < HEAD_DIM; i += 32)
            product += to_float(extra->queries[head * QUERY_STRIDE + i]) * to_float(extra->key[i]);
        product = sum_of_warp(product);
        if (lane == 0) extra->scores[head] = visible_score(product, 0, 0.0f, scoring);
    }
}

// A lane's part of the queries; zeros for heads from GROUP on.
DEVICE void load_queries(uint4 (&queries)[KEY_PARTS], const u16* source, int stride) {
    int head = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int part = 0; part < KEY_PARTS; part++) {
        queries[part] = {0, 0, 0, 0};
        if (head < GROUP) queries[part] = *reinterpret_cast<const uint4*>(source + head * stride + 32 * part + 8 * t);
    }
}

// All tiles of an item, by one warp. `ring`: this lane's part of it, filled by `fetcher`.
DEVICE void attend(State& state, uint4* ring, Fetcher& fetcher, const uint4 (&queries)[KEY_PARTS], const Item& item,
                   const float (&slope)[2], const Scoring& scoring) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stage = 0;
    int distance = item.seq_len - 1 - (item.first_tile * TILE + warp * ROWS + lane / 4);
    for (int tile = item.first_tile; tile < item.last_tile; tile++, distance -= TILE) {
        uint4* slots = ring + stage * RING_STAGE;
        float scores[4] = {};
        wait_copies<2 * STAGES - 1>();
        multiply_keys(scores, slots, queries);
#pragma unroll
        for (int i = 0; i < 4; i++) scores[i] = score(scores[i], distance - i / 2 * 8, slope[i % 2], scoring);
        softmax(scores, state);
        wait_copies<2 * STAGES - 2>();
        multiply_values(state, slots + LOADS * 32, scores);
        fetcher.next(slots, lane);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

// Grid: (KV heads K, bound of the items). heads: query [S, H, D], or with FUSED the projection [S, (H + 2 K) * D], with
// strides. kv_layer [N, 2, K, BLOCK_SIZE, D], output [S, H, D]; items, num_items: see work_list.py; slopes [H] or null.
// By item, KV head and head of the group: partial_stats (maximum, sum), partial_outputs [D]. counters by item and KV
// head: 0 before and after. With FUSED: weights [D] of the norms, cosine and sine [positions, ROTATED].
// Dynamic shared memory: the ring, [STAGES, WARPS, 2 * LOADS, 32] of 16 bytes; Extra.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    decode_attention(const u16* heads, u16* kv_layer, u16* output, const int4* items, const int* num_items,
                     const int* block_ids, const float* slopes, float2* partial_stats, float4* partial_outputs,
                     int* counters, const u16* query_weight, const u16* key_weight, const u16* cosine, const u16* sine,
                     int token_stride, int head_stride, int window, float scale, float softcap, float query_eps,
                     float key_eps) {
    SHARED_MEMORY(shared);
    allow_next_kernel();
    // The work list and the block ids were there before the kernels of the layers began.
    int4 words = items[2 * blockIdx.y], more = items[2 * blockIdx.y + 1];
    // Without waiting, so that the many blocks without an item are gone when those with one begin to work.
    if (static_cast<int>(blockIdx.y) >= *num_items) return;
    Item item = {words.x, words.y, words.z, words.w, more.x, more.y, more.z};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.x, num_kv_heads = gridDim.x;

    constexpr int HEAD_SIZE = BLOCK_SIZE * HEAD_DIM;
    Memory memory = {kv_layer, static_cast<i64>(2 * num_kv_heads) * HEAD_SIZE,
                     static_cast<i64>(num_kv_heads) * HEAD_SIZE};
    Fetcher fetcher = {memory.key(0, kv_head, 0), memory.block_stride, memory.value_offset, block_ids + item.table};
    fetcher.stored_len = item.seq_len - FUSED;
    fetcher.position = item.first_tile * TILE + warp * ROWS;
    fetcher.end = item.last_tile * TILE;
    fetcher.load_ids(lane);
    u16* stored = nullptr;
    if (FUSED && item.is_newest())
        stored = memory.key(block_ids[item.table + (item.seq_len - 1) / BLOCK_SIZE], kv_head, item.seq_len - 1);
    if constexpr (!FUSED) wait_for_previous_kernel();
    uint4* ring = reinterpret_cast<uint4*>(shared) + warp * 2 * LOADS * 32 + lane;
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) fetcher.next(ring + stage * RING_STAGE, lane);

    Scoring scoring = {window, SOFTCAP ? scale / softcap : scale * LOG2_E, softcap * LOG2_E};
    float slope[2] = {0.0f, 0.0f};
    if constexpr (SLOPES)
        for (int i = 0; i < 2; i++) slope[i] = slopes[kv_head * GROUP + min(lane % 4 * 2 + i, GROUP - 1)] * LOG2_E;
    Tokens tokens = {heads, token_stride, head_stride, {query_weight, cosine, sine, query_eps},
                     {key_weight, cosine, sine, key_eps}};
    Extra* extra = reinterpret_cast<Extra*>(shared + STAGES * RING_STAGE * sizeof(uint4));
    uint4 queries[KEY_PARTS];
    if constexpr (FUSED) {
        wait_for_previous_kernel();
        prepare(extra, tokens, item, stored, memory.value_offset);
        if (item.is_newest()) score_new_key(extra, scoring);
        load_queries(queries, extra->queries, QUERY_STRIDE);
    } else {
        load_queries(queries, token_head(tokens, item.seq, kv_head * GROUP), head_stride);
    }
    State state;
    attend(state, ring, fetcher, queries, item, slope, scoring);

    __syncthreads();  // the ring is done with
    float2* stats = reinterpret_cast<float2*>(shared);             // [WARPS, 8]
    float* outputs = reinterpret_cast<float*>(stats + WARPS * 8);  // [WARPS, 8, OUT_STRIDE]
    int* flag = reinterpret_cast<int*>(outputs + WARPS * 8 * OUT_STRIDE);
    store_state(stats + warp * 8, outputs + warp * 8 * OUT_STRIDE, state, lane);
    __syncthreads();
    i64 first_head = (static_cast<i64>(item.seq) * num_kv_heads + kv_head) * GROUP;
    uint2* target = reinterpret_cast<uint2*>(output) + first_head * VECTORS;
    int slot = blockIdx.y * num_kv_heads + kv_head;
    for (int i = threadIdx.x; i < GROUP * VECTORS; i += THREADS) {
        int head = i / VECTORS, vector = i % VECTORS;
        Result result = sum_of_warps(stats, outputs, head, 4 * vector);
        if (FUSED && item.is_newest())
            result.add(extra->scores[head], 1.0f, reinterpret_cast<const float4*>(extra->value)[vector]);
        if (item.splits == 1) {
            target[i] = result.normalized();
        } else {
            i64 row = static_cast<i64>(slot) * PARTIAL_ROWS + head;
            if (vector == 0) partial_stats[row] = {result.maximum, result.sum};
            partial_outputs[row * VECTORS + vector] = result.output;
        }
    }
    if (item.splits == 1) return;

    int first_slot = slot - item.split * num_kv_heads;
    if (!is_last(counters + first_slot, item.splits, flag)) return;
    for (int i = threadIdx.x; i < GROUP * VECTORS; i += THREADS) {
        i64 row = static_cast<i64>(first_slot) * PARTIAL_ROWS + i / VECTORS;
        const float4* first = partial_outputs + row * VECTORS + i % VECTORS;
        target[i] = sum_of_splits(partial_stats + row, first, item.splits, num_kv_heads * PARTIAL_ROWS).normalized();
    }
}
