// y[M, N] = x[M, K] @ W[N, K]^T for few rows M, where reading W once is all the work there is.
//
// One block on each multiprocessor goes through tiles of ROWS rows of W. Its warps share each row: warp w takes every
// WARPS-th run of STEP columns. Weights travel from memory into a ring of shared memory, STAGES runs ahead of their use
// and across tiles; each thread copies just the bytes that it will feed to the tensor cores itself, so the ring needs
// no barrier. Since weights never depend on other kernels, the ring is filled before the kernel before has ended.
//
// Tensor cores take W as their left operand: the M rows of x fill a quarter or half of the right one, but arithmetic
// costs nothing here. Within a run the order of columns is what makes the loads 16 bytes wide, for W and x alike.
//
// Warps meet when they have done several tiles, and add up all of these at once.
//
// Macros: FLOAT16 (see device.cuh); K, a multiple of STEP; WARPS; STAGES; ROWS: 8 or 16, 16 with GATED; BLOCKS_OF_8:
// 1 for M <= 8, 2 for M <= 16; NORM: 0 none, 1 RMSNorm of x, its quotient rounded before it is multiplied, 2 only the
// product rounded; GATED: 1 if y = silu(gate) * up, W being the N rows of gate, then those of up.
#include <device.cuh>

constexpr int THREADS = WARPS * 32;
constexpr int STEP = 64;
constexpr int STEPS = K / STEP;
constexpr int VECTORS = K / 8;  // of 16 bytes, of a row
constexpr int LOADS = ROWS / 8 * 2;  // of 16 bytes, of a thread for a run
constexpr int OUT_ROWS = GATED ? 8 : ROWS;
constexpr int COLUMNS = 8 * BLOCKS_OF_8;
constexpr int OUTPUTS = (2 * OUT_ROWS * COLUMNS + THREADS - 1) / THREADS;  // of a thread, at once
// Elements from a row of x, and of the partial sums, to the next; neighbouring rows start in different banks.
constexpr int X_STRIDE = K + 32;
constexpr int SUM_STRIDE = ROWS + 4;

// Where a warp is in the sequence of its runs.
struct Cursor {
    int tile;
    int step;
};

struct Weights {
    const u16* data;
    int rows;  // N
    int tiles;
};

DEVICE void advance(Cursor& cursor, int warp) {
    cursor.step += WARPS;
    if (cursor.step >= STEPS) {
        cursor.step = warp;
        cursor.tile += gridDim.x;
    }
}

// Starts copying the lane's part of a run to `slots[0]`, `slots[THREADS]`, ...; nothing after the last run.
DEVICE void fetch(uint4* slots, const Cursor& cursor, const Weights& weights, int lane) {
    if (cursor.tile < weights.tiles) {
        // Rows beyond the last repeat it and are not stored.
        int row = min(cursor.tile * OUT_ROWS + lane / 4, weights.rows - 1);
        const u16* source = weights.data + static_cast<i64>(row) * K + cursor.step * STEP + lane % 4 * 8;
        copy_async(slots, source);
        copy_async(slots + THREADS, source + 32);
        if constexpr (ROWS == 16) {
            int other = GATED ? row + weights.rows : min(cursor.tile * OUT_ROWS + lane / 4 + 8, weights.rows - 1);
            source += static_cast<i64>(other - row) * K;
            copy_async(slots + 2 * THREADS, source);
            copy_async(slots + 3 * THREADS, source + 32);
        }
    }
    commit_copies();
}

// x [M, K] to `target` [M, X_STRIDE].
DEVICE void load_x(u16* target, const u16* x, i64 x_stride, int m) {
    constexpr int AT_ONCE = 8;  // on their way together
    for (int start = threadIdx.x; start < m * VECTORS; start += AT_ONCE * THREADS) {
        uint4 values[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int i = start + j * THREADS, row = i / VECTORS, column = i % VECTORS * 8;
            if (row < m) values[j] = *reinterpret_cast<const uint4*>(x + row * x_stride + column);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int i = start + j * THREADS, row = i / VECTORS, column = i % VECTORS * 8;
            if (row < m) *reinterpret_cast<uint4*>(target + row * X_STRIDE + column) = values[j];
        }
    }
}

DEVICE float sum_of_squares(uint4 vector) {
    float sum = 0.0f;
    for (u32 word : {vector.x, vector.y, vector.z, vector.w}) {
        float2 pair = unpack(word);
        sum += pair.x * pair.x + pair.y * pair.y;
    }
    return sum;
}

