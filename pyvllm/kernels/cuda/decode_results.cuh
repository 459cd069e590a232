// From the warps' results to those of an item, and from the items' to those of a sequence. See decode_attention.cu.
#pragma once
#include <decode_tiles.cuh>

constexpr int OUT_STRIDE = HEAD_DIM + 4;
constexpr int VECTORS = HEAD_DIM / 4;  // of 4 floats, of one head's output

struct Result {
    float maximum = LOWEST;
    float sum = 0.0f;
    float4 output = {0.0f, 0.0f, 0.0f, 0.0f};

    // Takes in another part of the same 4 dimensions.
    DEVICE void add(float other_maximum, float other_sum, float4 other) {
        float highest = fmaxf(maximum, other_maximum);
        float decay = power_of_two(maximum - highest), weight = power_of_two(other_maximum - highest);
        maximum = highest;
        sum = sum * decay + other_sum * weight;
        output = {output.x * decay + other.x * weight, output.y * decay + other.y * weight,
                  output.z * decay + other.z * weight, output.w * decay + other.w * weight};
    }

    // Padding has no keys and a sum of 0; its output must be finite.
    DEVICE uint2 normalized() const {
        float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
        return {pack(output.x * factor, output.y * factor), pack(output.z * factor, output.w * factor)};
    }
};

// A warp's state to `stats` [8, 2] and `outputs` [8, OUT_STRIDE] in shared memory; heads from GROUP on are left out.
DEVICE void store_state(float2* stats, float* outputs, const State& state, int lane) {
    int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int head = 2 * t + i;
        float sum = sum_over_positions(state.sum[i]);
        if (head >= GROUP) continue;
        if (g == 0) stats[head] = {state.maximum[i], sum};
#pragma unroll
        for (int part = 0; part < VALUE_PARTS; part++)
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                float* target = outputs + head * OUT_STRIDE + 64 * part + 8 * g + 2 * pair;
                *reinterpret_cast<float2*>(target) = {state.output[part][pair][i], state.output[part][pair][i + 2]};
            }
    }
}

// The warps' states together: 4 dimensions from `dim` on of one head.
DEVICE Result sum_of_warps(const float2* stats, const float* outputs, int head, int dim) {
    Result result;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        float2 stat = stats[warp * 8 + head];
        result.add(stat.x, stat.y, *reinterpret_cast<const float4*>(outputs + (warp * 8 + head) * OUT_STRIDE + dim));
    }
    return result;
}

// The partial results of a sequence together; `stats` and `outputs` are those of its first item, `stride` heads lie
// between items.
DEVICE Result sum_of_splits(const float2* stats, const float4* outputs, int splits, int stride) {
    constexpr int AT_ONCE = 8;
    Result result;
    for (int start = 0; start < splits; start += AT_ONCE) {
        float2 stat[AT_ONCE];
        float4 output[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int split = min(start + i, splits - 1);
            stat[i] = load_fresh(stats + static_cast<i64>(split) * stride);
            output[i] = load_fresh(outputs + static_cast<i64>(split) * stride * VECTORS);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (start + i < splits) result.add(stat[i].x, stat[i].y, output[i]);
    }
    return result;
}

// Whether this block is the last of a sequence's; then all of their partial results can be read.
DEVICE bool is_last(int* counter, int splits, int* shared_flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *shared_flag = atomicAdd(counter, 1) == splits - 1;
    __syncthreads();
    if (!*shared_flag) return false;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;  // for the next layer
    return true;
}
