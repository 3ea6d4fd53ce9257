// microtiles: c [rows, n] = a b, with a as the micro-tiles that smxx_find_microtiles.cu found: of each stripe of BM rows
// the columns that hold anything, and their values. A block gathers these rows of b [width, n] beside the values into
// dense tiles in shared memory, multiplies them by mma.sync, and writes its part of c in place: nothing is scattered.
//
// What bounds it: the L2 cache; each stripe reads its rows of b again.
//
//   microtiles_v1  one stage: gather, wait, multiply
//   microtiles_v2  several stages under way (cp.async), and the numbers of the rows to gather a stage before that
//
// n is a multiple of 8. Method: PIT (Zheng et al., SOSP 2023). Worklog: docs/kernels/sm80_microtiles.md
#include "ptx_sm80.cuh"
#include "ptx_sm80_turned.cuh"

#ifndef BM
#define BM 32  // 32, 64 or 128: rows of a stripe
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BN
#define BN 256  // columns of c that a block computes
#endif
#define BK WARP  // micro-tiles of a stage: a lane has the column of each
#define WARP_ROWS (BM < 64 ? BM : 64)
#define BLOCK_WARPS (BM / WARP_ROWS * 4)  // each WARP_ROWS x 64
#define THREADS (BLOCK_WARPS * WARP)
#define RESIDENT (BM == 32 ? 3 : BM == 64 ? 2 : 1)
#define B_BYTES (BK * BN * 2)
#define STAGE_BYTES (B_BYTES + BK * BM * 2)
#define SHARED_BYTES (STAGES * STAGE_BYTES)
#ifdef LAUNCH_SHARED
static_assert(LAUNCH_SHARED == SHARED_BYTES, "ops/microtiles.py has another size");
#endif
#define ROW_CHUNKS (BM / 8)  // 16-byte chunks of one micro-tile

// A stage is BK rows of b, 256 values each, then BK micro-tiles. Chunks are swizzled, so that the eight rows of an
// ldmatrix lie in different banks.
__device__ __forceinline__ unsigned b_place(int k, int chunk) { return k * (BN * 2) + (chunk ^ k % 8) * 16; }
__device__ __forceinline__ unsigned a_place(int k, int chunk) {
    return B_BYTES + k * (BM * 2) + (chunk ^ (BM == 32 ? k / 2 % 4 : k % 8)) * 16;
}

struct Stripe {
    const int* columns;  // of the micro-tiles, `count` of them
    const value_t *values, *b;  // b: from the block's first column on
    int count, n, width;  // n: of c; width: from the block's first column to the last

    // The column of a lane's micro-tile in the stage that begins with number k, -1 past the last.
    __device__ __forceinline__ int column(int k) const {
        const int at = k + (int)threadIdx.x % WARP;
        return at < count ? columns[at] : -1;
    }
    // Start bringing the stage that begins with number k to shared memory; mine: column(k).
    __device__ __forceinline__ void start(unsigned to, int k, int mine) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
        for (int i = 0; i < BK / BLOCK_WARPS; ++i) {  // a warp a row of b
            const int row = warp + i * BLOCK_WARPS, from = __shfl_sync(ALL_LANES, mine, row);
            const bool inside = from >= 0 && lane * 8 < width;
            copy_async(to + b_place(row, lane), b + (inside ? (long long)from * n + lane * 8 : 0), inside);
        }
#pragma unroll
        for (int i = 0; i < BK * ROW_CHUNKS / THREADS; ++i) {
            const int at = i * THREADS + threadIdx.x, row = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
            const bool inside = k + row < count;
            copy_async(to + a_place(row, chunk), values + (inside ? (long long)(k + row) * BM + chunk * 8 : 0), inside);
        }
    }
};

typedef float Sums[WARP_ROWS / 16][8][4];

