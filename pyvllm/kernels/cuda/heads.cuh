// From a row of the projection to a query or key: RMSNorm of a head and rotation by position, as
// `pyvllm/kernels/triton/heads.py`.
//
// Macros: HEAD_DIM: D; NORM: 0 none, 1 the quotient rounded before it is multiplied, 2 only the product; ROTATED: the
// first dimensions of a head, which position turns, or 0; INTERLEAVED: 1 if (2 i, 2 i + 1) are partners, 0 if
// (i, i + ROTATED / 2) are.
#pragma once
#include <device.cuh>

struct HeadRule {
    const u16* weight;  // [D]
    const u16* cosine;  // [positions, ROTATED]
    const u16* sine;    // the same, with the sign that each dimension needs
    float eps;
};

DEVICE float rounded(float value) { return to_float(to_half(value)); }

// One head, by one warp. `target` and `source` [D], `scratch` [D] in shared memory; the warp may read `target` then.
DEVICE void prepare_head(u16* target, float* scratch, const u16* source, const HeadRule& rule, int position,
                         int lane) {
    const u16* cosines = rule.cosine + static_cast<i64>(position) * ROTATED;
    const u16* sines = rule.sine + static_cast<i64>(position) * ROTATED;
    constexpr int COUNT = HEAD_DIM / 32;
    float x[COUNT], weight[COUNT], cosine[COUNT], sine[COUNT];  // of dimensions lane, lane + 32, ...
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        int i = lane + 32 * j;
        x[j] = to_float(source[i]);
        if constexpr (NORM) weight[j] = to_float(rule.weight[i]);
        cosine[j] = ROTATED && i < ROTATED ? to_float(cosines[i]) : 1.0f;
        sine[j] = ROTATED && i < ROTATED ? to_float(sines[i]) : 0.0f;
        squares += x[j] * x[j];
    }
    if constexpr (NORM) {
        float factor = inverse_root(sum_of_warp(squares) / HEAD_DIM + rule.eps);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            x[j] *= factor;
            if constexpr (NORM == 1) x[j] = rounded(x[j]);
            x[j] = rounded(x[j] * weight[j]);
        }
    }
    if constexpr (ROTATED) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) scratch[lane + 32 * j] = x[j];
        __syncwarp();
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            int i = lane + 32 * j;
            int partner = INTERLEAVED ? i ^ 1 : i < ROTATED / 2 ? i + ROTATED / 2 : i - ROTATED / 2;
            if (i < ROTATED) x[j] = x[j] * cosine[j] + scratch[partner] * sine[j];
        }
        __syncwarp();  // before the next head takes its place
    }
#pragma unroll
    for (int j = 0; j < COUNT; j++) target[lane + 32 * j] = to_half(x[j]);
}
