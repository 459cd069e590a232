// Parts of `prefill_attention.cu`, which says how work is divided: what a warp group does with a tile of keys, then of
// values, for its 64 rows.
//
// In shared memory a matrix lies as parts of 64 columns, each in rows of 128 bytes: see hopper.cuh. In comments
// g = lane / 4 and t = lane % 4: of a warp's 16 rows a lane has rows g and g + 8, of each 8 columns 2t and 2t + 1. Of
// its numbers four belong to each 8 columns, those of row g first.
//
// Macros: see `prefill_attention.cu`.
#pragma once
#include <hopper.cuh>
#include <transpose.cuh>

constexpr int ROWS = 64 * WARP_GROUPS;
constexpr int CHUNKS = HEAD_DIM / 8;   // of 16 bytes of a row
constexpr float MASKED = -1e30f;       // finite: maxima begin with it, and inf - inf is not to be computed

// One item for one KV head.
struct Work {
    int first_token;
    int tokens;
    int first_position;
    int table;  // where the sequence's block ids begin
    int kv_head;

    DEVICE int end() const { return first_position + tokens; }
    DEVICE int tiles() const { return (end() + KEYS - 1) / KEYS; }
    // Those that all rows see whole.
    DEVICE int full_tiles() const { return (first_position + 1) / KEYS; }
};

// Of this warp: the feeding warp group is the first.
DEVICE int first_row() { return (threadIdx.x / 32 - 4) * 16; }

// Of a lane's two rows.
struct State {
    float maximum[2] = {MASKED, MASKED};  // of the products, not scaled
    float sum[2] = {};                    // over this lane's columns only
};

// Begins the scores of 64 rows and a tile's keys.
DEVICE void multiply_keys(float (&scores)[KEYS / 2], u64 queries, u64 keys) {
    pin(scores);
    fence_operands();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        u64 a = queries + (step / 4 * (ROWS * 128) + step % 4 * 32) / 16;
        u64 b = keys + (step / 4 * (KEYS * 128) + step % 4 * 32) / 16;
        Product<KEYS>::run(scores, a, b, step > 0);
    }
    commit_products();
}

// Begins the product of weights and a tile's values, added to what `output` holds if `add`.
DEVICE void multiply_values(float (&output)[HEAD_DIM / 2], const u32 (&weights)[KEYS / 4], u64 values, bool add) {
    pin(output);
    fence_operands();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        Product<HEAD_DIM, true>::run(output, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                                     weights[4 * step + 3], values + step * (16 * 128 / 16), add || step > 0);
    commit_products();
}

// Hides the keys that are behind a row's own position.
DEVICE void mask(float (&scores)[KEYS / 2], const Work& work, int tile) {
    if (tile < work.full_tiles()) return;
    int lane = threadIdx.x % 32, limits[2];  // the last visible column of the lane's rows, less its first
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int position = work.first_position + (first_row() + lane / 4 + 8 * i) / GROUP;
        limits[i] = position - tile * KEYS - lane % 4 * 2;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        if (i / 4 * 8 + i % 2 > limits[i % 4 / 2]) scores[i] = MASKED;
}

// From scores to weights, in place. `decay`: what the output so far is to be multiplied by. `factor`: of the products,
// in units of log2.
DEVICE void softmax(float (&scores)[KEYS / 2], State& state, float (&decay)[2], float factor) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float maximum = state.maximum[row];
#pragma unroll
        for (int i = 2 * row; i < KEYS / 2; i += 4) maximum = fmaxf(maximum, fmaxf(scores[i], scores[i + 1]));
        maximum = fmaxf(maximum, __shfl_xor_sync(ALL_LANES, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(ALL_LANES, maximum, 2));
        decay[row] = power_of_two((state.maximum[row] - maximum) * factor);
        state.maximum[row] = maximum;
        float base = maximum * factor, sum = state.sum[row] * decay[row];
#pragma unroll
        for (int i = 2 * row; i < KEYS / 2; i += 4) {
            scores[i] = power_of_two(scores[i] * factor - base);
            scores[i + 1] = power_of_two(scores[i + 1] * factor - base);
            sum += scores[i] + scores[i + 1];
        }
        state.sum[row] = sum;
    }
}

DEVICE void decay_output(float (&output)[HEAD_DIM / 2], const float (&decay)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) output[i] *= decay[i % 4 / 2];
}

// The left operand of the product with values: its layout is that of the scores.
DEVICE void pack_weights(u32 (&weights)[KEYS / 4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

// All but the first `count` rows: memory behind a sequence's end may hold NaN, and 0 * NaN is no 0. Each warp group
// writes the same zeros and need not wait for the others. `barrier`: of this warp group alone.
DEVICE void zero_values(unsigned char* values, int count, int barrier) {
    for (int i = threadIdx.x % 128; i < (KEYS - count) * CHUNKS; i += 128) {
        int row = count + i / CHUNKS, chunk = i % CHUNKS;
        *reinterpret_cast<uint4*>(values + (chunk / 8 * KEYS + row) * 128 + chunk % 8 * 16) = {0, 0, 0, 0};
    }
    fence_async();
    meet(barrier, 128);
}

// `target` [T, H, D].
DEVICE void store_output(u16* target, const float (&output)[HEAD_DIM / 2], const State& state, const Work& work,
                         int num_heads) {
    int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = state.sum[half];
        total += __shfl_xor_sync(ALL_LANES, total, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        float inverse = 1.0f / total;
        int row = first_row() + lane / 4 + 8 * half, token = row / GROUP;
        i64 head = static_cast<i64>(work.first_token + token) * num_heads + work.kv_head * GROUP + row % GROUP;
        uint4* chunks = reinterpret_cast<uint4*>(target) + head * CHUNKS;
#pragma unroll
        for (int i = 0; i < CHUNKS; i += 4) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* pair = output + 4 * (i + j) + 2 * half;
                words[j] = pack(pair[0] * inverse, pair[1] * inverse);
            }
            transpose_words(words);
            if (token < work.tokens) chunks[i + t] = {words[0], words[1], words[2], words[3]};
        }
    }
}
