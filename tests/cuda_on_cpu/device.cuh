// The functions of the kernels' own `device.cuh`, and the CUDA built-ins that they use, for a CPU: each CUDA thread is
// a fiber, and what a warp or block does together is a rendezvous of fibers. Blocks run one after another.
//
// It finds wrong indices, missing waits and barriers that not all threads reach, and races of warps, which get ahead of
// each other by chance, but always the same. Threads take turns at rendezvous only.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <memory>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using std::max;
using std::min;

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define DEVICE inline
#define SHARED_MEMORY(name) unsigned char* name = cpu::shared

struct dim3_ {
    u32 x, y, z;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;

namespace cpu {

struct Rendezvous {
    int size = 0, arrived = 0;
    i64 times = 0;
};

struct Copy {
    void* target;
    const void* source;
    int bytes;
    int wanted;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    dim3_ thread;
    bool done = false, waited = false;
    std::vector<Copy> open;              // copies of the group that is not closed yet
    std::deque<std::vector<Copy>> groups;  // closed groups under way, oldest first
};

struct Warp {
    Rendezvous meeting;
    u32 words[32][8];
};

static unsigned char* shared;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Rendezvous block;
static Rendezvous named[16];
static ucontext_t scheduler;
static Fiber* current;
static i64 progress;
static dim3_ block_index, grid_size, block_size;
static bool copies_are_late;

[[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "kernel on the CPU: %s, thread %u of block (%u, %u)\n", what, current ? current->thread.x : 0,
                 block_index.x, block_index.y);
    std::_Exit(70);
}

static void meet(Rendezvous& meeting) {
    i64 now = meeting.times;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        meeting.times++;
        progress++;
    }
    while (meeting.times == now) swapcontext(&current->context, &scheduler);
}

static Warp& my_warp() { return warps[current->thread.x / 32]; }
static u32 my_lane() { return current->thread.x % 32; }

static void perform(const Copy& copy) {
    std::memset(copy.target, 0, copy.wanted);
    std::memcpy(copy.target, copy.source, copy.bytes);
}

static void begin_copy(void* target, const void* source, int bytes, int wanted) {
    if (reinterpret_cast<size_t>(target) % wanted || (bytes && reinterpret_cast<size_t>(source) % wanted))
        fail("copy_async of a misaligned address");
    Copy copy = {target, source, bytes, wanted};
    if (!copies_are_late) perform(copy);
    current->open.push_back(copy);
}

// Shared memory begins OFFSET bytes after a multiple of ALIGNMENT.
constexpr int GUARD = 4096, ALIGNMENT = 1024, OFFSET = 128;

// Of so many passes over the threads some warps rest in all but the last, so that others get ahead of them.
constexpr u32 PASSES = 64;

static bool rests(u32 warp, u32 pass) {
    u32 hash = (pass / PASSES * 64 + warp + 1) * 2654435761u;
    return pass % PASSES != 0 && hash >> 31;
}

// Runs `body` for each thread of each block.
template <typename Body>
void run(dim3_ grid, int threads, int shared_bytes, Body body) {
    constexpr int STACK = 128 * 1024;
    static Body* entry;
    bool any_waited = false;
    entry = &body;
    grid_size = grid;
    block_size = {static_cast<u32>(threads), 1, 1};
    std::unique_ptr<unsigned char[]> memory(new unsigned char[shared_bytes + GUARD + 2 * ALIGNMENT]);
    shared = memory.get() + (ALIGNMENT - reinterpret_cast<size_t>(memory.get()) % ALIGNMENT) + OFFSET;
    for (u32 z = 0; z < grid.z; z++) for (u32 y = 0; y < grid.y; y++) for (u32 x = 0; x < grid.x; x++) {
        block_index = {x, y, z};
        std::memset(shared, 0xff, shared_bytes + GUARD);  // NaN, if it is read before it is written
        fibers.clear();
        fibers.resize(threads);
        warps.assign(threads / 32, Warp{});
        for (Warp& warp : warps) warp.meeting.size = 32;
        block = Rendezvous{threads};
        for (Rendezvous& meeting : named) meeting = Rendezvous{};
        for (int i = 0; i < threads; i++) {
            Fiber& fiber = fibers[i];
            fiber.thread = {static_cast<u32>(i), 0, 0};
            fiber.stack.reset(new char[STACK]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = STACK;
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, +[] {
                (*entry)();
                current->done = true;
                progress++;
            }, 0);
        }
        bool running = true;
        for (u32 pass = 1; running; pass++) {
            running = false;
            i64 before = progress;
            for (Fiber& fiber : fibers) {
                if (fiber.done) continue;
                running = true;
                if (rests(fiber.thread.x / 32, pass)) continue;
                current = &fiber;
                swapcontext(&scheduler, &fiber.context);
            }
            if (running && progress == before && pass % PASSES == 0) fail("threads wait for others that do not come");
        }
        for (Fiber& fiber : fibers) {
            current = &fiber;
            if (fiber.waited != fibers[0].waited) fail("ended without wait_for_previous_kernel, unlike others");
        }
        any_waited |= fibers[0].waited;
        for (int i = 0; i < GUARD; i++) if (shared[shared_bytes + i] != 0xff) fail("wrote beyond shared memory");
    }
    if (!any_waited) fail("all blocks ended without wait_for_previous_kernel");
}

}  // namespace cpu

