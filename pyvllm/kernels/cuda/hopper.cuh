// What kernels for Hopper alone (sm_90a) need beyond `device.cuh`: barriers in shared memory that count bytes, copies of
// boxes of tensors by the copy engine, products by groups of four warps.
//
// "Rows of 128 bytes" below: a matrix of 16-bit elements in shared memory, 64 of a row, rows one after another, the
// 16-byte pieces of row r permuted, piece p at place p ^ (r % 8). The copy engine writes boxes 64 elements wide so
// (CU_TENSOR_MAP_SWIZZLE_128B), and the tensor cores read them so. Such a matrix begins at a multiple of 1,024 bytes.
#pragma once

#include <device.cuh>

using u64 = unsigned long long;

// What cuTensorMapEncodeTiled makes. A kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    u64 words[16];
};

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// --- barriers in shared memory ---------------------------------------------------------------------------------------
//
// A phase ends when `count` arrivals were made and all bytes that were announced have come. The phases' parities are
// 0, 1, 0, ...; a wait for the parity of the phase before the first returns at once.

using Barrier = u64;

DEVICE void init_barrier(Barrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Makes this thread's `init_barrier`s known to the copy engine.
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival, and `bytes` more that the phase will wait for.
DEVICE void arrive_and_expect(Barrier* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

DEVICE bool has_ended(Barrier* barrier, u32 parity) {
    u32 ended;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return ended;
}

// Until the phase of that parity has ended.
DEVICE void wait(Barrier* barrier, u32 parity) {
    while (!has_ended(barrier, parity)) {
    }
}

// --- copies of boxes of tensors --------------------------------------------------------------------------------------
//
// One thread starts a copy. Coordinates are of the box's first element, innermost first; elements outside the tensor
// are zeros, and they count as bytes. `target` is at a multiple of 128 bytes.

DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

DEVICE void copy_box(void* target, const TensorMap* map, Barrier* barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(target)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
        : "memory");
}

DEVICE void copy_box(void* target, const TensorMap* map, Barrier* barrier, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(target)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

// To about 1e-7; 0 for a divisor above 2^126.
DEVICE float quotient(float x, float y) {
    float result;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

// --- between ordinary writes of shared memory and its reads by the copy engine or the tensor cores -------------------

DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- registers: each group of four warps takes or gives back some, a multiple of 8 of each thread --------------------

template <int REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// --- barriers of some of a block's warps, 1 to 15 --------------------------------------------------------------------

DEVICE void meet(int barrier, int threads) {
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as one of those who `meet`, without waiting for them.
DEVICE void pass_by(int barrier, int threads) {
    asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- products by four warps ------------------------------------------------------------------------------------------
//
// Warps 4 i to 4 i + 3 execute together. Order: `fence_operands`; products; `commit_products`; `wait_products`.

// A matrix in shared memory in rows of 128 bytes, for the tensor cores, whose rows are those of A (or columns of B) and
// whose 64 columns are k. The next 16 of k begin 32 bytes on: add 2; eight rows on: add 64.
DEVICE u64 rows_of_k(const void* matrix) {
    return (shared_address(matrix) & 0x3ffffu) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// One whose rows are k and whose 64 columns are columns of B: for `TRANSPOSED`. The next 64 columns of B are in a matrix
// `bytes` after. The next 16 of k begin 16 rows on: add 128.
DEVICE u64 columns_of_k(const void* matrix, u32 bytes) {
    return (shared_address(matrix) & 0x3ffffu) >> 4 | static_cast<u64>(bytes >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// Before the first product after this thread touched registers that products read or write.
DEVICE void fence_operands() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products begun since the last call.
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the last `PENDING` groups are under way.
template <int PENDING>
DEVICE void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads and writes of `values` across this place: products under way use them unseen.
template <int SIZE>
DEVICE void pin(float (&values)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(values[i])::"memory");
}

template <int SIZE>
DEVICE void pin(u32 (&values)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; i++) asm volatile("" : "+r"(values[i])::"memory");
}

// sums[64, N] = a[64, 16] @ b[16, N], added to what `sums` holds if `add`. Of `sums`, warp w of the four holds rows
// 16 w to 16 w + 15; with g = lane / 4 and t = lane % 4, sums[4 j + i] is row g + i / 2 * 8, column 8 j + 2 t + i % 2.
// `a` in registers: two elements of k in a word, (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8,
// k 2t + 8).
template <int N, bool TRANSPOSED = false>
struct Product;

#if FLOAT16
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif

#define WGMMA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define WGMMA_SUMS_8 WGMMA_4(0), WGMMA_4(4)
#define WGMMA_SUMS_16 WGMMA_SUMS_8, WGMMA_4(8), WGMMA_4(12)
#define WGMMA_SUMS_24 WGMMA_SUMS_16, WGMMA_4(16), WGMMA_4(20)
#define WGMMA_SUMS_32 WGMMA_SUMS_24, WGMMA_4(24), WGMMA_4(28)
#define WGMMA_SUMS_40 WGMMA_SUMS_32, WGMMA_4(32), WGMMA_4(36)
#define WGMMA_SUMS_48 WGMMA_SUMS_40, WGMMA_4(40), WGMMA_4(44)
#define WGMMA_SUMS_56 WGMMA_SUMS_48, WGMMA_4(48), WGMMA_4(52)
#define WGMMA_SUMS_64 WGMMA_SUMS_56, WGMMA_4(56), WGMMA_4(60)
#define WGMMA_SUMS_72 WGMMA_SUMS_64, WGMMA_4(64), WGMMA_4(68)
#define WGMMA_SUMS_80 WGMMA_SUMS_72, WGMMA_4(72), WGMMA_4(76)
#define WGMMA_SUMS_88 WGMMA_SUMS_80, WGMMA_4(80), WGMMA_4(84)
#define WGMMA_SUMS_96 WGMMA_SUMS_88, WGMMA_4(88), WGMMA_4(92)
#define WGMMA_SUMS_104 WGMMA_SUMS_96, WGMMA_4(96), WGMMA_4(100)
#define WGMMA_SUMS_112 WGMMA_SUMS_104, WGMMA_4(104), WGMMA_4(108)
#define WGMMA_SUMS_120 WGMMA_SUMS_112, WGMMA_4(112), WGMMA_4(116)
#define WGMMA_SUMS_128 WGMMA_SUMS_120, WGMMA_4(120), WGMMA_4(124)

// COUNT: N / 2. P0 to P6: the names of the operands after the sums, %COUNT and on.
#define WGMMA(N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                                  \
    template <bool TRANSPOSED>                                                                                        \
    struct Product<N, TRANSPOSED> {                                                                                   \
        static DEVICE void run(float (&sums)[COUNT], u64 a, u64 b, bool add) {                                        \
            asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N              \
                         "k16." WGMMA_TYPES " {" WGMMA_NAMES_##COUNT "}, " P0 ", " P1 ", p, 1, 1, 0, " P3 ";}"        \
                         : WGMMA_SUMS_##COUNT                                                                         \
                         : "l"(a), "l"(b), "r"(static_cast<u32>(add)), "n"(int(TRANSPOSED)));                              \
        }                                                                                                             \
        static DEVICE void run(float (&sums)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {               \
            asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N              \
                         "k16." WGMMA_TYPES " {" WGMMA_NAMES_##COUNT "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4       \
                         ", p, 1, 1, " P6 ";}"                                                                        \
                         : WGMMA_SUMS_##COUNT                                                                         \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<u32>(add)), "n"(int(TRANSPOSED)));  \
        }                                                                                                             \
    };

WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA(144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
WGMMA(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA(208, 104, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
WGMMA(224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
WGMMA(240, 120, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
