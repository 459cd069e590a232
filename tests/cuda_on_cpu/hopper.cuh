// The functions of the kernels' own `hopper.cuh` for a CPU: see `device.cuh` beside this. Products happen when their
// group is waited for, late copies when their barrier is, others at once: one finds missing waits for data, the other
// for room. What swizzled addresses in shared memory hold is as on the GPU.
#pragma once

#include <device.cuh>

#include <functional>

using u64 = unsigned long long;

#define __grid_constant__

// Address, sizes and strides in bytes of 5 dimensions, sizes of the box: `tensor_map` in __init__.py makes it.
struct alignas(64) TensorMap {
    u64 address;
    u64 sizes[5];
    u64 strides[5];
    u32 box[5];
};

struct Barrier {
    u16 count, missing, parity;
    short sixteens;  // bytes that were announced and have not come
};
static_assert(sizeof(Barrier) == 8, "as on the GPU");

DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(static_cast<const unsigned char*>(pointer) - cpu::shared) + cpu::OFFSET;
}

namespace cpu {

// What lies at a swizzled address.
static unsigned char* swizzled(u32 address) { return shared - OFFSET + (address ^ (address >> 3 & 0x70)); }

static float element(u32 address) {
    u16 half;
    std::memcpy(&half, swizzled(address), 2);
    return half_to_float(half);
}

}  // namespace cpu

// --- barriers in shared memory ---------------------------------------------------------------------------------------

namespace cpu {

struct BoxCopy {
    u32 target;
    TensorMap map;
    Barrier* barrier;
    std::vector<i64> first;
};

static std::deque<BoxCopy> boxes;  // under way

static void count(Barrier* barrier, int arrivals, int bytes) {
    if (barrier->missing < arrivals) fail("more arrivals at a barrier than it counts");
    barrier->missing -= arrivals;
    barrier->sixteens += bytes / 16;
    progress++;
    if (barrier->missing || barrier->sixteens) return;
    barrier->missing = barrier->count;
    barrier->parity ^= 1;
}

static void perform(const BoxCopy& copy) {
    u32 elements = 1;
    for (u32 size : copy.map.box) elements *= max(size, 1u);
    for (u32 i = 0; i < elements; i++) {
        const char* source = reinterpret_cast<const char*>(copy.map.address);
        u32 rest = i;
        bool inside = true;
        for (size_t d = 0; d < copy.first.size(); d++) {
            i64 place = copy.first[d] + rest % copy.map.box[d];
            rest /= copy.map.box[d];
            inside = inside && place >= 0 && place < static_cast<i64>(copy.map.sizes[d]);
            source += place * static_cast<i64>(copy.map.strides[d]);
        }
        unsigned char* target = swizzled(copy.target + 2 * i);
        std::memset(target, 0, 2);
        if (inside) std::memcpy(target, source, 2);
    }
    count(copy.barrier, 0, -2 * static_cast<int>(elements));
}

static void begin_box(void* target, const TensorMap* map, Barrier* barrier, std::vector<i64> first) {
    u32 address = shared_address(target);
    if (address % 128 || map->box[0] != 64) fail("a copy of a box that is not to rows of 128 bytes");
    BoxCopy copy = {address, *map, barrier, std::move(first)};
    if (copies_are_late) boxes.push_back(std::move(copy));
    else perform(copy);
}

}  // namespace cpu

DEVICE void init_barrier(Barrier* barrier, int count) {
    *barrier = {static_cast<u16>(count), static_cast<u16>(count), 0, 0};
}

DEVICE void publish_barriers() {}

// Others go on first, with the place in memory that this gave them.
DEVICE void arrive(Barrier* barrier) {
    cpu::count(barrier, 1, 0);
    swapcontext(&cpu::current->context, &cpu::scheduler);
}

DEVICE void arrive_and_expect(Barrier* barrier, u32 bytes) { cpu::count(barrier, 1, bytes); }

DEVICE void wait(Barrier* barrier, u32 parity) {
    while (barrier->parity == parity) {
        auto is_for_it = [&](const cpu::BoxCopy& copy) { return copy.barrier == barrier; };
        auto late = std::find_if(cpu::boxes.begin(), cpu::boxes.end(), is_for_it);
        if (late == cpu::boxes.end()) {
            swapcontext(&cpu::current->context, &cpu::scheduler);
        } else {
            cpu::BoxCopy copy = *late;
            cpu::boxes.erase(late);
            cpu::perform(copy);
        }
    }
}

// --- copies of boxes of tensors --------------------------------------------------------------------------------------

