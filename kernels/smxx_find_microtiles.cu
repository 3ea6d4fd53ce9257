// find_microtiles: which micro-tiles of a sparse matrix hold anything, and their values. A stripe is BM rows of a
// [rows, width]; one of its micro-tiles is one column, BM x 1 values. Of each stripe: how many hold a value that is not
// zero, their columns, ascending, and the BM values of each side by side: the layout that a tensor-core tile is gathered
// from. Rows past the last are zeros; what lies past a stripe's count is not written.
//
// What bounds it: device memory; a is read once (v2), and what is found is written.
//
//   find_microtiles_v1  a thread a column walks down the stripe, and again to copy what it found
//   find_microtiles_v2  a slab of columns goes through shared memory, 16 bytes a load, the next one under way; width is a
//                       multiple of 8
// Method: PIT (Zheng et al., SOSP 2023). Worklog: docs/kernels/smxx_find_microtiles.md
#include "twell.cuh"

#ifndef BM
#define BM 32  // 32, 64 or 128
#endif
#ifndef THREADS
#define THREADS 512
#endif
#define BLOCK_WARPS (THREADS / WARP)
#define SLAB (16384 / BM)  // columns that a block of v2 takes at a time, at most THREADS
#define SLAB_WORDS (SLAB / WARP)  // with a bit for each column
#define PER_ROW (SLAB / 8)  // vectors
#define AT_ONCE (SLAB * BM / 8 / THREADS)

// Block s: stripe s. counts [stripes], columns [stripes][width], values [stripes][width][BM].
extern "C" __global__ void __launch_bounds__(THREADS)
find_microtiles_v1(const value_t* __restrict__ a, int* __restrict__ counts, int* __restrict__ columns,
                   value_t* __restrict__ values, int rows, int width) {
    __shared__ int found[BLOCK_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int height = min(BM, rows - (int)blockIdx.x * BM);
    const value_t* stripe = a + (long long)blockIdx.x * BM * width;
    int* column = columns + (long long)blockIdx.x * width;
    value_t* value = values + (long long)blockIdx.x * width * BM;
    int start = 0;
    for (int base = 0; base < width; base += THREADS) {
        const int c = base + threadIdx.x;
        bool used = false;
        if (c < width)
            for (int r = 0; r < height; ++r) used |= to_float(stripe[(long long)r * width + c]) != 0.0f;
        const unsigned here = __ballot_sync(ALL_LANES, used);
        if (lane == 0) found[warp] = __popc(here);
        __syncthreads();
        int place = start + __popc(here & ((1u << lane) - 1));
        for (int w = 0; w < BLOCK_WARPS; ++w) {
            if (w < warp) place += found[w];
            start += found[w];
        }
        if (used) {
            column[place] = c;
            for (int r = 0; r < BM; ++r)
                value[(long long)place * BM + r] = r < height ? stripe[(long long)r * width + c] : from_float(0.0f);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) counts[blockIdx.x] = start;
}

// One bit for each of 8 values that is not zero. NaN is none.
__device__ __forceinline__ unsigned used_bits(const uint4& v) {
    const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (pairs[i] & 0x7fffu) bits |= 1u << 2 * i;
        if (pairs[i] & 0x7fff0000u) bits |= 2u << 2 * i;
    }
    return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
find_microtiles_v2(const value_t* __restrict__ a, int* __restrict__ counts, int* __restrict__ columns,
                   value_t* __restrict__ values, int rows, int width) {
    __shared__ unsigned tile[BM][SLAB / 2 + 1];  // the odd distance puts the rows of a column into different banks
    __shared__ unsigned used[SLAB_WORDS];
    __shared__ int list[SLAB];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = threadIdx.x / PER_ROW, at = threadIdx.x % PER_ROW;  // its first vector; the others have the same `at`
    const int height = min(BM, rows - (int)blockIdx.x * BM);
    const value_t* stripe = a + (long long)blockIdx.x * BM * width;
    int* column = columns + (long long)blockIdx.x * width;
    value_t* value = values + (long long)blockIdx.x * width * BM;
    uint4 held[AT_ONCE];
    const auto load = [&](int base) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int r = row + i * (THREADS / PER_ROW), c = base + at * 8;
            const bool inside = r < height && c < width;
            held[i] = inside ? __ldg((const uint4*)(stripe + (long long)r * width + c)) : make_uint4(0, 0, 0, 0);
        }
    };
    if (threadIdx.x < SLAB_WORDS) used[threadIdx.x] = 0;
    __syncthreads();
    load(0);
    int start = 0;
    for (int base = 0; base < width; base += SLAB) {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            unsigned* place = &tile[row + i * (THREADS / PER_ROW)][at * 4];
            place[0] = held[i].x, place[1] = held[i].y, place[2] = held[i].z, place[3] = held[i].w;
            bits |= used_bits(held[i]);
        }
        bits <<= at % 4 * 8;  // four neighbouring lanes have the 32 columns of a word
        bits |= __shfl_xor_sync(ALL_LANES, bits, 1);
        bits |= __shfl_xor_sync(ALL_LANES, bits, 2);
        if (at % 4 == 0 && bits) atomicOr(&used[at / 4], bits);
        load(base + SLAB);
        __syncthreads();
        const int n = lane < SLAB_WORDS ? __popc(used[lane]) : 0;
        int through = n;  // becomes the sum over the words up to this one
#pragma unroll
        for (int step = 1; step < SLAB_WORDS; step *= 2) {
            const int before = __shfl_up_sync(ALL_LANES, through, step);
            if (lane >= step) through += before;
        }
        const int all = __shfl_sync(ALL_LANES, through, SLAB_WORDS - 1);
        const int before = __shfl_sync(ALL_LANES, through - n, warp % SLAB_WORDS);
        if (warp < SLAB_WORDS && used[warp] >> lane & 1) {
            const int rank = before + __popc(used[warp] & ((1u << lane) - 1));
            list[rank] = threadIdx.x;
            column[start + rank] = base + threadIdx.x;
        }
        __syncthreads();
        if (threadIdx.x < SLAB_WORDS) used[threadIdx.x] = 0;
        for (int i = warp; i < all; i += BLOCK_WARPS) {
            const int c = list[i];
            value_t* to = value + (long long)(start + i) * BM;
#pragma unroll
            for (int r = lane; r < BM; r += WARP) to[r] = value_of_bits(tile[r][c / 2] >> c % 2 * 16 & 0xffffu);
        }
        start += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) counts[blockIdx.x] = start;
}
