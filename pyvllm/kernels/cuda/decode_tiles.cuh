// Decode attention of one warp: keys and values into a ring of shared memory, scores, softmax, output. What the macros
// and the symbols mean, and how work is cut: see decode_attention.cu.
#pragma once
#include <device.cuh>

constexpr int THREADS = WARPS * 32;
constexpr int ROWS = 16;  // positions of a warp's part of a tile
constexpr int TILE = WARPS * ROWS;
constexpr int LOADS = HEAD_DIM / 16;  // of 16 bytes, of a lane for keys, and as many for values
constexpr int KEY_PARTS = HEAD_DIM / 32;
constexpr int VALUE_PARTS = HEAD_DIM / 64;
// Where a maximum starts, and the score of a hidden key. Finite, so that a part without visible keys does not compute
// inf - inf; so far apart that the weight of a hidden key is 0 even there.
constexpr float LOWEST = -1e30f;
constexpr float HIDDEN = -3e38f;

struct Scoring {
    int window;    // keys that a query sees
    float factor;  // of products; to units of log2 without a cap, to units of the cap with one
    float cap;     // in units of log2
};

// A lane's part of a warp's state; for heads 2t and 2t + 1.
struct State {
    float maximum[2] = {LOWEST, LOWEST};  // in units of log2
    float sum[2] = {0.0f, 0.0f};          // of this lane's positions
    float output[VALUE_PARTS][4][4] = {};  // [part][pair]: dimensions 64 part + 8 g + 2 pair and the next, each 2 heads
};

// --- fetching ---------------------------------------------------------------------------------------------------------

// Starts copying a warp's part of a tile to `slots[0]`, `slots[32]`, ...: keys, then values, a group each.
// `keys`, `values`: its first position's. Positions at or behind `count` are zeros: memory there may hold anything.
DEVICE void fetch(uint4* slots, const u16* keys, const u16* values, int count, int lane) {
    int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = g + 8 * half;
#pragma unroll
        for (int part = 0; part < KEY_PARTS; part++, slots += 32)
            copy_async_or_zero(slots, keys + row * HEAD_DIM + 32 * part + 8 * t, row < count);
    }
    commit_copies();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = 2 * t + i % 2 + i / 2 * 8;
#pragma unroll
        for (int part = 0; part < VALUE_PARTS; part++, slots += 32)
            copy_async_or_zero(slots, values + row * HEAD_DIM + 64 * part + 8 * g, row < count);
    }
    commit_copies();
}

// Which tiles a warp has fetched so far, and the ids of the blocks of those that follow, one in each lane.
struct Fetcher {
    const u16* kv_head;  // keys of block 0
    i64 block_stride;
    i64 value_offset;
    const int* block_ids;
    int stored_len;  // positions of the sequence that are in KV memory
    int position;    // of this warp's part of the next tile
    int end;         // where the last tile ends
    int ids;
    int ids_used;

    DEVICE void load_ids(int lane) {
        int mine = position + lane * TILE;
        ids = mine < stored_len ? block_ids[mine / BLOCK_SIZE] : 0;
        ids_used = 0;
    }

    DEVICE void next(uint4* slots, int lane) {
        if (position >= end) {
            commit_copies();
            commit_copies();
            return;
        }
        if (ids_used == 32) load_ids(lane);
        i64 block = __shfl_sync(ALL_LANES, ids, ids_used++);
        const u16* keys = kv_head + block * block_stride + position % BLOCK_SIZE * HEAD_DIM;
        fetch(slots, keys, keys + value_offset, stored_len - position, lane);
        position += TILE;
    }
};

// --- one part of a tile -----------------------------------------------------------------------------------------------

// sums[16 positions, 8 heads] of keys in the ring.
DEVICE void multiply_keys(float (&sums)[4], const uint4* slots, const uint4 (&queries)[KEY_PARTS]) {
    float others[4] = {};  // half as long a chain of products
#pragma unroll
    for (int part = 0; part < KEY_PARTS; part++) {
        uint4 upper = slots[32 * part], lower = slots[32 * (KEY_PARTS + part)], query = queries[part];
        multiply_add(sums, upper.x, lower.x, upper.y, lower.y, query.x, query.y);
        multiply_add(others, upper.z, lower.z, upper.w, lower.w, query.z, query.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] += others[i];
}

// A visible key's score in units of log2. `distance`: query position - key position. `slope` in units of log2.
DEVICE float visible_score(float product, int distance, float slope, const Scoring& scoring) {
    float value = product * scoring.factor;
    // tanh(x) = 1 - 2 / (exp(2 x) + 1); exp(2 x) may be infinite.
    if constexpr (SOFTCAP) value = scoring.cap * (1.0f - 2.0f / (power_of_two(2.0f * LOG2_E * value) + 1.0f));
    if constexpr (SLOPES) value -= slope * distance;
    return value;
}

// A score in units of log2. The new key, of distance 0, is not among the tiles' if FUSED.
DEVICE float score(float product, int distance, float slope, const Scoring& scoring) {
    bool visible = distance >= FUSED && distance < scoring.window;
    return visible ? visible_score(product, distance, slope, scoring) : HIDDEN;
}

DEVICE float maximum_over_positions(float value) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, lanes));
    return value;
}

DEVICE float sum_over_positions(float value) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) value += __shfl_xor_sync(ALL_LANES, value, lanes);
    return value;
}

// From scores to weights, in place; what the state holds is scaled to the new maximum.
DEVICE void softmax(float (&scores)[4], State& state) {
#pragma unroll
    for (int head = 0; head < 2; head++) {
        float maximum = maximum_over_positions(fmaxf(scores[head], scores[head + 2]));
        maximum = fmaxf(maximum, state.maximum[head]);
        float decay = power_of_two(state.maximum[head] - maximum);
        state.maximum[head] = maximum;
        scores[head] = power_of_two(scores[head] - maximum);
        scores[head + 2] = power_of_two(scores[head + 2] - maximum);
        state.sum[head] = state.sum[head] * decay + scores[head] + scores[head + 2];
#pragma unroll
        for (int part = 0; part < VALUE_PARTS; part++)
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                state.output[part][pair][head] *= decay;
                state.output[part][pair][head + 2] *= decay;
            }
    }
}

DEVICE u32 word(const uint4& vector, int i) {
    return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

// output += values[16 positions, D]^T @ weights[16, 8], values in the ring.
DEVICE void multiply_values(State& state, const uint4* slots, const float (&weights)[4]) {
    u32 first = transpose(pack(weights[0], weights[1])), second = transpose(pack(weights[2], weights[3]));
#pragma unroll
    for (int part = 0; part < VALUE_PARTS; part++) {
        uint4 rows[4];  // positions 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i] = slots[32 * (i * VALUE_PARTS + part)];
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            u32 a = word(rows[0], pair), b = word(rows[1], pair), c = word(rows[2], pair), d = word(rows[3], pair);
            multiply_add(state.output[part][pair], low_halves(a, b), high_halves(a, b), low_halves(c, d),
                         high_halves(c, d), first, second);
        }
    }
}