// This lane's places in a stage; they move by exclusive or, as the swizzle does.
struct Places {
    unsigned a, b;
    __device__ __forceinline__ Places() {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        a = a_place(lane / 16 * 8 + lane % 8, warp / 4 * (WARP_ROWS / 8) + lane / 8 % 2);
        b = b_place(lane / 8 % 2 * 8 + lane % 8, warp % 4 * 8 + lane / 16);
    }
};

__device__ __forceinline__ void multiply(Sums& sums, unsigned stage, const Places& at) {
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
        unsigned left[WARP_ROWS / 16][4];
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i) load_matrices_turned(left[i], stage + ((at.a + k * (BM * 2)) ^ i * 32));
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            unsigned right[4];
            load_matrices_turned(right, stage + ((at.b + k * (BN * 2)) ^ j * 16));
#pragma unroll
            for (int i = 0; i < WARP_ROWS / 16; ++i) {
                multiply_add(sums[i][j], left[i], right[0], right[1]);
                multiply_add(sums[i][j + 1], left[i], right[2], right[3]);
            }
        }
    }
}

// Two neighbouring lanes exchange halves, so that each has four neighbouring columns and a row of a warp fills whole
// sectors. c: from the block's first row and column on; rows, width: how much of the block's part is there.
__device__ __forceinline__ void store(const Sums& sums, value_t* c, int n, int rows, int width) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, odd = lane % 2;
    const int first = warp / 4 * WARP_ROWS + lane / 4, column = warp % 4 * 64 + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 8; ++i) {
        const int row = first + i * 8;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const unsigned low = pair_of(sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]);
            const unsigned high = pair_of(sums[i / 2][j + 1][i % 2 * 2], sums[i / 2][j + 1][i % 2 * 2 + 1]);
            const unsigned got = __shfl_xor_sync(ALL_LANES, odd ? low : high, 1);
            if (row < rows && column + j * 8 < width)
                *(uint2*)(c + (long long)row * n + column + j * 8) = odd ? make_uint2(got, high) : make_uint2(low, got);
        }
    }
}

#define BEGIN                                                                                                           \
    extern __shared__ __align__(1024) unsigned char memory[];                                                           \
    const int wide = n - (int)blockIdx.y * BN;                                                                          \
    const long long first = (long long)blockIdx.x * width;                                                              \
    const Stripe stripe = {columns + first, values + first * BM, b + (int)blockIdx.y * BN, counts[blockIdx.x], n, wide}; \
    const unsigned base = shared_address(memory);                                                                       \
    const Places at;                                                                                                    \
    Sums sums = {};
#define END                                                                                                       \
    store(sums, c + (long long)blockIdx.x * BM * n + (int)blockIdx.y * BN, n, rows - (int)blockIdx.x * BM, wide);
#define PARAMETERS                                                                                                     \
    const int *__restrict__ counts, const int *__restrict__ columns, const value_t *__restrict__ values,               \
        const value_t *__restrict__ b, value_t *__restrict__ c, int rows, int width, int n

// Block (s, t): stripe s, columns t * BN on. Blocks that run together share columns of b, which then stay in L2.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) microtiles_v1(PARAMETERS) {
    BEGIN
    for (int k = 0; k < stripe.count; k += BK) {
        stripe.start(base, k, stripe.column(k));
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        multiply(sums, base, at);
        __syncthreads();
    }
    END
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) microtiles_v2(PARAMETERS) {
    BEGIN
    int next = stripe.column(0);
    const auto start = [&](int k, int slot) {
        const int mine = next;
        next = stripe.column(k + BK);
        if (k < stripe.count) stripe.start(base + slot * STAGE_BYTES, k, mine);
        commit_copies();  // an empty group past the last
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) start(s * BK, s);
    int slot = 0;
#pragma unroll 1
    for (int k = 0; k < stripe.count; k += BK) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all warps, and all have read the one before
        start(k + (STAGES - 1) * BK, slot == 0 ? STAGES - 1 : slot - 1);
        multiply(sums, base + slot * STAGE_BYTES, at);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    END
}