DEVICE void prefetch_map(const TensorMap*) {}

template <typename... Coordinates>
void copy_box(void* target, const TensorMap* map, Barrier* barrier, Coordinates... first) {
    cpu::begin_box(target, map, barrier, {first...});
}

DEVICE float quotient(float x, float y) { return x / y; }
DEVICE void fence_async() {}

template <int REGISTERS>
void take_registers() {}

template <int REGISTERS>
void give_registers() {}

// --- barriers of some of a block's warps -----------------------------------------------------------------------------

DEVICE void meet(int barrier, int threads) {
    cpu::Rendezvous& meeting = cpu::named[barrier];
    meeting.size = threads;
    cpu::meet(meeting);
}

DEVICE void pass_by(int barrier, int threads) {
    cpu::Rendezvous& meeting = cpu::named[barrier];
    meeting.size = threads;
    if (++meeting.arrived == threads) meeting.arrived = 0, meeting.times++, cpu::progress++;
}

// --- products by four warps ------------------------------------------------------------------------------------------

namespace cpu {

using ProductGroup = std::vector<std::function<void()>>;

struct Products {
    ProductGroup open;
    std::deque<ProductGroup> groups;
};

static Products& my_products() {
    static std::vector<Products> of_threads;
    if (of_threads.size() < fibers.size()) of_threads.resize(fibers.size());
    return of_threads[current - fibers.data()];
}

}  // namespace cpu

DEVICE u64 rows_of_k(const void* matrix) { return shared_address(matrix) >> 4 | 64ull << 32; }

DEVICE u64 columns_of_k(const void* matrix, u32 bytes) {
    return rows_of_k(matrix) | static_cast<u64>(bytes >> 4) << 16;
}

DEVICE void fence_operands() {}

DEVICE void commit_products() {
    cpu::Products& mine = cpu::my_products();
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}

template <int PENDING>
void wait_products() {
    auto& groups = cpu::my_products().groups;
    while (groups.size() > PENDING) {
        for (auto& product : groups.front()) product();
        groups.pop_front();
    }
}

template <typename T, int SIZE>
void pin(T (&)[SIZE]) {}

template <int N, bool TRANSPOSED = false>
struct Product {
    static u32 field(u64 descriptor, int bit) { return (descriptor >> bit & 0x3fff) << 4; }

    static float of_rows(u64 matrix, u32 row, u32 k) {
        return cpu::element(field(matrix, 0) + row / 8 * field(matrix, 32) + row % 8 * 128 + 2 * k);
    }

    static float of_columns(u64 matrix, u32 k, u32 column) {
        u32 group = column / 64 * field(matrix, 16) + k / 8 * field(matrix, 32);
        return cpu::element(field(matrix, 0) + group + k % 8 * 128 + column % 64 * 2);
    }

    // `left`: the left operand's element at (one of this lane's two rows, k).
    template <typename Left>
    static void begin(float (&sums)[N / 2], u64 b, bool add, Left left) {
        float* target = sums;
        u32 t = threadIdx.x % 4;
        auto product = [=] {
            for (int i = 0; i < N / 2; i++) {
                u32 column = i / 4 * 8 + 2 * t + i % 2;
                float sum = add ? target[i] : 0.0f;
                for (u32 k = 0; k < 16; k++)
                    sum += left(i % 4 / 2, k) * (TRANSPOSED ? of_columns(b, k, column) : of_rows(b, column, k));
                target[i] = sum;
            }
        };
        cpu::my_products().open.push_back(product);
    }

    static void run(float (&sums)[N / 2], u64 a, u64 b, bool add) {
        u32 first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        begin(sums, b, add, [=](u32 half, u32 k) { return of_rows(a, first + 8 * half, k); });
    }

    static void run(float (&sums)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {
        cpu::Warp& warp = cpu::my_warp();
        u32 words[4] = {a0, a1, a2, a3}, quad = cpu::my_lane() / 4 * 4;
        std::memcpy(warp.words[cpu::my_lane()], words, sizeof words);
        cpu::meet(warp.meeting);
        struct {
            float values[2][16];
        } rows;
        for (u32 half = 0; half < 2; half++)
            for (u32 k = 0; k < 16; k++) {
                float2 pair = unpack(warp.words[quad + k % 8 / 2][k / 8 * 2 + half]);
                rows.values[half][k] = k % 2 ? pair.y : pair.x;
            }
        cpu::meet(warp.meeting);
        begin(sums, b, add, [=](u32 half, u32 k) { return rows.values[half][k]; });
    }
};
