// How the four lanes that hold a row of a product's sums write it in pieces of 16 bytes.
#pragma once

#include <device.cuh>

// Four lanes that follow each other exchange words: lane i gets the i-th of each.
DEVICE void transpose_words(u32 (&words)[4]) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, odd ? words[i] : words[i + 1], 1);
        words[i] = odd ? other : words[i];
        words[i + 1] = odd ? words[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 other = __shfl_xor_sync(ALL_LANES, upper ? words[i] : words[i + 2], 2);
        words[i] = upper ? other : words[i];
        words[i + 2] = upper ? words[i + 2] : other;
    }
}