DEVICE u32 normalized(u32 pair, float factor, u32 weight) {
    float2 x = unpack(pair), w = unpack(weight);
    x = {x.x * factor, x.y * factor};
    if constexpr (NORM == 1) x = unpack(pack(x.x, x.y));
    return pack(x.x * w.x, x.y * w.y);
}

// RMSNorm of x [m, K] to `target` [m, X_STRIDE]. `squares` [COLUMNS, WARPS]; each thread has copied the `weight` that it
// reads.
DEVICE void load_normalized(u16* target, float* squares, const u16* x, i64 x_stride, const uint4* weight, float eps,
                            int m) {
    constexpr int OF_ROW = (VECTORS + THREADS - 1) / THREADS;
    constexpr int AT_ONCE = OF_ROW < 8 ? 8 / OF_ROW : 1;  // rows on their way together
    int warp = threadIdx.x / 32;
    for (int start = 0; start < m; start += AT_ONCE) {
        uint4 values[AT_ONCE][OF_ROW];
#pragma unroll
        for (int row = 0; row < AT_ONCE; row++)
#pragma unroll
            for (int j = 0; j < OF_ROW; j++) {
                int i = threadIdx.x + j * THREADS;
                values[row][j] = {0, 0, 0, 0};
                if (start + row < m && i < VECTORS)
                    values[row][j] = *reinterpret_cast<const uint4*>(x + (start + row) * x_stride + 8 * i);
            }
#pragma unroll
        for (int row = 0; row < AT_ONCE; row++) {
            if (start + row >= m) break;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < OF_ROW; j++) sum += sum_of_squares(values[row][j]);
            sum = sum_of_warp(sum);
            if (threadIdx.x % 32 == 0) squares[(start + row) * WARPS + warp] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int row = 0; row < AT_ONCE; row++) {
            if (start + row >= m) break;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += squares[(start + row) * WARPS + i];
            float factor = inverse_root(sum / K + eps);
            uint4* normed = reinterpret_cast<uint4*>(target + (start + row) * X_STRIDE);
#pragma unroll
            for (int j = 0; j < OF_ROW; j++) {
                int i = threadIdx.x + j * THREADS;
                if (i >= VECTORS) break;
                uint4 value = values[row][j], w = weight[i];
                normed[i] = {normalized(value.x, factor, w.x), normalized(value.y, factor, w.y),
                             normalized(value.z, factor, w.z), normalized(value.w, factor, w.w)};
            }
        }
    }
}

// Adds a run's products to the sums of ROWS rows (tile) by 8 columns (rows of x): two parts of them, so that no product
// waits for all before it.
DEVICE void accumulate(float (&sums)[BLOCKS_OF_8][2][4], const uint4* slots, const u16* x, int m) {
    uint4 w[4] = {slots[0], slots[THREADS], {0, 0, 0, 0}, {0, 0, 0, 0}};
    if constexpr (ROWS == 16) {
        w[2] = slots[2 * THREADS];
        w[3] = slots[3 * THREADS];
    }
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < BLOCKS_OF_8; block++) {
        // Columns beyond M repeat the last row of x and are not stored.
        int row = min(block * 8 + lane / 4, m - 1);
        const uint4* source = reinterpret_cast<const uint4*>(x + row * X_STRIDE + lane % 4 * 8);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 b = source[4 * half], upper = w[half], lower = w[2 + half];
            multiply_add(sums[block][0], upper.x, lower.x, upper.y, lower.y, b.x, b.y);
            multiply_add(sums[block][1], upper.z, lower.z, upper.w, lower.w, b.z, b.w);
        }
    }
}

// A warp's sums to `partial` [m, SUM_STRIDE].
DEVICE void store_partial(float* partial, const float (&sums)[BLOCKS_OF_8][2][4], int m) {
    int group = threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int block = 0; block < BLOCKS_OF_8; block++)
#pragma unroll
        for (int i = 0; i < (ROWS == 16 ? 4 : 2); i++) {
            int column = first + 8 * block + i % 2;
            float sum = sums[block][0][i] + sums[block][1][i];
            if (column < m) partial[column * SUM_STRIDE + group + i / 2 * 8] = sum;
        }
}

// The sum over warps at `partial` [WARPS, m, SUM_STRIDE], of one row of the tile and one column.
DEVICE float sum_of_partials(const float* partial, int m) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += partial[warp * m * SUM_STRIDE];
    return sum;
}

