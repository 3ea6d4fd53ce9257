// The PTX of Turing and Ampere that the tensor-core kernels need, each line behind a named wrapper: products of 16-bit
// tiles (mma.sync), their loads from shared memory (ldmatrix), asynchronous copies (cp.async) and named barriers.
//
// Compile with -DVALUE_BF16 or -DVALUE_FP16. -DTURING takes the way of sm_75 on any GPU, so that it can be tested on a
// newer one: products of 16 x 8 x 8 in fp16, copies through registers.
//
// Fragments of one warp; g = lane / 4, q = lane % 4:
//   product      float[4]     rows g and g + 8 (the second two), columns 2q and 2q + 1 of a 16 x 8 tile
//   left         unsigned[4]  a 16 x 16 tile, rows of 16 values: what load_matrices gives for lane l's address =
//                             row l % 16, value 8 * (l / 16)
//   right        2 unsigned   an 8 x 16 tile of the transposed right side: its rows are the product's columns
#pragma once
#include "twell.cuh"

#if defined(VALUE_FP32)
#error "tensor cores take 16-bit values: define VALUE_BF16 or VALUE_FP16"
#endif

#if defined(TURING) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800)
#define ASYNC_COPIES 0
#else
#define ASYNC_COPIES 1
#endif

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Four 8 x 8 tiles of 16-bit values; lane l gives the address of row l % 8 of tile l / 8 (16 bytes, 16-byte aligned).
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// d += left x right^T for a 16 x 8 product of 16 values each; sums in float32.
__device__ __forceinline__ void multiply_add(float (&d)[4], const unsigned (&left)[4], unsigned right0, unsigned right1) {
#if !ASYNC_COPIES && defined(VALUE_BF16)
    __trap();  // Turing has no bf16 product; Python refuses it before this
#elif !ASYNC_COPIES
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(left[0]), "r"(left[1]), "r"(right0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(left[2]), "r"(left[3]), "r"(right1));
#else
#if defined(VALUE_BF16)
#define PRODUCT_TYPES "f32.bf16.bf16.f32"
#else
#define PRODUCT_TYPES "f32.f16.f16.f32"
#endif
    asm volatile("mma.sync.aligned.m16n8k16.row.col." PRODUCT_TYPES
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
#endif
}

// 16 bytes from global to shared memory, or 16 zero bytes where `inside` is false (then nothing is read).
// Asynchronous: what was started since the last commit_copies() is one group.
#if ASYNC_COPIES
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are under way.
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#endif

__device__ __forceinline__ void store_shared(unsigned to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// 16 bytes to shared memory where `want` holds: a predicate, where the compiler may make it a branch.
__device__ __forceinline__ void store_shared_if(bool want, unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n}"
                 ::"r"((int)want), "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A barrier for `threads` threads of the block, whole warps; id 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Two floats rounded to neighbouring 16-bit values, the first in the low half. NaN becomes 0x7fff in either format.
__device__ __forceinline__ unsigned rounded_pair(float low, float high) {
#if defined(VALUE_BF16)
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    const __half2 pair = __floats2half2_rn(low, high);
#endif
    return *reinterpret_cast<const unsigned*>(&pair);
}
