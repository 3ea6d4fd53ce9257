// In the place of kernels/ptx_sm80.cuh: what decode needs of it, in C++ and shuffles, for the simulator. Fragments lie in
// the lanes as that file describes them.
#pragma once
#include "twell.cuh"

// A GPU's shared memory has addresses of 32 bits; here these are the lower half of an address of the host.
static thread_local unsigned long long upper_half;

__device__ __forceinline__ unsigned shared_address(const void* p) {
    upper_half = (unsigned long long)p & ~0xffffffffull;
    return (unsigned)(unsigned long long)p;
}
__device__ __forceinline__ char* shared_at(unsigned address) { return (char*)(upper_half | address); }

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
    const int lane = threadIdx.x % WARP;
    for (int tile = 0; tile < 4; ++tile) {
        const unsigned row = __shfl_sync(ALL_LANES, address, tile * 8 + lane / 4);
        r[tile] = *(const unsigned*)(shared_at(row) + lane % 4 * 4);
    }
}

__device__ __forceinline__ float one_of(unsigned pair, int which) {
    const float2 both = two_floats(pair);
    return which ? both.y : both.x;
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const unsigned (&left)[4], unsigned right0,
                                             unsigned right1) {
    const int g = threadIdx.x % WARP / 4, q = threadIdx.x % 4;
    for (int k = 0; k < 16; ++k) {
        float l[2], r[2];
        for (int i = 0; i < 2; ++i) {
            l[i] = one_of(__shfl_sync(ALL_LANES, left[k / 8 * 2 + i], g * 4 + k % 8 / 2), k % 2);
            r[i] = one_of(__shfl_sync(ALL_LANES, k < 8 ? right0 : right1, (2 * q + i) * 4 + k % 8 / 2), k % 2);
        }
        for (int i = 0; i < 4; ++i) d[i] = fmaf(l[i / 2], r[i % 2], d[i]);
    }
}

__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool inside) {
    *(uint4*)shared_at(to) = inside ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void commit_copies() {}
template <int N> __device__ __forceinline__ void wait_copies() {}