#define threadIdx (cpu::current->thread)
#define blockIdx cpu::block_index
#define gridDim cpu::grid_size
#define blockDim cpu::block_size

DEVICE void __syncthreads() { cpu::meet(cpu::block); }
DEVICE void __syncwarp() { cpu::meet(cpu::my_warp().meeting); }
DEVICE void __threadfence() {}

template <typename T>
T __shfl_xor_sync(u32, T value, int mask) {
    static_assert(sizeof(T) == 4, "words only");
    cpu::Warp& warp = cpu::my_warp();
    u32 lane = cpu::my_lane();
    std::memcpy(&warp.words[lane][0], &value, 4);
    cpu::meet(warp.meeting);
    std::memcpy(&value, &warp.words[lane ^ mask][0], 4);
    cpu::meet(warp.meeting);
    return value;
}

template <typename T>
T __shfl_sync(u32, T value, int source) {
    static_assert(sizeof(T) == 4, "words only");
    cpu::Warp& warp = cpu::my_warp();
    std::memcpy(&warp.words[cpu::my_lane()][0], &value, 4);
    cpu::meet(warp.meeting);
    std::memcpy(&value, &warp.words[source % 32][0], 4);
    cpu::meet(warp.meeting);
    return value;
}

DEVICE float sum_of_warp(float value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(ALL_LANES, value, lanes);
    return value;
}

DEVICE int atomicAdd(int* target, int value) {
    int old = *target;
    *target += value;
    return old;
}

DEVICE float inverse_root(float x) { return 1.0f / std::sqrt(x); }
DEVICE float power_of_two(float x) { return std::exp2(x); }

DEVICE float float_of_bits(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

DEVICE float half_to_float(u16 bits) {
#if FLOAT16
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return value;
#else
    return float_of_bits(static_cast<u32>(bits) << 16);
#endif
}

DEVICE u16 float_to_half(float value) {
    u16 half;
#if FLOAT16
    _Float16 rounded = static_cast<_Float16>(value);
    std::memcpy(&half, &rounded, 2);
#else
    u32 bits;
    std::memcpy(&bits, &value, 4);
    half = static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
#endif
    return half;
}

DEVICE float2 unpack(u32 pair) { return {half_to_float(pair & 0xffff), half_to_float(pair >> 16)}; }
DEVICE u32 pack(float first, float second) { return float_to_half(first) | float_to_half(second) << 16; }
DEVICE float to_float(u16 value) { return half_to_float(value); }
DEVICE u16 to_half(float value) { return float_to_half(value); }

DEVICE void copy_async(void* target, const void* source) { cpu::begin_copy(target, source, 16, 16); }

DEVICE void copy_async_or_zero(void* target, const void* source, bool real) {
    cpu::begin_copy(target, source, real ? 16 : 0, 16);
}

DEVICE void commit_copies() {
    cpu::current->groups.push_back(std::move(cpu::current->open));
    cpu::current->open.clear();
}

template <int PENDING>
void wait_copies() {
    auto& groups = cpu::current->groups;
    while (groups.size() > PENDING) {
        for (const cpu::Copy& copy : groups.front()) if (cpu::copies_are_late) cpu::perform(copy);
        groups.pop_front();
    }
}

DEVICE void multiply_add(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    cpu::Warp& warp = cpu::my_warp();
    u32 lane = cpu::my_lane(), words[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(warp.words[lane], words, sizeof words);
    cpu::meet(warp.meeting);
    for (int i = 0; i < 4; i++) {
        u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (u32 k = 0; k < 16; k++) {
            u32 a = warp.words[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8];
            u32 b = warp.words[column * 4 + k % 8 / 2][4 + k / 8];
            float2 left = unpack(a), right = unpack(b);
            sums[i] += k % 2 ? left.y * right.y : left.x * right.x;
        }
    }
    cpu::meet(warp.meeting);
}

DEVICE u32 transpose(u32 word) {
    cpu::Warp& warp = cpu::my_warp();
    u32 lane = cpu::my_lane();
    warp.words[lane][0] = word;
    cpu::meet(warp.meeting);
    auto half = [&](u32 row, u32 column) { return warp.words[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xffff; };
    u32 result = half(lane % 4 * 2, lane / 4) | half(lane % 4 * 2 + 1, lane / 4) << 16;
    cpu::meet(warp.meeting);
    return result;
}

DEVICE u32 low_halves(u32 first, u32 second) { return (first & 0xffff) | second << 16; }
DEVICE u32 high_halves(u32 first, u32 second) { return first >> 16 | (second & 0xffff0000u); }

template <typename T>
T load_fresh(const T* source) {
    return *source;
}

DEVICE void allow_next_kernel() {}
DEVICE void wait_for_previous_kernel() { cpu::current->waited = true; }
