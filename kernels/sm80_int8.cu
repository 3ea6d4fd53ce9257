// int8: a linear layer of INT8 rows, x [tokens, in] and W [out, in], each row with one float that its bytes stand for
// multiples of: y = sum * x_scale[row] * scale[column] + bias, rounded once. With -DGATED=1 of two weights, h = relu(g) * u
// of g and u rounded as two products would leave them. Sums are int32 and exact, and never leave the chip.
//
// What bounds it: the tensor cores by mma.sync with many tokens, reading W with few.
//
// A block computes BM tokens and the outputs of BN rows of W, or of BN / 2 of either weight.
//   int8_v1  each lane loads its part of every product straight from memory, 4 bytes at a time
//   int8_v2  x and W come to shared memory in stages, by cp.async, several ahead; ldmatrix brings them to registers
//
// in and out are multiples of 16. Compile with -DBM=16 -DBN=32, 64 and 64, or 128 and 256. Worklog: docs/kernels/sm80_int8.md
#include "ptx_sm80.cuh"
#include "ptx_sm80_int8.cuh"

#ifndef GATED
#define GATED 0
#endif
#ifndef BM
#define BM 128
#endif
#ifndef BN
#define BN 256
#endif
#ifndef BK
#define BK 64
#endif
#ifndef STAGES
#define STAGES 4
#endif
#define WARP_ROWS (BM > 64 ? 64 : BM > 16 ? 32 : 16)
#define WARP_COLUMNS (BN > 64 ? 64 : BN > 32 ? 32 : 16)
#define WARPS_ACROSS (BN / WARP_COLUMNS)
#define THREADS (BM / WARP_ROWS * WARPS_ACROSS * WARP)
#define RESIDENT (BM > 64 ? 1 : 3)
#define OUTS (BN / (1 + GATED))                   // columns of y that a block computes
#define ROW_TILES (WARP_ROWS / 16)                // of 16 x 8 products that a warp has
#define COLUMN_TILES (WARP_COLUMNS / 8)
#define OUT_TILES (COLUMN_TILES / (1 + GATED))    // those of y; with two weights the others are up's
#define STAGE_BYTES ((BM + BN) * BK)
#define STAGE_CHUNKS (BK / 16)
#define SHARED_BYTES (STAGES * STAGE_BYTES)
#ifdef LAUNCH_SHARED
static_assert(LAUNCH_SHARED == SHARED_BYTES, "ops/int8.py has another size");
#endif

struct Weight {
    const signed char* values;  // [out, in]
    const float* scale;
    const value_t* bias;  // or none
};
struct Operands {
    const signed char* x;
    const float* x_scale;
    Weight first, up;  // without GATED, up is nothing
    value_t* y;
    int tokens, in, out;
    __device__ __forceinline__ const signed char* values(int weight) const { return weight ? up.values : first.values; }
};

struct Warp {
    int lane, m, across;  // its first token in the tile, its place along the columns
    __device__ __forceinline__ Warp()
        : lane(threadIdx.x % WARP), m((int)threadIdx.x / WARP / WARPS_ACROSS * WARP_ROWS),
          across((int)threadIdx.x / WARP % WARPS_ACROSS) {}
};

// Which row of the weights stands at a place of the tile, from the block's first on. A lane holds columns 2q and 2q + 1 of
// each product; in this order of rows they are neighbours in y, so that a lane stores them together.
__device__ __forceinline__ int row_at(int place) {
    const int r = place % (OUT_TILES * 8);
    return place / WARP_COLUMNS * (OUT_TILES * 8) + r % 8 / 2 * (OUT_TILES * 2) + r / 8 * 2 + r % 2;
}
// And of which weight: a warp has the gate's rows, then up's.
__device__ __forceinline__ int weight_at(int place) { return place % WARP_COLUMNS / (OUT_TILES * 8); }

typedef int Sums[ROW_TILES][COLUMN_TILES][4];

__device__ __forceinline__ float rounded(float v) { return to_float(from_float(v)); }

__device__ __forceinline__ void store(const Sums& sums, const Operands& o, const Warp& w) {
    constexpr int MINE = OUT_TILES * 2;  // columns of a lane; they divide 16
    const int column = (int)blockIdx.x * OUTS + w.across * (OUT_TILES * 8) + w.lane % 4 * MINE;
    if (column >= o.out) return;
    float scale[1 + GATED][MINE], bias[1 + GATED][MINE];
#pragma unroll
    for (int k = 0; k < 1 + GATED; ++k) {
        const Weight& weight = k ? o.up : o.first;
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            scale[k][j] = weight.scale[column + j];
            bias[k][j] = weight.bias ? to_float(weight.bias[column + j]) : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; ++i) {
        const int token = (int)blockIdx.y * BM + w.m + i * 8 + w.lane / 4;
        if (token >= o.tokens) continue;
        const float x_scale = o.x_scale[token];
        const auto value = [&](int k, int j) {
            const int sum = sums[i / 2][k * OUT_TILES + j / 2][i % 2 * 2 + j % 2];
            return __fmaf_rn(__fmul_rn((float)sum, x_scale), scale[k][j], bias[k][j]);
        };
        unsigned pairs[OUT_TILES];
#pragma unroll
        for (int j = 0; j < OUT_TILES; ++j) {
            float two[2];
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                two[b] = value(0, 2 * j + b);
#if GATED
                const float gate = rounded(two[b]);
                two[b] = (gate <= 0.0f ? 0.0f : gate) * rounded(value(1, 2 * j + b));  // NaN stays
#endif
            }
            pairs[j] = pair_of(two[0], two[1]);
        }
        unsigned* to = (unsigned*)(o.y + (long long)token * o.out + column);
#if OUT_TILES == 1
        *to = pairs[0];
#elif OUT_TILES == 2
        *(uint2*)to = make_uint2(pairs[0], pairs[1]);
#else
#pragma unroll
        for (int j = 0; j < OUT_TILES; j += 4) *(uint4*)(to + j) = make_uint4(pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]);
