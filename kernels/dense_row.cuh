// A dense row of D_MODEL values, spread over the registers of WARPS warps: 16 bytes a lane and chunk, neighbouring
// lanes holding neighbouring columns. D_MODEL (a multiple of VECTOR) and WARPS come from the command line, so that
// every array below is indexed by constants and stays in registers.
//
// TEAMS teams of WARPS warps may share one token, each taking every TEAMS-th of its kept values: with few tokens that
// is what keeps the GPU busy. One team is the default.
#pragma once
#include "twell.cuh"

#ifndef TEAMS
#define TEAMS 1
#endif
#ifndef SLAB
#define SLAB 2048  // columns of y that a block takes at a time, in the kernels that take any width
#endif
#define LANES (WARP * WARPS)
#define CHUNKS ((D_MODEL + LANES * VECTOR - 1) / (LANES * VECTOR))
static_assert(D_MODEL % VECTOR == 0, "D_MODEL must be a multiple of the 16-byte vector");

// Blocks of one token each. 512 threads on a multiprocessor leave each 128 registers, which measures best on an
// H100; where that would spill, 448 threads leave 144.
#if defined(LEAN)  // a kernel that needs fewer registers: more tokens at once
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)  // elsewhere it would spill
#define RESIDENT_THREADS 768
#else
#define RESIDENT_THREADS 640
#endif
#elif TEAMS == 1 && (defined(VALUE_FP32) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800))
#define RESIDENT_THREADS 448
#else
#define RESIDENT_THREADS 512
#endif
#define ONE_TOKEN_BLOCK __launch_bounds__(LANES * TEAMS, RESIDENT_THREADS / (LANES * TEAMS))

struct RowVectors {
    Vector v[CHUNKS];
};
struct RowSums {
    sum_t f[CHUNKS * VECTOR];
};

__device__ __forceinline__ int team() { return TEAMS == 1 ? 0 : threadIdx.x / LANES; }

// First column of this thread's chunk k.
__device__ __forceinline__ int chunk_column(int k) { return (k * LANES + threadIdx.x % LANES) * VECTOR; }

// This thread's part of a row, or zeros where it is not wanted.
__device__ __forceinline__ RowVectors load_row_if(bool wanted, const value_t* row) {
    RowVectors r;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        r.v[k].raw = make_uint4(0, 0, 0, 0);
        if (wanted && chunk_column(k) < D_MODEL) r.v[k].raw = __ldg((const uint4*)(row + chunk_column(k)));
    }
    return r;
}

__device__ __forceinline__ RowVectors load_row(const value_t* row) { return load_row_if(true, row); }

// The same for a row that is not read again: past the caches, which are needed for other data.
__device__ __forceinline__ RowVectors load_row_once(const value_t* row) {
    RowVectors r;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        r.v[k].raw = make_uint4(0, 0, 0, 0);
        if (chunk_column(k) < D_MODEL) r.v[k].raw = __ldcs((const uint4*)(row + chunk_column(k)));
    }
    return r;
}

__device__ __forceinline__ sum_t warp_sum(sum_t v) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) v += __shfl_xor_sync(ALL_LANES, v, step);
    return v;
}

// This thread's part of a . b; products are not rounded before they are added.
__device__ __forceinline__ sum_t dot_part(const RowVectors& a, const RowVectors& b) {
    sum_t sum = 0;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        float x[VECTOR], y[VECTOR];
        a.v[k].to_floats(x), b.v[k].to_floats(y);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum = fma((sum_t)x[i], (sum_t)y[i], sum);
    }
    return sum;
}

// sum += scale * row
__device__ __forceinline__ void add_scaled(RowSums& sum, sum_t scale, const RowVectors& row) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        float w[VECTOR];
        row.v[k].to_floats(w);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum.f[k * VECTOR + i] = fma(scale, (sum_t)w[i], sum.f[k * VECTOR + i]);
    }
}

__device__ __forceinline__ RowSums row_of(sum_t f) {
    RowSums sum;
#pragma unroll
    for (int i = 0; i < CHUNKS * VECTOR; ++i) sum.f[i] = f;
    return sum;
}

// The sums a row starts from: the bias, or zero where there is none.
__device__ __forceinline__ RowSums start_row(const value_t* bias) {
    RowSums sum = row_of(0);
    if (bias) add_scaled(sum, 1, load_row(bias));
    return sum;
}

// sum += row, of D_MODEL floats that nobody reads again: past the caches.
__device__ __forceinline__ void add_floats(RowSums& sum, const float* row) {
#pragma unroll
    for (int i = 0; i < CHUNKS * VECTOR; i += 4) {
        const int c = chunk_column(i / VECTOR) + i % VECTOR;
        if (c < D_MODEL) {
            const float4 f = __ldcs((const float4*)(row + c));
            sum.f[i] += f.x, sum.f[i + 1] += f.y, sum.f[i + 2] += f.z, sum.f[i + 3] += f.w;
        }
    }
}

__device__ __forceinline__ void store_row(value_t* row, const RowSums& sum) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        float f[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) f[i] = (float)sum.f[k * VECTOR + i];
        if (chunk_column(k) < D_MODEL)  // written once, read by somebody else: stream past the caches
            __stcs((uint4*)(row + chunk_column(k)), Vector::of_floats(f).raw);
    }
}

// The row, bit by bit.
__device__ __forceinline__ void copy_row(value_t* to, const RowVectors& row) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
        if (chunk_column(k) < D_MODEL) *(uint4*)(to + chunk_column(k)) = row.v[k].raw;
}

// Adds the teams' sums up, team by team so that the order is fixed, and stores the row. All of the block calls it.
__device__ __forceinline__ void store_teams_row(value_t* row, RowSums& sum) {
#if TEAMS > 1
    __shared__ sum_t total[CHUNKS * VECTOR][LANES];
    for (int t = 1; t < TEAMS; ++t) {
        if (team() == t) {
#pragma unroll
            for (int i = 0; i < CHUNKS * VECTOR; ++i) {
                sum_t& cell = total[i][threadIdx.x % LANES];
                cell = t == 1 ? sum.f[i] : cell + sum.f[i];
            }
        }
        __syncthreads();
    }
    if (team() != 0) return;
#pragma unroll
    for (int i = 0; i < CHUNKS * VECTOR; ++i) sum.f[i] += total[i][threadIdx.x % LANES];
#endif
    store_row(row, sum);
}

__device__ __forceinline__ bool has_nonfinite(const RowVectors& row) {
    bool found = false;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) found |= row.v[k].nonfinite();
    return found;
}

// Whether a value of x's row is infinite or NaN; the same in all threads of the block.
__device__ __forceinline__ bool any_nonfinite(const RowVectors& row) {
    const bool found = has_nonfinite(row);
#if WARPS * TEAMS > 1
    return __syncthreads_or(found);
#else
    return __any_sync(ALL_LANES, found);
#endif
}
