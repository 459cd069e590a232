// y[M, N] = silu(gate) * up for many rows M, gate and up being x[M, K] times the first and last N rows of W[2 N, K].
//
// Blocks stay and go through tiles of the result: TILE_M rows of x by TILE_N rows of W, half of them of gate, half of
// up, of the same columns of y. One thread has boxes of x and W, STEP columns wide, copied into a ring of shared
// memory, STAGES ahead and across tiles; GROUPS times four warps multiply them, 64 rows of x each. A thread gets gate
// and up of the same elements of y.
//
// Weights never depend on other kernels, so the ring begins to fill with them before the kernel before has ended.
//
// Macros: FLOAT16 (see device.cuh); GROUPS: 1 to 3; TILE_N: a multiple of 32 to 256, 224 at most with 3 groups; STAGES.
#include <hopper.cuh>
#include <transpose.cuh>

constexpr int TILE_M = 64 * GROUPS;
constexpr int COLUMNS = TILE_N / 2;  // of y, of a tile
constexpr int STEP = 64;
constexpr int ROW_BYTES = 2 * STEP;
constexpr int X_BYTES = TILE_M * ROW_BYTES;
constexpr int HALF_BYTES = COLUMNS * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr int ALIGNMENT = 1024;
constexpr int THREADS = 128 * (GROUPS + 1);
// Blocks that follow each other take other rows of x before they take other columns of y, up to this many tiles: what
// they read at a time then stays in the level 2 cache.
constexpr int TILES_OF_ROWS = 8;
// A product is of the tile's half of W where the registers that 512 threads begin with, 128 each, are too few for one
// instruction's.
constexpr int PARTS = GROUPS == 3 && TILE_N > 192 ? 2 : 1;
constexpr int PART_N = TILE_N / PARTS;
constexpr int PART_SUMS = PART_N / 2;

// A thread's part of x times a tile of W: of 64 rows, TILE_N columns.
using Sums = float[PARTS][PART_SUMS];

// Where a thread is in the ring.
struct Place {
    int stage;
    u32 parity;
};

DEVICE void advance(Place& place) {
    place.stage++;
    if (place.stage == STAGES) place = {0, place.parity ^ 1};
}

struct Ring {
    unsigned char* data;  // [STAGES, STAGE_BYTES], x before W
    Barrier* full;        // [STAGES]
    Barrier* empty;       // [STAGES]

    DEVICE unsigned char* x(int stage) const { return data + stage * STAGE_BYTES; }
    DEVICE unsigned char* weights(int stage) const { return x(stage) + X_BYTES; }
};

struct Shape {
    int m, n, k;

    DEVICE int steps() const { return (k + STEP - 1) / STEP; }
};

// The first row and the first column of y.
struct Tile {
    int row, column;
};

// Goes through this block's tiles.
struct Tiles {
    int rows, columns;  // tiles that cover y
    int index;

    DEVICE explicit Tiles(const Shape& shape)
        : rows((shape.m + TILE_M - 1) / TILE_M), columns((shape.n + COLUMNS - 1) / COLUMNS), index(blockIdx.x) {}

    DEVICE bool more() const { return index < rows * columns; }

    DEVICE void next() { index += gridDim.x; }

    DEVICE Tile tile() const {
        int first = index / (TILES_OF_ROWS * columns) * TILES_OF_ROWS;
        int count = min(TILES_OF_ROWS, rows - first), rest = index - first * columns;
        return {(first + rest % count) * TILE_M, rest / count * COLUMNS};
    }
};

struct Maps {
    const TensorMap *x, *weight;
};

DEVICE void copy_x(const Ring& ring, int stage, const Maps& maps, const Tile& tile, int step) {
    copy_box(ring.x(stage), maps.x, ring.full + stage, step * STEP, tile.row);
}

DEVICE void copy_weights(const Ring& ring, int stage, const Maps& maps, const Tile& tile, int step, int n) {
    unsigned char* target = ring.weights(stage);
    copy_box(target, maps.weight, ring.full + stage, step * STEP, tile.column);
    copy_box(target + HALF_BYTES, maps.weight, ring.full + stage, step * STEP, n + tile.column);
}

