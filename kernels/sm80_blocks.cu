// blocks: x [tokens, in] x W [out, in]^T (+ bias) -> y [tokens, out], with W block-sparse: only blocks that are not all
// zero are stored (BSR). As in a linear layer, so x is read as it lies. Blocks [high, wide] of multiples of 16.
//
// What bounds it: the L2 cache, which serves a tile of x for each block of W.
//
// A block of threads computes BM tokens x BN outputs, which are a block row of W or a part of one. It walks over that
// row's blocks, BK columns of x at a time.
//   blocks_v1  each lane loads its part of every product straight from memory, 4 bytes at a time
//   blocks_v2  x and W come to shared memory in stages, by cp.async, several ahead across the borders of blocks;
//              ldmatrix brings them to registers
//
// Compile with -DBN=16|32|64|128 and -DBK=16|32, divisors of high and wide. Worklog: docs/kernels/sm80_blocks.md
#include "ptx_sm80.cuh"

#ifndef BM
#define BM 256
#endif
#ifndef BN
#define BN 32
#endif
#ifndef BK
#define BK 32
#endif
#ifndef STAGES
#define STAGES 4
#endif
#define THREADS 256
#define RESIDENT (BN > 64 ? 1 : BN > 32 ? 2 : 3)
#define WARPS_ACROSS (BN > 32 ? 2 : 1)
#define WARP_ROWS (BM * WARPS_ACROSS / (THREADS / WARP))
#define ROW_TILES (WARP_ROWS / 16)               // of 16 x 8 products that a warp has
#define COLUMN_TILES (BN / WARPS_ACROSS / 8)
#define STAGE_ROW_BYTES (BK * 2)
#define STAGE_BYTES ((BM + BN) * STAGE_ROW_BYTES)
#define STAGE_CHUNKS (BK / 8)
#define SHARED_BYTES (STAGES * STAGE_BYTES)
#ifdef LAUNCH_SHARED
static_assert(LAUNCH_SHARED == SHARED_BYTES, "ops/blocks.py has another size");
#endif

struct Operands {
    const value_t *x, *values, *bias;   // values [blocks, high, wide]
    const int *pointer, *column;        // of block rows, of blocks
    value_t* y;
    int tokens, in, out, high, wide;
};

// What this block of threads computes: its first token, its first row within a block of W, and the blocks it walks over.
struct Tile {
    int token, row, inside, first, last;
    __device__ __forceinline__ Tile(const Operands& o, const int* order) {
        const int parts = o.high / BN;
        row = order[blockIdx.x / parts], inside = blockIdx.x % parts * BN, token = blockIdx.y * BM;
        first = o.pointer[row], last = o.pointer[row + 1];
    }
};

struct Warp {
    int lane, m, n;  // its first token and output in the tile
    __device__ __forceinline__ Warp()
        : lane(threadIdx.x % WARP), m((int)threadIdx.x / WARP / WARPS_ACROSS * WARP_ROWS),
          n((int)threadIdx.x / WARP % WARPS_ACROSS * COLUMN_TILES * 8) {}
};

// Which row of W stands at a place of the tile. A lane holds columns 2q and 2q + 1 of each product; in this order of rows
// they are neighbours in y, so that a lane stores them together.
__device__ __forceinline__ int row_at(int place) {
    const int r = place % (COLUMN_TILES * 8);
    return place - r + r % 8 / 2 * (COLUMN_TILES * 2) + r / 8 * 2 + r % 2;
}

typedef float Sums[ROW_TILES][COLUMN_TILES][4];

__device__ __forceinline__ void store(const Sums& sums, const Operands& o, const Tile& t, const Warp& w) {
    const int column = t.row * o.high + t.inside + w.n + w.lane % 4 * (COLUMN_TILES * 2);
    float bias[COLUMN_TILES * 2];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES * 2; ++j) bias[j] = o.bias ? to_float(o.bias[column + j]) : 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; ++i) {
        const int token = t.token + w.m + i * 8 + w.lane / 4;
        if (token >= o.tokens) continue;
        unsigned* to = (unsigned*)(o.y + (long long)token * o.out + column);
        unsigned pairs[COLUMN_TILES];
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            const float* two = &sums[i / 2][j][i % 2 * 2];
            pairs[j] = pair_of(two[0] + bias[2 * j], two[1] + bias[2 * j + 1]);
        }
#if BN == 16
        *(uint2*)to = make_uint2(pairs[0], pairs[1]);
#else
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j += 4) *(uint4*)(to + j) = make_uint4(pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]);
#endif
    }
}

#define PARAMETERS                                                                                                \
    const value_t *__restrict__ x, const int *__restrict__ pointer, const int *__restrict__ column,               \
        const value_t *__restrict__ values, const value_t *__restrict__ bias, const int *__restrict__ order,      \
        value_t *__restrict__ y, int tokens, int in, int out, int high, int wide
#define BEGIN                                                                                 \
    const Operands o = {x, values, bias, pointer, column, y, tokens, in, out, high, wide};    \
    const Tile t(o, order);                                                                   \
    const Warp w;                                                                             \
    Sums sums = {};

// ---------------------------------------------------------------- straight from memory