#endif
    }
}

#define PARAMETERS                                                                                                      \
    const signed char *__restrict__ x, const float *__restrict__ x_scale, const signed char *__restrict__ first,         \
        const float *__restrict__ first_scale, const value_t *__restrict__ first_bias, value_t *__restrict__ y,          \
        int tokens, int in, int out, const signed char *__restrict__ up, const float *__restrict__ up_scale,             \
        const value_t *__restrict__ up_bias
#define BEGIN                                                                                          \
    const Weight first_weight = {first, first_scale, first_bias}, up_weight = {up, up_scale, up_bias}; \
    const Operands o = {x, x_scale, first_weight, up_weight, y, tokens, in, out};                      \
    const Warp w;                                                                                      \
    Sums sums = {};

// ---------------------------------------------------------------- straight from memory

__device__ __forceinline__ unsigned four_at(const signed char* from, bool inside) { return inside ? *(const unsigned*)from : 0; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) int8_v1(PARAMETERS) {
    BEGIN
    const int token = (int)blockIdx.y * BM + w.m + w.lane / 4, column = (int)blockIdx.x * OUTS;
    for (int k = w.lane % 4 * 4; k < in; k += 32) {  // the second half of a product may lie past the end
        const bool more = k + 16 < in;
        unsigned left[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; ++i) {
            const signed char* from = x + (long long)(token + i * 8) * in + k;
            left[i / 2][i % 2] = four_at(from, token + i * 8 < tokens);
            left[i / 2][i % 2 + 2] = four_at(from + 16, token + i * 8 < tokens && more);
        }
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            const int place = w.across * WARP_COLUMNS + j * 8 + w.lane / 4, row = column + row_at(place);
            const signed char* from = o.values(weight_at(place)) + (long long)row * in + k;
            const unsigned right[2] = {four_at(from, row < out), four_at(from + 16, row < out && more)};
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) multiply_add(sums[i][j], left[i], right[0], right[1]);
        }
    }
    store(sums, o, w);
}

// ---------------------------------------------------------------- through shared memory
// A stage holds BK bytes of each of BM rows of x, then of BN rows of the weights. Its 16-byte chunks are swizzled, so that
// the eight rows of an ldmatrix lie in different banks.
__device__ __forceinline__ unsigned place(int row, int chunk) {
    return row * BK + (chunk ^ row / (8 / STAGE_CHUNKS) % STAGE_CHUNKS) * 16;
}

// One thread's part of bringing in the stages: the same chunk of every STRIDE-th row.
class Feed {
public:
    __device__ __forceinline__ Feed(const Operands& o, unsigned memory)
        : o_(o), row_((int)threadIdx.x / STAGE_CHUNKS), to_(memory + place(row_, (int)threadIdx.x % STAGE_CHUNKS)),
          slot_(0), k_((int)threadIdx.x % STAGE_CHUNKS * 16), left_((o.in + BK - 1) / BK),
          rows_(o.tokens - (int)blockIdx.y * BM - row_), x_(o.x + (long long)((int)blockIdx.y * BM + row_) * o.in) {}
    // Start the next stage. After the last there is none, but an empty group of copies.
    __device__ __forceinline__ void start() {
        if (left_ > 0) {
            const bool there = k_ < o_.in;
#pragma unroll
            for (int i = 0; i < BM / STRIDE; ++i) {
                const bool inside = there && i * STRIDE < rows_;
                copy_async(to_ + i * STRIDE * BK, x_ + (inside ? (long long)i * STRIDE * o_.in + k_ : 0), inside);
            }
#pragma unroll
            for (int i = 0; i < BN / STRIDE; ++i) {
                const int at = row_ + i * STRIDE, row = (int)blockIdx.x * OUTS + row_at(at);
                const bool inside = there && row < o_.out;
                const signed char* from = o_.values(weight_at(at));
                copy_async(to_ + (BM + i * STRIDE) * BK, from + (inside ? (long long)row * o_.in + k_ : 0), inside);
            }
            --left_, k_ += BK;
        }
        commit_copies();
        const bool wrap = ++slot_ == STAGES;
        to_ += wrap ? -(STAGES - 1) * STAGE_BYTES : STAGE_BYTES;
        if (wrap) slot_ = 0;
    }

private:
    static constexpr int STRIDE = THREADS / STAGE_CHUNKS;  // a multiple of 8, as the swizzle needs it
    const Operands& o_;
    const int row_;
    unsigned to_;  // this thread's first place in the next stage
    int slot_, k_, left_;
    const int rows_;  // of x, from this thread's first on
    const signed char* const x_;
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) int8_v2(PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char memory[];
    BEGIN
    const unsigned base = shared_address(memory);
    Feed feed(o, base);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) feed.start();
    unsigned x_at = base + place(w.m + w.lane % 16, w.lane / 16);
    unsigned w_at = base + place(BM + w.across * WARP_COLUMNS + w.lane / 16 * 8 + w.lane % 8, w.lane / 8 % 2);
    const int steps = (in + BK - 1) / BK;
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all warps, and all have read the one before, which is filled anew
        feed.start();
#pragma unroll
        for (int k = 0; k < BK / 32; ++k) {
            unsigned left[ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) load_matrices(left[i], (x_at ^ k * 32) + i * 16 * BK);
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j += 2) {
                unsigned right[4];
                load_matrices(right, (w_at ^ k * 32) + j * 8 * BK);
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
    store(sums, o, w);
}