// By one thread.
DEVICE void fill(const Ring& ring, const Maps& maps, const Shape& shape) {
    int steps = shape.steps(), early = min(STAGES, steps);
    Place place = {0, 0};
    Tiles tiles(shape);
    Tile tile = tiles.tile();
    for (int step = 0; step < early; step++) {
        arrive_and_expect(ring.full + step, STAGE_BYTES);
        copy_weights(ring, step, maps, tile, step, shape.n);
    }
    wait_for_previous_kernel();
    for (int step = 0; step < early; step++) {
        copy_x(ring, step, maps, tile, step);
        advance(place);
    }
    for (int step = early;; step = 0) {
        for (; step < steps; step++) {
            wait(ring.empty + place.stage, place.parity ^ 1);
            arrive_and_expect(ring.full + place.stage, STAGE_BYTES);
            copy_weights(ring, place.stage, maps, tile, step, shape.n);
            copy_x(ring, place.stage, maps, tile, step);
            advance(place);
        }
        tiles.next();
        if (!tiles.more()) break;
        tile = tiles.tile();
    }
}

// This warp has read what is at a stage.
DEVICE void release(const Ring& ring, int stage) {
    if (threadIdx.x % 32 == 0) arrive(ring.empty + stage);
}

// sums = the 64 rows of the tile of x that are this group's, times the tile of W.
DEVICE void multiply(Sums& sums, const Ring& ring, Place& place, int group, int steps) {
    constexpr int PART = PART_N * ROW_BYTES / 16;  // from a part of W to the next, as descriptors count
    int previous = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) pin(sums[part]);
    for (int step = 0; step < steps; step++) {
        wait(ring.full + place.stage, place.parity);
        u64 a = rows_of_k(ring.x(place.stage) + group * 64 * ROW_BYTES), b = rows_of_k(ring.weights(place.stage));
        fence_operands();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) {
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                Product<PART_N>::run(sums[part], a + 2 * i, b + part * PART + 2 * i, step > 0 || i > 0);
        }
        commit_products();
        if (step > 0) {
            wait_products<1>();
            release(ring, previous);
        }
        previous = place.stage;
        advance(place);
    }
    wait_products<0>();
#pragma unroll
    for (int part = 0; part < PARTS; part++) pin(sums[part]);
    release(ring, previous);
}

DEVICE float at(const Sums& sums, int index) { return sums[index / PART_SUMS][index % PART_SUMS]; }

// Of y, the element that is a thread's `index`-th.
DEVICE float result(const Sums& sums, int index) {
    float gate = at(sums, index), up = at(sums, COLUMNS / 2 + index);
    return quotient(gate, 1.0f + power_of_two(-LOG2_E * gate)) * up;
}

// `row`: the first of this group's 64.
DEVICE void store(u16* out, const Sums& sums, int row, int column, const Shape& shape) {
    int lane = threadIdx.x % 32;
    row += threadIdx.x % 128 / 32 * 16 + lane / 4 + lane % 4 / 2 * 8;
    column += lane % 2 * 8;
    u16* target = out + static_cast<i64>(row) * shape.n + column;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 16) {
        u32 words[4];  // of two rows, 8 apart
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int index = i / 2 + j % 2 * 4 + j / 2 * 2;
            words[j] = pack(result(sums, index), result(sums, index + 1));
        }
        transpose_words(words);
        if (row < shape.m && column + i < shape.n)
            *reinterpret_cast<uint4*>(target + i) = {words[0], words[1], words[2], words[3]};
    }
}

// x_map: x [M, K] in boxes of TILE_M rows. weight_map: W in boxes of COLUMNS rows. N a multiple of 8.
// At most as many blocks as tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gated_linear(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, u16* out, int m,
                 int n, int k) {
    SHARED_MEMORY(shared);
    unsigned char* data = shared + (ALIGNMENT - shared_address(shared) % ALIGNMENT) % ALIGNMENT;
    Barrier* barriers = reinterpret_cast<Barrier*>(data + STAGES * STAGE_BYTES);
    Ring ring = {data, barriers, barriers + STAGES};
    Shape shape = {m, n, k};
    Maps maps = {&x_map, &weight_map};
    int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        prefetch_map(maps.x);
        prefetch_map(maps.weight);
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(ring.full + stage, 1);
            init_barrier(ring.empty + stage, 4 * GROUPS);  // each warp that multiplies
        }
        publish_barriers();
    }
    __syncthreads();
    allow_next_kernel();

    if (group == GROUPS) {
        if constexpr (GROUPS > 1) give_registers<GROUPS == 2 ? 40 : 32>();
        if (threadIdx.x == 128 * GROUPS) {
            fill(ring, maps, shape);
        } else {
            wait_for_previous_kernel();
        }
    } else {
        if constexpr (GROUPS > 1) take_registers<GROUPS == 2 ? 232 : 160>();
        wait_for_previous_kernel();
        Place place = {0, 0};
        Sums sums;
        for (Tiles tiles(shape); tiles.more(); tiles.next()) {
            multiply(sums, ring, place, group, shape.steps());
            Tile tile = tiles.tile();
            store(out, sums, tile.row + group * 64, tile.column, shape);
        }
    }
}
