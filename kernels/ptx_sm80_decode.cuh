// The PTX of sm80_decode.cu, each instruction behind a named wrapper: for what CUDA C++ has no name.
#pragma once
#include "twell.cuh"

#if defined(VALUE_BF16)
#define MMA_TYPE "bf16"
#else
#define MMA_TYPE "f16"
#endif

// sum[16][8] += a[16][16] b[16][8], by one warp; products are exact, sums fp32. With g = lane / 4 and t = lane % 4 a lane
// holds: of a, row g (top) and g + 8 (bottom), columns 2t, 2t+1 (0) and 2t+8, 2t+9 (1); of b, the same two pairs of
// rows of column g; of the sum, rows g (0, 1) and g + 8 (2, 3), columns 2t and 2t+1.
__device__ __forceinline__ void mma_16x8x16(float (&sum)[4], unsigned top0, unsigned bottom0, unsigned top1, unsigned bottom1,
                                            unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(top0), "r"(bottom0), "r"(top1), "r"(bottom1), "r"(b0), "r"(b1));
}

// 16 bytes if they are wanted, else zeros; weights, which a multiprocessor reads once, take no room in its L1 cache.
// Volatile, so that loads stay where they are written: ahead of everything that waits.
__device__ __forceinline__ uint4 load_weights(const void* from, bool wanted) {
    uint4 v;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
                 "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(from), "r"((int)wanted));
    return v;
}
__device__ __forceinline__ uint4 load_input(const void* from, bool wanted) {
    uint4 v;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
                 "@p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(from), "r"((int)wanted));
    return v;
}

// Asks for the 128-byte line of `address` to be brought into the L2 cache; nobody waits for it.
__device__ __forceinline__ void prefetch_to_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// A kernel launched with the attribute "programmatic stream serialization" may start when every block of the one before
// has called let_next_start (or ended); what that one wrote is there after wait_for_previous. Both do nothing in other
// launches, and do not exist before sm_90.
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
