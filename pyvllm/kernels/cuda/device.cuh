// What the kernels of this folder need of the GPU beyond plain C++, in one place: 16-bit floats, asynchronous copies,
// tensor cores, programmatic dependent launch. No toolkit header is included, so that NVRTC needs none.
//
// A program that runs the kernels' sources on a CPU supplies its own file of this name with the same functions.
//
// Macro FLOAT16 (0 or 1): a 16-bit float is IEEE half precision, else bfloat16.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

constexpr u32 ALL_LANES = 0xffffffffu;

// Declares `name`, the block's dynamic shared memory.
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

#define DEVICE __device__ __forceinline__

// --- arithmetic, to about 1e-7 ---------------------------------------------------------------------------------------

constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float inverse_root(float x) { return rsqrtf(x); }

DEVICE float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

DEVICE float sum_of_warp(float value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(ALL_LANES, value, lanes);
    return value;
}

// --- 16-bit floats: two in a word, the first in the low half ---------------------------------------------------------

DEVICE float2 unpack(u32 pair) {
    float2 values;
#if FLOAT16
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(pair));
#else
    values.x = __uint_as_float(pair << 16);
    values.y = __uint_as_float(pair & 0xffff0000u);
#endif
    return values;
}

DEVICE u32 pack(float first, float second) {
    u32 pair;
#if FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

DEVICE float to_float(u16 value) { return unpack(value).x; }

DEVICE u16 to_half(float value) { return static_cast<u16>(pack(value, 0.0f)); }

// --- asynchronous copies from global to shared memory ----------------------------------------------------------------

// 16 bytes, past the L1 cache.
DEVICE void copy_async(void* target, const void* source) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(target));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
}

// 16 bytes, or 16 zeros without a look at `source`.
DEVICE void copy_async_or_zero(void* target, const void* source, bool real) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(target));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(real ? 16 : 0)
                 : "memory");
}

// Closes the group of copies that this thread has begun since the last call.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last `PENDING` groups of this thread are under way.
template <int PENDING>
DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- tensor cores ----------------------------------------------------------------------------------------------------

// sums[16, 8] += a[16, 16] @ b[16, 8]. With g = lane / 4 and t = lane % 4 a lane holds, two elements of k in a word,
//   a: (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8)
//   b: (k 2t, column g), (k 2t + 8, column g)
//   sums: (row g, column 2t), (row g, column 2t + 1), (row g + 8, column 2t), (row g + 8, column 2t + 1)
DEVICE void multiply_add(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if FLOAT16
#define MMA_TYPES "f32.f16.f16.f32"
#else
#define MMA_TYPES "f32.bf16.bf16.f32"
#endif
    asm volatile("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Of a matrix [8, 8] of 16-bit elements, whose row lane / 4, columns lane % 4 * 2 and the next, a lane holds in a word.
DEVICE u32 transpose(u32 word) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

DEVICE u32 low_halves(u32 first, u32 second) { return __byte_perm(first, second, 0x5410); }

DEVICE u32 high_halves(u32 first, u32 second) { return __byte_perm(first, second, 0x7632); }

// --- memory that other blocks of this kernel write -------------------------------------------------------------------

// Past the L1 cache, which may hold what was there before.
DEVICE float2 load_fresh(const float2* source) {
    float2 value;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(source) : "memory");
    return value;
}

DEVICE float4 load_fresh(const float4* source) {
    float4 value;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(source)
                 : "memory");
    return value;
}

// --- programmatic dependent launch -----------------------------------------------------------------------------------

// Once all blocks have called this, the next kernel may begin.
DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernel before this one has ended and its writes are visible. What threads may touch before they call
// this, and who must: see kernels/triton/pdl.py.
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
