// In the place of kernels/ptx_sm80_int8.cuh, in C++ and shuffles, for the simulator.
#pragma once

__device__ __forceinline__ int byte_of(unsigned word, int which) { return (signed char)(word >> which * 8 & 0xff); }

__device__ __forceinline__ void multiply_add(int (&d)[4], const unsigned (&left)[4], unsigned right0, unsigned right1) {
    const int g = threadIdx.x % WARP / 4, q = threadIdx.x % 4;
    for (int k = 0; k < 32; k += 4) {
        unsigned l[2], r[2];
        for (int i = 0; i < 2; ++i) {
            l[i] = __shfl_sync(ALL_LANES, left[k / 16 * 2 + i], g * 4 + k % 16 / 4);
            r[i] = __shfl_sync(ALL_LANES, k < 16 ? right0 : right1, (2 * q + i) * 4 + k % 16 / 4);
        }
        for (int i = 0; i < 4; ++i)
            for (int b = 0; b < 4; ++b) d[i] += byte_of(l[i / 2], b) * byte_of(r[i % 2], b);
    }
}
