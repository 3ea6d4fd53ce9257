// The PTX of sm80_decode.cu beyond ptx_sm80.cuh: a hint to the L2 cache, and how one launch follows another.
#pragma once

// Asks for the 128-byte line of `address` to be brought into the L2 cache; nobody waits for it.
__device__ __forceinline__ void prefetch_to_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// A kernel that is launched with the attribute "programmatic stream serialization" may start when every block of the
// one before has called let_next_start, or ended; what that one wrote is there after wait_for_previous. Neither does
// anything in other launches, and neither exists before sm_90.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
