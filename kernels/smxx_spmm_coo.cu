// spmm_coo: sparse A [rows, columns] x dense B [columns, n] -> C [rows, n], A as COO with its entries sorted by row.
// Without atomics: each element of C is added up in one order. v3 and v4 write no rows without entries; C holds zeros.
//
// What bounds it: the L2 cache, which serves a row of B for each entry of A.
//
//   coo_v1  one thread an element of C, neighbouring threads in neighbouring rows; it finds its row by bisection
//   coo_v2  neighbouring threads take neighbouring columns. Any n, any alignment
//   coo_v3  a warp takes SHARE entries for a slab of columns, 16 bytes a lane, and finishes the rows that begin there:
//           equal work but for long rows
//   coo_v4  a warp stops where its entries end. What it has of a row that other warps have, too, it leaves in `carry`;
//           coo_v4_carry adds that up: equal work, whatever the rows are
//
// Worklog: docs/kernels/smxx_spmm_coo.md
#include "spmm.cuh"

#ifndef SHARE
#define SHARE 256
#endif

// The first place whose row is r or a later one.
__device__ __forceinline__ long long first_of(const int* row, long long nnz, int r) {
    long long low = 0, high = nnz;
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (row[middle] < r) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The first place from i on, before `end`, whose row is not r; else `end`. Whole warps.
__device__ __forceinline__ long long run_end(const int* row, long long i, long long end, int r) {
    for (; i < end; i += WARP) {
        const long long at = i + threadIdx.x % WARP;
        const unsigned other = __ballot_sync(ALL_LANES, at >= end || row[at] != r);
        if (other) return i + __ffs(other) - 1;
    }
    return end;
}

#define PARAMETERS                                                                                          \
    const int *__restrict__ row, const int *__restrict__ column, const value_t *__restrict__ value,         \
        const value_t *__restrict__ b, value_t *__restrict__ c, long long nnz, int rows, int n

template <bool DOWN>
__device__ __forceinline__ void one_element(PARAMETERS) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (long long)rows * n) return;
    const int r = (int)(DOWN ? at % rows : at / n), j = (int)(DOWN ? at / rows : at % n);
    sum_t sum = 0;
    for (long long i = first_of(row, nnz, r); i < nnz && row[i] == r; ++i)
        sum = fma((sum_t)to_float(value[i]), (sum_t)to_float(b[(long long)column[i] * n + j]), sum);
    c[(long long)r * n + j] = from_float((float)sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) coo_v1(PARAMETERS) {
    one_element<true>(row, column, value, b, c, nnz, rows, n);
}
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) coo_v2(PARAMETERS) {
    one_element<false>(row, column, value, b, c, nnz, rows, n);
}

// The entries of a warp: first to last - 1.
struct Part {
    long long number, first, last;
    __device__ __forceinline__ Part(long long nnz)
        : number((long long)blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP), first(min(number * SHARE, nnz)),
          last(min(first + SHARE, nnz)) {}
};
// Whether places i - 1 and i hold the same row.
__device__ __forceinline__ bool joined(const int* row, long long i, long long nnz) {
    return i > 0 && i < nnz && row[i - 1] == row[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) coo_v3(PARAMETERS) {
    const Part part(nnz);
    const int j = slab_column();
    long long i = part.first;
    if (joined(row, i, nnz)) i = run_end(row, i, part.last, row[i]);  // whose row began earlier
    while (i < part.last) {
        const int r = row[i];
        const long long end = run_end(row, i, nnz, r);
        SlabSums sums = {};
        add_entries(sums, column, value, i, (int)(end - i), b, n, j);
        if (j < n) sums.store(c + (long long)r * n + j);
        i = end;
    }
}

// carry: [parts, 2, n]; of each part the first row if it began before, and the last one if it begins here and goes on.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) coo_v4(PARAMETERS, sum_t* __restrict__ carry) {
    const Part part(nnz);
    const int j = slab_column();
    for (long long i = part.first; i < part.last;) {
        const int r = row[i];
        const long long end = run_end(row, i, part.last, r);
        SlabSums sums = {};
        add_entries(sums, column, value, i, (int)(end - i), b, n, j);
        const bool earlier = joined(row, i, nnz), later = joined(row, end, nnz);
        if (j < n) {
            if (!earlier && !later) sums.store(c + (long long)r * n + j);
            else {
                sum_t* to = carry + (part.number * 2 + !earlier) * n + j;
#pragma unroll
                for (int k = 0; k < VECTOR; ++k) to[k] = sums.f[k];
            }
        }
        i = end;
    }
}

// For each row that several parts have: what the part has in which it begins, and after it the others in order.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
coo_v4_carry(const int* __restrict__ row, const sum_t* __restrict__ carry, value_t* __restrict__ c, long long nnz, int n) {
    const Part part(nnz);
    const int j = slab_column();
    if (part.first >= nnz || j >= n || !joined(row, part.last, nnz)) return;
    const int r = row[part.last - 1];
    if (joined(row, part.first, nnz) && row[part.first] == r) return;  // it began in an earlier part
    SlabSums sums;
    const sum_t* from = carry + (part.number * 2 + 1) * n + j;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sums.f[k] = from[k];
    for (long long next = part.number + 1; next * SHARE < nnz && row[next * SHARE] == r; ++next) {
        from = carry + next * 2 * n + j;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) sums.f[k] += from[k];
    }
    sums.store(c + (long long)r * n + j);
}