__device__ __forceinline__ unsigned pair_at(const value_t* from, bool inside) { return inside ? *(const unsigned*)from : 0; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) blocks_v1(PARAMETERS) {
    BEGIN
    const int token = t.token + w.m + w.lane / 4, k = w.lane % 4 * 2;  // the lane's first
    const value_t* x_row = x + (long long)token * in + k;
    const value_t* w_row = values + ((long long)t.first * high + t.inside + row_at(w.n + w.lane / 4)) * wide + k;
    for (int block = t.first; block < t.last; ++block, w_row += high * wide)
#pragma unroll 1
        for (int step = 0; step < wide; step += 16) {
            const value_t* from = x_row + (long long)column[block] * wide + step;
            unsigned left[ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < ROW_TILES * 2; ++i, from += 8 * (long long)in)
                left[i / 2][i % 2] = pair_at(from, token + i * 8 < tokens), left[i / 2][i % 2 + 2] = pair_at(from + 8, token + i * 8 < tokens);
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) {  // row_at(place + 8 * j) is row_at(place) + 2 * j
                const value_t* row = w_row + 2 * j * wide + step;
                const unsigned right[2] = {pair_at(row, true), pair_at(row + 8, true)};
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i) multiply_add(sums[i][j], left[i], right[0], right[1]);
            }
        }
    store(sums, o, t, w);
}

// ---------------------------------------------------------------- through shared memory
// A stage holds BK values of each of BM rows of x, then of BN rows of W. Its 16-byte chunks are swizzled, so that the
// eight rows of an ldmatrix lie in different banks.
__device__ __forceinline__ unsigned place(int row, int chunk) {
    return row * STAGE_ROW_BYTES + (chunk ^ row / (8 / STAGE_CHUNKS) % STAGE_CHUNKS) * 16;
}

// One thread's part of bringing in the stages, block after block of W.
class Feed {
public:
    __device__ __forceinline__ Feed(const Operands& o, const Tile& t, unsigned memory)
        : o_(o), row_((int)threadIdx.x / STAGE_CHUNKS), chunk_((int)threadIdx.x % STAGE_CHUNKS),
          to_(memory + place(row_, chunk_)), slot_(0), k_(0), block_(t.first), last_(t.last),
          rows_(o.tokens - t.token - row_), x_(o.x + (long long)(t.token + row_) * o.in + chunk_ * 8),
          w_(o.values + ((long long)t.first * o.high + t.inside) * o.wide + chunk_ * 8),
          column_(t.first < t.last ? o.column[t.first] : 0) {}
    // Start the next stage. After the last block of W there is none, but an empty group of copies.
    __device__ __forceinline__ void start() {
        if (block_ < last_) {
            const value_t* from = x_ + (long long)column_ * o_.wide + k_;
#pragma unroll
            for (int i = 0; i < BM / STRIDE; ++i)
                copy_async(to_ + i * STRIDE * STAGE_ROW_BYTES, from + (long long)i * STRIDE * o_.in, i * STRIDE < rows_);
#pragma unroll
            for (int i = 0; i < (BN + STRIDE - 1) / STRIDE; ++i) {
                const int at = row_ + i * STRIDE;
                if (at < BN) copy_async(to_ + (BM + i * STRIDE) * STAGE_ROW_BYTES, w_ + row_at(at) * o_.wide + k_, true);
            }
            k_ += BK;
            if (k_ == o_.wide) {
                k_ = 0, w_ += o_.high * o_.wide;
                if (++block_ < last_) column_ = o_.column[block_];
            }
        }
        commit_copies();
        const bool wrap = ++slot_ == STAGES;
        to_ += wrap ? -(STAGES - 1) * STAGE_BYTES : STAGE_BYTES;
        if (wrap) slot_ = 0;
    }

private:
    static constexpr int STRIDE = THREADS / STAGE_CHUNKS;  // a multiple of the swizzle
    const Operands& o_;
    const int row_, chunk_;
    unsigned to_;  // this thread's first place in the next stage
    int slot_, k_, block_;
    const int last_, rows_;  // rows_: of x, from this thread's first on
    const value_t *const x_, *w_;
    int column_;  // of block_
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) blocks_v2(PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char memory[];
    BEGIN
    const unsigned base = shared_address(memory);
    Feed feed(o, t, base);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) feed.start();
    unsigned x_at = base + place(w.m + w.lane % 16, w.lane / 16);
    unsigned w_at = base + place(BM + w.n + w.lane / 16 * 8 + w.lane % 8, w.lane / 8 % 2);
    const int steps = (t.last - t.first) * (wide / BK);
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all warps, and all have read the one before, which is filled anew
        feed.start();
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) {
            unsigned left[ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) load_matrices(left[i], (x_at ^ k * 32) + i * 16 * STAGE_ROW_BYTES);
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j += 2) {
                unsigned right[4];
                load_matrices(right, (w_at ^ k * 32) + j * 8 * STAGE_ROW_BYTES);
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i) {
                    multiply_add(sums[i][j], left[i], right[0], right[1]);
                    multiply_add(sums[i][j + 1], left[i], right[2], right[3]);
                }
            }
        }
        const bool wrap = ++slot == STAGES;
        const int by = wrap ? -(STAGES - 1) * STAGE_BYTES : STAGE_BYTES;
        if (wrap) slot = 0;
        x_at += by, w_at += by;
    }
    store(sums, o, t, w);
}
