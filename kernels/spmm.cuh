// What the products of a sparse matrix A with a dense B share: a warp holds a slab of a row of C and adds to it entries
// of A, each times its row of B. B and C are row-major with n columns, a multiple of VECTOR, and start at multiples of
// 16 bytes.
#pragma once
#include "twell.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8
#endif
#define THREADS (BLOCK_WARPS * WARP)
#ifndef AT_ONCE
#define AT_ONCE 4
#endif
#if defined(VALUE_FP32)
#define RESIDENT 3
#else
#define RESIDENT 4
#endif

// What one lane holds of the slab: VECTOR neighbouring columns.
struct SlabSums {
    sum_t f[VECTOR];
    __device__ __forceinline__ void add(float scale, const Vector& row) {
        float w[VECTOR];
        row.to_floats(w);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) f[i] = fma((sum_t)scale, (sum_t)w[i], f[i]);
    }
    __device__ __forceinline__ void store(value_t* to) const {
        float rounded[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) rounded[i] = (float)f[i];
        *(uint4*)to = Vector::of_floats(rounded).raw;
    }
};

// The lane's first column of C.
__device__ __forceinline__ int slab_column() { return (blockIdx.y * WARP + threadIdx.x % WARP) * VECTOR; }

// sums += value[i] * B[column[i]] for the `many` entries from `first` on; j: slab_column(). Whole warps. The lanes load
// as many entries as they are, and pass them round; AT_ONCE rows of B are under way at a time.
__device__ __forceinline__ void add_entries(SlabSums& sums, const int* column, const value_t* value, long long first,
                                            int many, const value_t* b, int n, int j) {
    const int lane = threadIdx.x % WARP;
    for (int base = 0; base < many; base += WARP) {
        int my_column = 0;
        float my_value = 0.0f;
        if (base + lane < many) my_column = column[first + base + lane], my_value = to_float(value[first + base + lane]);
#pragma unroll 1
        for (int i = 0; i < WARP && base + i < many; i += AT_ONCE) {
            Vector row[AT_ONCE];
            float scale[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const int at = __shfl_sync(ALL_LANES, my_column, i + k);
                scale[k] = __shfl_sync(ALL_LANES, my_value, i + k);
                row[k].raw = make_uint4(0, 0, 0, 0);
                if (base + i + k < many && j < n) row[k].raw = __ldg((const uint4*)(b + (long long)at * n + j));
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) sums.add(scale[k], row[k]);
        }
    }
}
