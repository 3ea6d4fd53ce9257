// In the place of kernels/ptx_sm80_turned.cuh, in C++ and shuffles, for the simulator.
#pragma once

__device__ __forceinline__ void load_matrices_turned(unsigned (&r)[4], unsigned address) {
    const int lane = threadIdx.x % WARP;
    for (int tile = 0; tile < 4; ++tile) {
        const unsigned first = __shfl_sync(ALL_LANES, address, tile * 8 + lane % 4 * 2);
        const unsigned second = __shfl_sync(ALL_LANES, address, tile * 8 + lane % 4 * 2 + 1);
        const int at = lane / 4;
        r[tile] = ((const unsigned short*)shared_at(first))[at] | ((const unsigned short*)shared_at(second))[at] << 16;
    }
}
