// The PTX of kernels with turned operands, beyond ptx_sm80.cuh: ldmatrix for tiles that lie turned in shared memory.
#pragma once

// As load_matrices, but of each 8 x 8 tile the transpose: a lane gets two neighbours of one column instead of one row.
__device__ __forceinline__ void load_matrices_turned(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