struct Pair {
    float first = 0.0f, second = 0.0f;
};

// What a thread finishes of the tiles that the warps do at once.
struct Output {
    int tile;    // its number among these
    int row;     // of the tile
    int column;  // row of x

    DEVICE Output(int number, int m)
        : tile(number / OUT_ROWS / m), row(number % OUT_ROWS), column(number / OUT_ROWS % m) {}
};

// x: rows of `x_stride` elements. W: [N or 2 N, K]. bias: as many as W has rows, or null.
// norm_weight: [K]. residual: [M, N] or null; added to y. out: [M, N], may be residual.
// Shared memory: what `_shared_bytes` in linear.py says, in the order in which it is carved up here.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemv(const u16* x, const u16* __restrict__ weight, const u16* __restrict__ bias,
         const u16* __restrict__ norm_weight, const u16* residual, u16* out, int x_stride, int m, int n,
         float eps) {
    SHARED_MEMORY(shared);
    uint4* ring = reinterpret_cast<uint4*>(shared);                               // [STAGES, LOADS, THREADS]
    float* partial = reinterpret_cast<float*>(ring + STAGES * LOADS * THREADS);  // [tiles, WARPS, M, SUM_STRIDE]
    float* squares = partial + 2 * WARPS * COLUMNS * SUM_STRIDE;                  // [COLUMNS, WARPS]
    uint4* norm = reinterpret_cast<uint4*>(squares + COLUMNS * WARPS);            // [VECTORS] if NORM
    u16* xs = reinterpret_cast<u16*>(norm + (NORM ? VECTORS : 0));                  // [M, X_STRIDE]

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Weights weights = {weight, n, (n + OUT_ROWS - 1) / OUT_ROWS};
    if constexpr (NORM) {
        for (int i = threadIdx.x; i < VECTORS; i += THREADS) copy_async(norm + i, norm_weight + 8 * i);
        commit_copies();
    }
    Cursor cursor = {warp < STEPS ? static_cast<int>(blockIdx.x) : weights.tiles, warp};
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        fetch(ring + stage * LOADS * THREADS + threadIdx.x, cursor, weights, lane);
        advance(cursor, warp);
    }
    allow_next_kernel();
    wait_for_previous_kernel();
    if constexpr (NORM) {
        wait_copies<STAGES>();
        load_normalized(xs, squares, x, x_stride, norm, eps, m);
    } else {
        load_x(xs, x, x_stride, m);
    }
    __syncthreads();

    int blocks = gridDim.x, at_once = 2 * COLUMNS / m, stage = 0;
    for (int first = blockIdx.x; first < weights.tiles; first += at_once * blocks) {
        int count = min(at_once, (weights.tiles - first + blocks - 1) / blocks);
        Pair biases[OUTPUTS];
        float old[OUTPUTS];
        i64 targets[OUTPUTS];
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) {
            Output output(threadIdx.x + i * THREADS, m);
            int row = (first + output.tile * blocks) * OUT_ROWS + output.row;
            targets[i] = output.tile < count && row < n ? static_cast<i64>(output.column) * n + row : -1;
            old[i] = 0.0f;
            if (targets[i] < 0) continue;
            if (residual != nullptr) old[i] = to_float(residual[targets[i]]);
            if (bias != nullptr) biases[i] = {to_float(bias[row]), GATED ? to_float(bias[n + row]) : 0.0f};
        }
        for (int i = 0; i < count; i++) {
            float sums[BLOCKS_OF_8][2][4] = {};
            for (int step = warp; step < STEPS; step += WARPS) {
                uint4* slots = ring + stage * LOADS * THREADS + threadIdx.x;
                wait_copies<STAGES - 1>();
                accumulate(sums, slots, xs + step * STEP, m);
                fetch(slots, cursor, weights, lane);
                advance(cursor, warp);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            store_partial(partial + (i * WARPS + warp) * m * SUM_STRIDE, sums, m);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) {
            if (targets[i] < 0) continue;
            Output output(threadIdx.x + i * THREADS, m);
            const float* mine = partial + (output.tile * WARPS * m + output.column) * SUM_STRIDE + output.row;
            float y = sum_of_partials(mine, m) + biases[i].first;
            if constexpr (GATED) {
                float up = sum_of_partials(mine + 8, m) + biases[i].second;
                y = y / (1.0f + power_of_two(-LOG2_E * y)) * up;
            }
            out[targets[i]] = to_half(y + old[i]);
        }
        __syncthreads();  // before other sums take their place
    }
}
