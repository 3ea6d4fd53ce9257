// The PTX of sm80_int8.cu beyond ptx_sm80.cuh: products of bytes. A fragment's four bytes lie where that file has two
// 16-bit values, so its loads serve both.
#pragma once

// d += left x right^T for a 16 x 8 product of 32 signed bytes each; sums in int32.
__device__ __forceinline__ void multiply_add(int (&d)[4], const unsigned (&left)[4], unsigned right0, unsigned right1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
