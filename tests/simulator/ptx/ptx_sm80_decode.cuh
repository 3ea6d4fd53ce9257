// In the place of kernels/ptx_sm80_decode.cuh: in the simulator nothing is fetched ahead, and one launch follows another.
#pragma once

__device__ __forceinline__ void prefetch_to_l2(const void*) {}
__device__ __forceinline__ void let_next_start() {}
__device__ __forceinline__ void wait_for_previous() {}
